"""NaN in the padding of a module's inputs reaches no output and no gradient, kernels included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regard
from regard import linen

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.sampled(2)]

LENS = np.array([7, 3], np.int32)
MODULES = {
    "multi head": linen.MultiHeadAttention(
        num_heads=4, score=("dot", "gaussian", "additive", "additive"), key_heads=4
    ),
    "additive": linen.AdditiveAttention(hidden_features=6),
    "bilinear": linen.BilinearAttention(),
}
MASKS = {
    "lengths": {"valid_lens": LENS},
    "causal and lengths": {"valid_lens": LENS, "mask": regard.Mask.causal()},
    "boolean": {"mask": (np.arange(7) < LENS[:, None])[:, None, :]},
}


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("name", MODULES)
def test_padding_reaches_nothing(name, masks):
    rng = np.random.default_rng(5)
    module, keywords = MODULES[name], dict(MASKS[masks])
    query, key, value = (rng.standard_normal((2, n, 8)).astype(np.float32) for n in (5, 7, 7))
    if name == "multi head" and masks == "boolean":
        keywords["mask"] = keywords["mask"][:, None]  # [B, 1, 1, S]: a mask for every head
    params = module.init(jax.random.key(0), query, key, value, **keywords)

    @jax.jit
    def run(params, query, key, value):
        def loss(params, query, key, value):
            out = module.apply(params, query, key, value, **keywords)
            return jnp.sum(out * jnp.cos(out)), out

        return jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(
            params, query, key, value
        )

    clean = run(params, query, key, value)
    key[1, 3:], value[1, 3:] = np.nan, np.inf
    jax.tree.map(np.testing.assert_array_equal, run(params, query, key, value), clean)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(clean))
