"""The additive score's contract: the lift is never silently outside its stated tolerance."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import oracle
import regard
from problem import assert_close, rounded
from regard.pool.layout import tiling
from regard.score.additive import lift_anywhere

pytestmark = pytest.mark.sampled(1)


@pytest.fixture
def as_run():
    """For a test of what this device runs of its own accord."""


@pytest.fixture(autouse=True)
def _lift(request):
    """The lift also on a CPU, where the form of test_logistic_form.py is faster."""
    with contextlib.nullcontext() if "as_run" in request.fixturenames else lift_anywhere():
        yield


B, T, S, H, WIDTH, V = 2, 256, 256, 64, 32, 16
LENS = np.array([S, 170], np.int32)


@functools.cache
def drawn(scale=1.0, dtype="float32"):
    """Inputs whose pre-activations x = q W_q and y = k W_k have variance scale^2, in float64."""
    rng = np.random.default_rng(7)
    arrays = {
        "query": rng.standard_normal((B, T, WIDTH)),
        "key": rng.standard_normal((B, S, WIDTH)),
        "value": rng.standard_normal((B, S, V)),
        "query_kernel": scale * rng.standard_normal((WIDTH, H)) / np.sqrt(WIDTH),
        "key_kernel": scale * rng.standard_normal((WIDTH, H)) / np.sqrt(WIDTH),
        "vector": rng.standard_normal(H) / np.sqrt(H),
        "cotangent": rng.standard_normal((B, T, V)),
    }
    return {name: rounded(x, dtype) for name, x in arrays.items()}


def oracle_score(arrays):
    return oracle.Additive(
        {name: arrays[name] for name in ("query_kernel", "key_kernel", "vector")}
    )


@functools.cache
def expected(scale=1.0, dtype="float32"):
    """(out, weights), and the gradients: the oracle's."""
    a = drawn(scale, dtype)
    arguments = {"score": oracle_score(a), "may": oracle.allowed((B, T, S), valid_lens=LENS)}
    tensors = a["query"], a["key"], a["value"]
    return oracle.attend(*tensors, **arguments), oracle.gradients(
        a["cotangent"], *tensors, **arguments
    )


@functools.partial(jax.jit, static_argnames=("tolerance", "implementation"))
def run(arrays, lens, tolerance=None, implementation="blockwise"):
    """Out, gradients by name, and whether the lift ran; forward and backward in one program."""
    cotangent = arrays["cotangent"]

    def pool(arrays):
        score = regard.Additive(
            arrays["query_kernel"], arrays["key_kernel"], arrays["vector"], tolerance=tolerance
        )
        return regard.attend(
            arrays["query"],
            arrays["key"],
            arrays["value"],
            score=score,
            valid_lens=lens,
            implementation=implementation,
            return_lifted=True,
        )

    out, pull, lifted = jax.vjp(pool, arrays, has_aux=True)
    return out, pull(cotangent)[0], lifted


@jax.jit
def run_as_is(arrays, lens):
    """`run` in a program of its own: whether to force the lift is read when it is traced."""
    return run.__wrapped__(arrays, lens)


def as_jax(arrays, dtype="float32"):
    return {name: jnp.asarray(x, dtype) for name, x in arrays.items()}


GRADIENTS = ("query", "key", "value", "query_kernel", "key_kernel", "vector")


@pytest.mark.parametrize(
    ("scale", "tolerance", "forward", "lifts"),
    [
        pytest.param(1.0, None, 2e-6, True, id="unit variance"),
        pytest.param(10.0, None, 1e-5, False, id="ten times, the guard acts"),
        pytest.param(1.0, "exact", 2e-6, False, id="exact"),
    ],
)
def test_float32_against_the_oracle(scale, tolerance, forward, lifts):
    """The issue's numbers: 2e-6, 1e-5 when the guard must act, gradients 1e-4; and the flag
    says which ran.
    """
    out, gradients, lifted = run(as_jax(drawn(scale)), jnp.asarray(LENS), tolerance)
    pooled, slopes = expected(scale)
    assert lifted.shape == ()
    assert lifted.dtype == jnp.bool_
    assert bool(lifted) is lifts
    assert_close(out, pooled.out, forward, "out")
    for name in GRADIENTS:
        assert_close(gradients[name], slopes[name], 1e-4, f"gradient of {name}")


