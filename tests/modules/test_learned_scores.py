"""Scores of the caller's own inside MultiHeadAttention, with parameters that learn."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import regard
import regard.linen
import regard.nnx
from modules.front_ends import FRONT_ENDS, Module, assert_close, build, initialized

pytestmark = pytest.mark.usefixtures("quick_compilation")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Laplace(regard.Score):
    """-|q - k| · slope / width; `width` may be a number, which stays fixed."""

    slope: jax.Array
    width: float | jax.Array = 1.0

    def scores(self, query, key):
        gap = jnp.abs(query[..., :, None, :] - key[..., None, :, :])  # [..., T, S, D]
        return -jnp.einsum("...tsd,d->...ts", gap, self.slope) / self.width


SLOPE = jnp.asarray([0.5, 2.0, 1.0], jnp.float32)


def module_of(score):
    sizes = dict(num_heads=4, in_features=6, query_head_features=3, value_head_features=2)
    return Module("MultiHeadAttention", sizes | dict(score=score), (6, 6, 6))


in_both = pytest.mark.parametrize("front_end", FRONT_ENDS)


@in_both
def test_the_arrays_of_a_score_are_parameters(front_end):
    """They start as they are, have their own gradient, and plain numbers stay fixed."""
    module = module_of(Laplace(SLOPE, 2.0))
    params = initialized(front_end, module)
    assert set(params["laplace"]) == {"slope"}
    np.testing.assert_array_equal(params["laplace"]["slope"], SLOPE)
    built = build(front_end, module)
    params = built.params
    query, key, _ = module.inputs()

    def project(x, side):
        kernel, bias = params[side]["kernel"], params[side]["bias"]
        return jnp.einsum("bte,enh->btnh", x, kernel) + bias[None, None]

    def wanted(slope):
        return regard.weights(
            project(query, "query"), project(key, "key"), score=Laplace(slope, 2.0)
        )

    def got(slope):
        own = params | {"laplace": {"slope": slope}}
        return built.call(own, query, key, return_weights=True)[1]

    slope = params["laplace"]["slope"]
    assert_close(got(slope), wanted(slope), 2e-6)
    slopes = [jax.grad(lambda s, f=f: jnp.sum(jnp.sin(7 * f(s))))(slope) for f in (got, wanted)]
    assert_close(*slopes, 1e-5)
    assert np.abs(slopes[0]).max() > 1e-4


@in_both
def test_a_function_of_a_key_draws_the_score(front_end):
    """With another seed it is another score; every leaf is learned."""

    def drawn(rng):
        return Laplace(jax.random.uniform(rng, (3,)), 2.0)

    params = initialized(front_end, module_of(drawn))
    assert set(params["laplace"]) == {"slope", "width"}
    assert params["laplace"]["width"] == 2.0
    assert params["laplace"]["slope"].shape == (3,)
    again = initialized(front_end, module_of(lambda rng: drawn(jax.random.fold_in(rng, 1))))
    assert not np.allclose(again["laplace"]["slope"], params["laplace"]["slope"])


def test_heads_share_a_score_or_have_their_own():
    one, other = Laplace(SLOPE), Laplace(2 * SLOPE)
    built = build("nnx", module_of((one, "gaussian", other, one)))
    assert {
        n: g.keys() for n, g in built.params.items() if n not in ("query", "key", "value", "out")
    } == {
        "laplace": {"slope"},
        "gaussian": {"width"},
        "laplace_1": {"slope"},
    }
    assert [group.heads for group in built.module.heads.groups] == [(0, 3), (1,), (2,)]
    x = module_of("dot").inputs()[0]
    assert np.isfinite(built.call(built.params, x)).all()


def test_a_learned_score_of_regards_own_next_to_its_name():
    """An object and the name "gaussian": two groups, two names."""
    built = build("linen", module_of((regard.Gaussian(jnp.float32(2.0)), "gaussian") * 2))
    assert built.params["gaussian"]["width"].shape == (2,)
    assert built.params["gaussian_1"]["width"].shape == ()


def test_training_moves_it_and_jit_does_not_compile_again():
    made = regard.nnx.MultiHeadAttention(
        4, 6, query_head_features=3, value_head_features=2, score=Laplace(SLOPE), rngs=nnx.Rngs(0)
    )
    x, traces = module_of("dot").inputs()[0], []

    @nnx.jit
    def step(made):
        traces.append(1)
        slopes = nnx.grad(lambda made: jnp.sum(jnp.sin(3 * made(x))))(made)
        params = nnx.state(made, nnx.Param)
        nnx.update(made, jax.tree.map(lambda p, s: p - 0.1 * s, params, slopes))

    for _ in range(3):
        step(made)
    assert len(traces) == 1
    assert not np.allclose(made.laplace.slope[...], SLOPE)


def test_decoding_with_a_learned_score():
    built = build("nnx", module_of(Laplace(SLOPE)))
    x = module_of("dot").inputs()[0]
    full = built.call(built.params, x, mask=regard.Mask.causal())
    cache = built.module.init_cache(2, 5)
    for start in (0, 2):
        got, cache = built.call(built.params, x[:, start : start + 2], cache=cache)
        assert_close(got, full[:, start : start + 2], 2e-6)
