"""float32 on a GPU: products follow jax.default_matmul_precision, and `explain` says how."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regard
from absent_gpu import HOPPER
from intermediates import insides
from regard import placement
from regard.placement import Device, on_device
from regard.score.contract import Lift, as_multiplied, matmul_precision, multiplies_in_float32

HIGHEST = jax.lax.Precision.HIGHEST
unset = functools.partial(jax.default_matmul_precision, None)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(placement, "_described", lambda _: HOPPER)
    with unset():
        yield


@pytest.mark.parametrize(
    ("device", "chosen", "exact", "asked", "in_float32"),
    [
        (Device("cpu"), None, False, HIGHEST, True),
        (HOPPER, None, False, None, False),
        (HOPPER, None, True, HIGHEST, True),  # the features of a lift with a tolerance
        (HOPPER, "highest", False, None, True),
        (HOPPER, "float32", False, None, True),
        (HOPPER, "tensorfloat32", True, None, False),
        (HOPPER, "high", False, None, False),
    ],
)
def test_the_setting_decides(device, chosen, exact, asked, in_float32):
    with on_device(device), jax.default_matmul_precision(chosen):
        assert matmul_precision(jnp.float32, exact=exact) is asked
        assert multiplies_in_float32(jnp.float32, exact=exact) == in_float32
        assert matmul_precision(jnp.bfloat16, exact=exact) is None
        assert not multiplies_in_float32(jnp.bfloat16)


def dots(jaxpr, kernel=None):
    """(kernel, precision) of every product inside a kernel."""
    for equation in jaxpr.eqns:
        if kernel and equation.primitive.name == "dot_general":
            yield kernel, str(equation.params["precision"])
        called = equation.primitive.name == "pallas_call"
        for inner in insides(equation):
            yield from dots(inner, equation.params["name"] if called else kernel)


X = jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.float32)


def gradient(x):
    return jax.grad(lambda x: regard.attend(x, x, x, implementation="pallas").sum())(x)


@pytest.mark.parametrize("chosen", [None, "highest", "tensorfloat32"])
def test_kernels_multiply_so(chosen, hopper):
    jax.clear_caches()  # what was traced for another device
    with jax.default_matmul_precision(chosen):
        found = set(dots(jax.make_jaxpr(gradient)(X).jaxpr))
    jax.clear_caches()
    names = {"regard_forward"}
    names |= {"regard_d_scores"} if chosen == "highest" else {"regard_d_keys", "regard_d_queries"}
    assert {name for name, _ in found} == names
    assert all(("HIGHEST" in precision) == (chosen == "highest") for _, precision in found)


@pytest.mark.usefixtures("hopper")
def test_explain_names_it():
    said = regard.explain(X, X, X)
    assert "float32 products in TF32, JAX's default (jax.default_matmul_precision)" in said
    with jax.default_matmul_precision("highest"):
        assert "float32 products by the setting 'highest'" in regard.explain(X, X, X)
    half = jax.ShapeDtypeStruct(X.shape, jnp.bfloat16)
    assert "TF32" not in regard.explain(half, half, half)


def test_a_cpu_has_nothing_to_say():
    x = jnp.zeros(X.shape, jnp.float32)
    if jax.default_backend() == "cpu":
        assert "precision" not in regard.explain(x, x, x)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("tolerance", [None, 1e-3])
def test_additive_float32_takes_the_exact_kernel(tolerance):
    kernel = np.ones((64, 32), np.float32)
    score = regard.Additive(kernel, kernel, kernel[0], tolerance=tolerance)
    said = regard.explain(X, X, X, score=score)
    assert said.startswith("pallas runs: exact tanh in registers")
    half = jax.ShapeDtypeStruct((1, 4096, 64), jnp.bfloat16)
    score = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), score)
    assert "exact tanh" not in regard.explain(half, half, half, score=score)


def test_the_gaussian_knows_the_keys_that_are_multiplied():
    """In TF32 the norm of a key is that of its rounded numbers: the score is the squared distance
    of two points each off by one rounding, however far they lie from the center.
    """
    rng = np.random.default_rng(0)
    query, key = (jnp.asarray(rng.standard_normal((7, 16)) * 30, jnp.float32) for _ in range(2))
    score = regard.Gaussian(jnp.float32(3.0))
    with on_device(HOPPER), unset():
        lift = score.lift(query, key)
        for side in (lift.query, lift.key):
            np.testing.assert_array_equal(side, as_multiplied(side))
    with on_device(Device("cpu")):
        found = lift.scores()
        expected = score.scores(query, key)
        exact = score.lift(query, key)
    assert not np.array_equal(lift.key, exact.key)
    # Squared distances of some 3,000 / 18 known to 2^-11 of a coordinate.
    np.testing.assert_allclose(found, expected, rtol=2e-3)
    assert isinstance(lift, Lift)
    assert float(jnp.max(found)) <= 0.0


@pytest.mark.gpu
@pytest.mark.parametrize(("chosen", "tolerance"), [(None, 2e-3), ("highest", 2e-6)])
@pytest.mark.parametrize("score", [regard.Dot(), regard.Gaussian(np.float32(4.0))], ids=str)
def test_on_a_gpu(score, chosen, tolerance):
    """Output and gradients of float32 in TF32 and in float32, against float64."""
    rng = np.random.default_rng(1)
    given = [jnp.asarray(rng.standard_normal((2, 300, 2, 64))) for _ in range(4)]

    def run(implementation, dtype):
        query, key, value, cotangent = (x.astype(dtype) for x in given)
        pool = functools.partial(regard.attend, score=score, implementation=implementation)
        out, pull = jax.vjp(pool, query, key, value)
        return out, *pull(cotangent)

    with jax.default_matmul_precision(chosen):
        found = run("pallas", jnp.float32)
    for one, other in zip(found, run("reference", jnp.float64), strict=True):
        apart = np.linalg.norm(np.asarray(one, np.float64) - other) / np.linalg.norm(other)
        assert apart < tolerance