@pytest.mark.usefixtures("as_run")
@pytest.mark.parametrize(("scale", "forward"), [(1.0, 2e-6), (10.0, 1e-5), (100.0, 1e-4)])
def test_float32_as_this_device_runs_it(scale, forward):
    """The issue's numbers once more, without forcing the lift."""
    out, gradients, _ = run_as_is(as_jax(drawn(scale)), jnp.asarray(LENS))
    pooled, slopes = expected(scale)
    assert_close(out, pooled.out, forward, "out")
    for name in GRADIENTS:
        assert_close(gradients[name], slopes[name], 10 * forward + 1e-4, f"gradient of {name}")


@pytest.mark.usefixtures("as_run")
def test_offsets_that_cancel_as_this_device_runs_it():
    """x + 60 and y - 60: e^2x is out of float32's range until it is centered."""
    arrays = offset_by(60.0)
    out, gradients, _ = run_as_is(as_jax(arrays), jnp.asarray(LENS))
    # float32 holds 60 + x to 4e-6 only, before anything of ours.
    assert_close(out, expected()[0].out, 2e-5, "out")
    for name in ("query", "key", "value"):
        wanted = expected()[1][name]
        assert_close(gradients[name][..., : wanted.shape[-1]], wanted, 1e-4, f"gradient of {name}")


def test_a_broken_weight_shows():
    """Negative control: one entry of the vector off by a hundredth is far outside the tolerance."""
    arrays = dict(drawn())
    arrays["vector"] = arrays["vector"].copy()
    arrays["vector"][3] += 0.01
    out, _, _ = run(as_jax(arrays), jnp.asarray(LENS))
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(out, expected()[0].out, 2e-6, "out")


def test_the_reference_never_lifts():
    _, _, lifted = run(as_jax(drawn()), jnp.asarray(LENS), implementation="reference")
    assert not bool(lifted)


def log_weights(arrays, lens, dtype, tolerance=None, bound="worst"):
    """log of the weights and the flag: the scores up to a constant per query, as the lift made
    them.
    """
    score = regard.Additive(
        *(jnp.asarray(arrays[name], dtype) for name in ("query_kernel", "key_kernel", "vector")),
        tolerance=tolerance,
        bound=bound,
    )
    _, weights, lifted = jax.jit(
        functools.partial(
            regard.attend, implementation="blockwise", return_weights=True, return_lifted=True
        )
    )(
        *(jnp.asarray(arrays[name], dtype) for name in ("query", "key", "value")),
        score=score,
        valid_lens=jnp.asarray(lens),
    )
    return np.log(np.asarray(weights, np.float64)), lifted


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        pytest.param("bfloat16", None, id="bfloat16, default"),
        pytest.param("float16", None, id="float16, default"),
        pytest.param("float32", None, id="float32, default"),
        pytest.param("float32", 1e-3, id="float32, 1e-3"),
        pytest.param("float32", 2e-2, id="float32, 2e-2"),
    ],
)
def test_with_the_worst_case_bound_every_score_is_within_the_tolerance(dtype, tolerance):
    """Each tanh within tolerance, so each score within tolerance * |w|_1: the log-weights show it.

    A log-weight is a score less the row's log-sum-exp, and that moves by at most the same amount:
    twice tolerance * |w|_1 in all. Rounding adds eps of float32 on numbers of order |w|_1.
    """
    arrays = drawn(1.0, dtype)
    bound = (
        {"bfloat16": 2**-8, "float16": 2**-11, "float32": 1e-6}[dtype]
        if tolerance is None
        else tolerance
    )
    got, lifted = log_weights(arrays, [S, S], dtype, tolerance)
    assert bool(lifted)
    scores = oracle.scores(arrays["query"], arrays["key"], score=oracle_score(arrays))
    exact = scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))
    l1 = np.abs(arrays["vector"]).sum()
    rounding = 4 * float(ml_dtypes.finfo(np.float32).eps) * l1 + 1e-6
    assert np.abs(got - exact).max() <= 2 * bound * l1 + rounding


