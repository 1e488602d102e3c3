"""A forward pass that is not differentiated copies no queries and keys only to zero padding.

What programs for a GPU zero, read off their jaxprs, and what becomes of that under transforms. That
NaN in the padding reaches nothing: test_pallas_contract.py, test_cudnn_contract.py, test_hopper.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regard
from absent_gpu import on_hopper
from cases import interpreted_kernels
from problem import assert_close
from regard import placement
from regard.attend import _pool
from regard.placement import Device
from regard.pool import cudnn
from regard.pool.pallas import MOSAIC_SINCE

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.sampled(2)]

B, T, S, N, K, D = 2, 256, 512, 4, 2, 64
QUERY, KEY, LENS = (B, N, T, D), (B, K, S, D), jnp.array([300, 0], jnp.int32)
TRIANGULAR = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))  # the first sees nothing


def selects(jaxpr):
    """The shape of every select in a jaxpr, those in the jaxprs of its equations included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "select_n":
            yield equation.outvars[0].aval.shape
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from selects(inner)


def hidden(function, *arrays):
    """How many selects over queries and over keys a program has; keys as wide as no value."""
    found = all_selects(function, *arrays)
    return found.count(QUERY), found.count(KEY)


def all_selects(function, *arrays):
    _pool.clear_cache()
    found = list(selects(jax.make_jaxpr(function)(*arrays).jaxpr))
    assert found, "every program has some, in its kernels if not around them"
    return found


def shapes(V):
    return [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in ((B, T, N, D), (B, S, K, D), (B, S, K, V))
    ]


def gradient(function):
    return jax.grad(lambda *tensors: function(*tensors).astype(jnp.float32).sum(), (0, 1, 2))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["Ampere", "Hopper"])
@pytest.mark.parametrize("lens", [LENS, TRIANGULAR], ids=["lengths", "triangular"])
def test_kernels_zero_queries_and_keys_in_the_backward_pass_only(lens, capability, monkeypatch):
    monkeypatch.setattr(placement, "_described", lambda _: Device("gpu", capability))
    attend = functools.partial(regard.attend, valid_lens=lens, implementation="pallas")
    assert hidden(attend, *shapes(V=128)) == (0, 0)
    queries, keys = hidden(gradient(attend), *shapes(V=128))
    assert queries >= 1
    assert keys >= 1


# Ranges that begin somewhere may leave out keys between two of them.
@pytest.mark.parametrize(
    ("capability", "mask", "copies"),
    [
        ((8, 0), None, 1),
        ((9, 0), None, 0),
        ((9, 0), regard.Mask.causal(), 0),
        ((9, 0), regard.Mask.window(99, 3), 1),
        ((9, 0), np.resize([True, True, False], (B, 1, 1, S)), 1),
    ],
)
def test_values_are_zeroed_in_the_kernel_where_it_can(capability, mask, copies, monkeypatch):
    monkeypatch.setattr(placement, "_described", lambda _: Device("gpu", capability))
    keywords = dict(valid_lens=LENS, mask=mask, implementation="pallas")
    found = all_selects(functools.partial(regard.attend, **keywords), *shapes(V=128))
    by_mosaic = jax.__version_info__ >= MOSAIC_SINCE
    assert found.count((B, K, S, 128)) == (copies if by_mosaic else 1)


@pytest.mark.parametrize("score", [regard.Gaussian(), regard.Dot(jnp.float32(0.1))], ids=str)
def test_kernels_hide_what_a_lift_is_given(score, monkeypatch):
    monkeypatch.setattr(placement, "_described", lambda _: Device("gpu", (9, 0)))
    attend = functools.partial(regard.attend, valid_lens=LENS, implementation="pallas")
    queries, keys = hidden(functools.partial(attend, score=score), *shapes(V=128))
    assert queries >= 1
    assert keys >= 1


@pytest.mark.parametrize(
    ("version", "capability", "alone", "and_back"),
    [
        ((9, 19), (9, 0), (0, 1), (0, 2)),  # gradients are 0 there without a select
        ((9, 19), (8, 0), (1, 2), (2, 4)),
        ((9, 10), (9, 0), (1, 2), (2, 4)),
        ((0,), (9, 0), (1, 2), (2, 4)),
    ],
)
def test_cudnn_zeroes_queries_and_keys_in_the_backward_pass_only(
    version, capability, alone, and_back
):
    """Where it was seen to skip padding. Values are as wide as keys, so one select of that shape
    is theirs.
    """
    with on_hopper(), pytest.MonkeyPatch.context() as patch:  # undone before on_hopper's own
        patch.setattr(cudnn, "_version", lambda: version)
        patch.setattr(placement, "_described", lambda _: Device("gpu", capability))
        attend = functools.partial(regard.attend, valid_lens=LENS, implementation="cudnn")
        assert hidden(attend, *shapes(V=D)) == alone
        assert hidden(gradient(attend), *shapes(V=D)) == and_back


# ---------------------------------------------------------------------------------------------
# Whatever is done to the call.


def drawn(T=24, S=40, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    sizes = ((2, T, 4, 16), (2, S, 2, 16), (2, S, 2, 16))
    return [jnp.asarray(rng.standard_normal(size), dtype) for size in sizes]


def loss(query, key, value, implementation, score=regard.Dot()):
    lens = jnp.array([17, 0], jnp.int32)
    keywords = dict(score=score, valid_lens=lens, implementation=implementation)
    return jnp.square(regard.attend(query, key, value, **keywords)).sum()


def poisoned(query, key, value):
    """NaN wherever lengths of 17 and 0 mask."""
    query = query.at[1].set(jnp.nan)
    return query, *(x.at[0, 17:].set(jnp.nan).at[1].set(jnp.nan) for x in (key, value))


def by_scan(function, *tensors):
    """The sum of twice the same, from a loop."""
    step = lambda total, _: (total + function(*tensors), None)  # noqa: E731
    return jax.lax.scan(step, jnp.float32(0), None, length=2)[0] / 2


TRANSFORMS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: functools.partial(by_scan, f),
    "vmap": lambda f: lambda *x: jax.vmap(f)(*(jnp.stack([a, a]) for a in x)).mean(),
    "vmap of values": lambda f: (
        lambda q, k, v: jax.vmap(f, (None, None, 0))(q, k, jnp.stack([v, v])).mean()
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name):
    with interpreted_kernels():
        tensors = drawn()
        by_kernels = functools.partial(loss, implementation="pallas")
        found = jax.value_and_grad(TRANSFORMS[name](by_kernels), (0, 1, 2))(*poisoned(*tensors))
        alone = TRANSFORMS[name](by_kernels)(*poisoned(*tensors))
        by_definition = functools.partial(loss, implementation="reference")
        expected = jax.value_and_grad(by_definition, (0, 1, 2))(*tensors)
    assert_close(alone, expected[0], 1e-5, "alone")
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(one, other, 1e-5, name)


@pytest.mark.parametrize("scale", [2, 0.5])
def test_a_scale_that_is_a_number_has_no_gradient_of_its_own(scale):
    score = regard.Dot(scale)
    with interpreted_kernels():
        tensors = drawn()
        kernels, definition = (
            jax.grad(functools.partial(loss, implementation=name, score=score), (0, 1, 2))(*tensors)
            for name in ("pallas", "reference")
        )
    for one, other in zip(kernels, definition, strict=True):
        assert_close(one, other, 1e-5, "gradient")
