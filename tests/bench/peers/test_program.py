"""Programs in their three directions, and many runs of one in a single launch."""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from regard.bench.cases.case import Case, make_inputs, useful_flops
from regard.bench.cases.expected import expected, relative_errors
from regard.bench.peers import program as programs
from regard.bench.peers.jax_peers import build
from regard.bench.peers.program import BUNDLED, chain, compile_program, on_device, turned
from regard.bench.run.timing import DeviceClock

pytestmark = pytest.mark.sampled(3)

DOT = Case("tiny", "dot", B=2, T=6, S=6, D=4, V=4, N=3)


def plain(arrays, valid_lens):
    """softmax(q kᵀ / sqrt d) v, for the heads of the case."""
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    scores = jnp.einsum("btnd,bsnd->bnts", query, key) * 0.5
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores), value)


@pytest.mark.parametrize("direction", ["forward", "backward", "forward+backward"])
def test_every_direction_gives_the_same_numbers(direction):
    case = dataclasses.replace(DOT, direction=direction)
    inputs = make_inputs(case)
    program = compile_program(plain, case, inputs)
    got, want = program.outputs(), expected(case, inputs)
    assert set(got) == set(want)
    assert max(relative_errors(got, want).values()) < 1e-5


def test_the_backward_pass_alone_does_not_make_the_output_again():
    inputs = make_inputs(DOT)
    alone, both = (
        compile_program(plain, dataclasses.replace(DOT, direction=direction), inputs).text
        for direction in ("backward", "forward+backward")
    )
    assert "exponential" in both
    assert "exponential" not in alone


def test_programs_share_their_arrays_while_one_of_them_lives():
    array = np.ones((64, 64), np.float32)
    one, other = on_device(array), on_device(array)
    assert one is other
    assert on_device(array.copy()) is not one
    key = id(array)
    del array, one, other
    gc.collect()
    assert key not in programs._placed


def test_a_chain_turns_the_arrays():
    def step(cotangent, arrays, valid_lens):
        return {"out": arrays["query"] + arrays["key"]}, True

    one = jnp.ones(3, jnp.float32)
    kept = chain(step)(None, {"query": one, "key": 0 * one, "value": one}, None)
    fibonacci = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89]
    np.testing.assert_array_equal([results["out"][0] for results, _ in kept], fibonacci[:BUNDLED])


@pytest.mark.parametrize("sizes", [dict(T=1), dict(V=5), dict(T=2, N=4, K=2)])
def test_every_run_of_a_chain_has_other_keys(sizes):
    case = dataclasses.replace(DOT, **sizes)
    arrays = make_inputs(case).arrays
    out = jnp.zeros((*arrays["query"].shape[:-1], case.V), jnp.float32)
    later = turned(arrays, out)
    assert {name: a.shape for name, a in later.items()} == {n: a.shape for n, a in arrays.items()}
    assert np.any(np.asarray(later["key"]) != arrays["key"])
    assert build("regard", case, make_inputs(case)).run.bundle is not None


def test_nothing_is_made_once_for_all_runs_of_a_chain():
    """What depends on the keys alone is made again in every run, as it would be by a caller."""

    def step(cotangent, arrays, valid_lens):
        features = arrays["key"] @ arrays["kernel"]
        return {"out": arrays["query"] + features * arrays["value"]}, True

    arrays = dict.fromkeys(("query", "key", "value", "kernel"), jnp.ones((8, 8), jnp.float32))
    text = jax.jit(chain(jax.jit(step))).lower(None, arrays, None).compile().as_text()
    assert text.count(" dot(") == BUNDLED


@pytest.mark.parametrize("who", ["regard", "jax.nn"])
def test_a_device_clock_reads_a_program(who):
    case = dataclasses.replace(DOT, direction="forward+backward")
    run = build(who, case, make_inputs(case)).run
    clock = DeviceClock(least=1e-3, short=1.0)  # everything is short: bundled
    assert 0 < clock(run) < 1.0
    assert run.bundle() is run.bundle()  # compiled once


@pytest.mark.parametrize(
    "case",
    [dataclasses.replace(DOT, V=5, T=2), dataclasses.replace(DOT, direction="backward")],
)
def test_what_cannot_be_chained_has_no_bundle(case):
    assert build("regard", case, make_inputs(case)).run.bundle is None


def test_useful_operations():
    def of(**changes):
        return useful_flops(dataclasses.replace(DOT, **changes))

    pairs = 2 * 3 * 6 * 6
    assert of() == 2 * pairs * (4 + 4)
    assert of(V=5) == 2 * pairs * (4 + 5)
    assert of(direction="backward") == 2 * pairs * (3 * 4 + 2 * 4)
    assert of(direction="forward+backward") == of() + of(direction="backward")
    assert of(mask="causal") == of(mask="triangular") == of() * 21 / 36
    assert of(mask="lengths") == of() / 2
    assert of(mask="causal", S=8) == 2 * 2 * 3 * (3 + 4 + 5 + 6 + 7 + 8) * 8
    assert of(score="additive") is None


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_kernel_alone_is_a_row_while_there_is_none(direction, monkeypatch):
    monkeypatch.setattr("regard.bench.peers.kernels.WIDE_KERNEL", "regard.pool.no_such_kernel")
    from regard.bench.run.measure import Settings, measure_cases

    case = Case("kernel", "features", B=1, T=8, S=8, D=16, V=4, group="kernel", direction=direction)
    (row,) = measure_cases([case], Settings(repeats=1))
    assert "regard.pool.no_such_kernel.pool_features is not there" in row.absent