def test_a_looser_tolerance_is_looser_and_still_kept():
    """Fewer terms at 1e-2 than at 1e-6: the error between them shows that the tolerance is used
    at all.
    """
    loose, _ = log_weights(drawn(), [S, S], "float32", 1e-2)
    tight, _ = log_weights(drawn(), [S, S], "float32", 1e-6)
    assert 1e-5 < np.abs(loose - tight).max() <= 2e-2 * np.abs(drawn()["vector"]).sum() * 1.01


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_output_and_gradients(dtype):
    """A score off by d moves a weight by a factor within exp(2 d), so the output by (exp(2 d) -
    1) sum w |v|.
    """
    arrays = drawn(1.0, dtype)
    out, gradients, lifted = run(as_jax(arrays, dtype), jnp.asarray(LENS))
    assert bool(lifted)
    assert str(out.dtype) == dtype
    pooled, slopes = expected(1.0, dtype)
    unit = {"bfloat16": 2**-8, "float16": 2**-11}[dtype]
    off = unit * np.abs(arrays["vector"]).sum()
    room = np.expm1(2 * off) * np.einsum("bts,bsv->btv", pooled.weights, np.abs(arrays["value"]))
    np.testing.assert_array_less(
        np.abs(np.asarray(out, np.float64) - pooled.out), room + unit * np.abs(pooled.out) + unit
    )
    for name in GRADIENTS:
        assert_close(gradients[name], slopes[name], 16 * unit, f"gradient of {name}")


def test_float64_is_exact():
    out, gradients, lifted = run(as_jax(drawn(), "float64"), jnp.asarray(LENS))
    assert not bool(lifted)
    assert_close(out, expected()[0].out, 1e-13, "out")
    for name in GRADIENTS:
        assert_close(gradients[name], expected()[1][name], 1e-13, f"gradient of {name}")


def offset_by(offset):
    """A constant input column with a constant kernel row is a bias: +offset on x, -offset on y."""
    arrays = dict(drawn())
    for side, sign in (("query", 1), ("key", -1)):
        ones = np.ones((*arrays[side].shape[:2], 1))
        arrays[side] = np.concatenate([arrays[side], ones], axis=-1)
        row = np.full((1, H), sign * offset)
        arrays[f"{side}_kernel"] = np.concatenate([arrays[f"{side}_kernel"], row])
    return arrays


def test_a_large_offset_between_the_two_sides_cancels():
    """x + 1000 and y - 1000: each is far out of range, their sum is not, and centering knows it."""
    out, _, lifted = run(as_jax(offset_by(1000.0)), jnp.asarray(LENS))
    assert bool(lifted)
    # float32 holds 1000 + x to 6e-5 only, before anything of ours: each pre-activation is off by
    # that.
    assert_close(out, expected()[0].out, 2e-4, "out")


def test_nan_in_a_valid_token_is_not_masked():
    """NaN in a key that takes part reaches its example's output, and no other's."""
    arrays = dict(drawn())
    arrays["key"] = arrays["key"].copy()
    arrays["key"][1, 3, 0] = np.nan
    out, _, _ = run(as_jax(arrays), jnp.asarray(LENS))
    assert np.isnan(np.asarray(out)[1]).all()
    assert np.isfinite(np.asarray(out)[0]).all()


def test_nan_in_a_valid_query_is_not_masked():
    arrays = dict(drawn())
    arrays["query"] = arrays["query"].copy()
    arrays["query"][0, 5, 2] = np.nan
    out, _, _ = run(as_jax(arrays), jnp.asarray(LENS))
    found = np.isnan(np.asarray(out)).all(axis=-1)
    assert found[0, 5]
    assert found.sum() == 1


