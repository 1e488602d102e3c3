"""The benchmark's own right answers against the oracle's: forward and every gradient."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from regard.bench.cases.case import Case, make_inputs
from regard.bench.cases.expected import allowed_error, expected, float64, relative_errors

TINY = Case("tiny", "dot", B=2, T=5, S=7, D=4, V=3, direction="forward+backward")
SCORES = {
    "dot": oracle.Dot,
    "gaussian": oracle.Gaussian,
    "bilinear": oracle.Bilinear,
    "additive": oracle.Additive,
}


def ask_oracle(case, inputs, cotangent):
    """The oracle's answer in the form of `expected`, at all rows."""
    arrays = {name: array.astype(np.float64) for name, array in inputs.arrays.items()}
    inputs_of_all = [arrays.pop(name) for name in ("query", "key", "value")]
    score = SCORES[case.score](arrays)
    shape = oracle.weights_shape(*inputs_of_all[:2])
    causal = "end" if case.mask == "causal" else None
    may = oracle.allowed(shape, valid_lens=inputs.valid_lens, causal=causal)
    out = oracle.attend(*inputs_of_all, score=score, may=may).out
    grads = oracle.gradients(cotangent.astype(np.float64), *inputs_of_all, score=score, may=may)
    return {"out": out} | {f"d_{name}": grad for name, grad in grads.items()}


@pytest.mark.parametrize("mask", ["none", "causal", "lengths", "triangular"])
@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("score", list(SCORES))
def test_equals_the_oracle(score, heads, mask):
    case = dataclasses.replace(TINY, score=score, N=heads, mask=mask)
    inputs = make_inputs(case)
    got, want = expected(case, inputs), ask_oracle(case, inputs, inputs.cotangent)
    assert set(got) == set(want) == {"out"} | {f"d_{name}" for name in inputs.arrays}
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-10, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("score", list(SCORES))
def test_some_rows_only_and_block_by_block(score, monkeypatch):
    monkeypatch.setattr("regard.bench.cases.expected.BLOCK_TERMS", 2 * TINY.S)
    case = dataclasses.replace(TINY, score=score, T=9)
    rows, keys = np.array([0, 2, 3, 8]), np.array([1, 6])
    inputs = dataclasses.replace(make_inputs(case), rows=rows, keys=keys)
    got, whole = expected(case, inputs), ask_oracle(case, inputs, inputs.checked_cotangent)
    want = {name: inputs.checked(name, array) for name, array in whole.items()}
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-10, atol=1e-12, err_msg=name)


def test_features_are_a_dot_product_without_a_scale():
    case = dataclasses.replace(TINY, score="features")
    inputs = make_inputs(case)
    scaled = dict(inputs.arrays, query=inputs.arrays["query"].astype(np.float64) * case.D**0.5)
    dot = expected(
        dataclasses.replace(case, score="dot"), dataclasses.replace(inputs, arrays=scaled)
    )
    got = expected(case, inputs)
    np.testing.assert_allclose(got["out"], dot["out"], rtol=1e-12)
    np.testing.assert_allclose(got["d_key"], dot["d_key"], rtol=1e-12)
    np.testing.assert_allclose(got["d_query"], dot["d_query"] * case.D**0.5, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_float64_keeps_every_number(dtype):
    array = np.array([[0.0, -1.5, 3e-3], [np.inf, 65504.0, -0.0]]).astype(jnp.dtype(dtype))
    for part in (array, array[:, ::2], array[1, 1]):
        np.testing.assert_array_equal(float64(np.asarray(part)), part.astype(np.float64))


def test_a_query_that_sees_nothing_gets_zero():
    inputs = make_inputs(dataclasses.replace(TINY, mask="lengths"))
    inputs = dataclasses.replace(inputs, valid_lens=np.array([0, 3], np.int32))
    for name, answer in expected(TINY, inputs).items():
        assert np.isfinite(answer).all(), name
        np.testing.assert_array_equal(answer[0], 0, err_msg=name)


def test_forward_has_no_gradients():
    case = dataclasses.replace(TINY, direction="forward")
    assert set(expected(case, make_inputs(case))) == {"out"}


def test_a_wrong_shape_is_named():
    with pytest.raises(ValueError, match=r"out must have .* Got \[3\], right answer \[2\]"):
        relative_errors({"out": np.zeros(3)}, {"out": np.zeros(2)})


def test_a_gpu_may_multiply_float32_with_the_mantissa_of_float16():
    float32 = dataclasses.replace(TINY, device="gpu")
    assert allowed_error(TINY) < allowed_error(float32)
    assert allowed_error(float32) == allowed_error(dataclasses.replace(TINY, dtype="float16"))
    hard = dataclasses.replace(float32, normalize="hard")
    assert allowed_error(float32) < allowed_error(hard) < 1.0


def test_a_tolerance_widens_what_is_allowed():
    additive = dataclasses.replace(TINY, score="additive", direction="forward")
    loose = dataclasses.replace(additive, tolerance=1e-2)
    assert allowed_error(loose) > allowed_error(additive)
    assert allowed_error(dataclasses.replace(additive, tolerance="exact")) == allowed_error(
        additive
    )
