"""Compiler options: the first set that this version of XLA knows."""

import jax

from regard.seq2seq.train import runtime_options

UNKNOWN = {"xla_no_such_option": 1}
KNOWN = {"xla_backend_optimization_level": 0}


def test_options_that_xla_does_not_know_are_passed_over():
    assert runtime_options._first_known((UNKNOWN, KNOWN)) == KNOWN
    assert runtime_options._first_known((UNKNOWN,)) is None


def test_a_program_at_optimization_level_0_computes_the_same():
    assert runtime_options.optimized() is None or jax.default_backend() == "gpu"
    options = runtime_options.unoptimized()
    assert options is not None
    assert jax.jit(lambda x: 2 * x, compiler_options=options)(21) == 42


def test_a_gpu_autotunes_no_kernels(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(runtime_options, "_is_known", lambda options: True)
    assert runtime_options.optimized()["xla_gpu_autotune_level"] == 0
    assert runtime_options.unoptimized() == runtime_options.optimized()
    monkeypatch.setattr(runtime_options, "_is_known", lambda options: False)
    assert runtime_options.optimized() is None