@pytest.mark.parametrize("garbage", [1e6, np.nan, np.inf])
def test_padding_does_not_trip_the_guard(garbage):
    """Keys past the valid length, far out of range: the lift still runs, and not one bit
    changes.
    """
    arrays = dict(drawn())
    arrays["key"] = arrays["key"].copy()
    arrays["key"][1, LENS[1] :] = garbage
    clean = run(as_jax(drawn()), jnp.asarray(LENS))
    padded = run(as_jax(arrays), jnp.asarray(LENS))
    assert bool(padded[2])
    np.testing.assert_array_equal(padded[0], clean[0])
    for name in GRADIENTS:
        np.testing.assert_array_equal(padded[1][name], clean[1][name], err_msg=name)


def test_one_key_out_of_range_trips_the_guard():
    """Negative control: the same garbage where it takes part, and the definition runs, rightly."""
    arrays = dict(drawn())
    arrays["key"] = arrays["key"].copy()
    arrays["key"][1, 3] = 50.0
    out, gradients, lifted = run(as_jax(arrays), jnp.asarray(LENS))
    assert not bool(lifted)
    may = oracle.allowed((B, T, S), valid_lens=LENS)
    tensors = arrays["query"], arrays["key"], arrays["value"]
    pooled = oracle.attend(*tensors, score=oracle_score(arrays), may=may)
    assert_close(out, pooled.out, 1e-5, "out")
    slopes = oracle.gradients(arrays["cotangent"], *tensors, score=oracle_score(arrays), may=may)
    for name in GRADIENTS:
        assert_close(gradients[name], slopes[name], 1e-4, f"gradient of {name}")


def test_vmap_with_one_example_in_range_and_one_out():
    """Under vmap a branch becomes a choice: each example is right by itself, forward and
    backward.
    """
    near, far = drawn(1.0), drawn(10.0)
    both = jax.tree.map(lambda *x: jnp.stack(x), as_jax(near), as_jax(far))
    outs, gradients, lifted = jax.vmap(run, in_axes=(0, None))(both, jnp.asarray(LENS))
    assert lifted.shape == (2,)
    for i, (scale, forward) in enumerate([(1.0, 2e-6), (10.0, 1e-5)]):
        pooled, slopes = expected(scale)
        assert_close(outs[i], pooled.out, forward, f"out of {i}")
        for name in GRADIENTS:
            assert_close(gradients[name][i], slopes[name], 1e-4, f"gradient of {name} of {i}")
    assert not bool(lifted[1])


@pytest.mark.parametrize("tolerance", [None, "exact", 1e-3])
def test_several_tiles(tolerance):
    """Small tiles, ragged against 256: the guard and the features do not depend on the tiling."""
    with tiling(block_q=96, block_k=80, block_b=1):
        out, gradients, lifted = run.__wrapped__(as_jax(drawn()), jnp.asarray(LENS), tolerance)
    assert bool(lifted) is (tolerance != "exact")
    loose = 1e-3 if tolerance == 1e-3 else 0.0
    assert_close(out, expected()[0].out, 2e-6 + 2 * loose, "out")
    for name in GRADIENTS:
        assert_close(gradients[name], expected()[1][name], 1e-4 + 30 * loose, f"gradient of {name}")


def test_a_short_unit_and_a_wide_unit_take_their_own_range():
    """Units of very different spread: each has its own series, so the wide ones do not spoil
    the narrow.
    """
    arrays = dict(drawn())
    spread = np.geomspace(1e-3, 1.0, H)
    for name in ("query_kernel", "key_kernel"):
        arrays[name] = arrays[name] * spread
    out, _, lifted = run(as_jax(arrays), jnp.asarray(LENS))
    assert bool(lifted)
    may = oracle.allowed((B, T, S), valid_lens=LENS)
    pooled = oracle.attend(
        arrays["query"], arrays["key"], arrays["value"], score=oracle_score(arrays), may=may
    )
    assert_close(out, pooled.out, 2e-6, "out")
