"""What the compiler is told: the first set of options that this version of XLA knows."""

import jax

from regard.seq2seq.train import compiler_options

UNKNOWN = {"xla_no_such_option": 1}
KNOWN = {"xla_backend_optimization_level": 0}


def test_options_that_xla_does_not_know_are_passed_over():
    assert compiler_options._first_known((UNKNOWN, KNOWN)) == KNOWN
    assert compiler_options._first_known((UNKNOWN,)) is None


def test_a_program_in_a_hurry_is_compiled_and_the_same():
    assert compiler_options.usual() is None or jax.default_backend() == "gpu"
    options = compiler_options.hurried()
    assert options is not None
    assert jax.jit(lambda x: 2 * x, compiler_options=options)(21) == 42


def test_a_gpu_tries_out_no_kernels(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(compiler_options, "_is_known", lambda options: True)
    assert compiler_options.usual()["xla_gpu_autotune_level"] == 0
    assert compiler_options.hurried() == compiler_options.usual()
    monkeypatch.setattr(compiler_options, "_is_known", lambda options: False)
    assert compiler_options.usual() is None
