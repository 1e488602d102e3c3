"""The masks of cases as dense booleans, for peers that want them so."""

from typing import Any

import jax.numpy as jnp

from regard.bench.cases.case import Case


def dense_mask(case: Case, valid_lens: Any) -> Any:
    """The mask as booleans [B or 1, 1, T or 1, S]; None without one."""
    keys = jnp.arange(case.S, dtype=jnp.int32)
    if case.mask == "causal":
        last = jnp.arange(case.T, dtype=jnp.int32)[:, None] + (case.S - case.T)
        return (keys[None, :] <= last)[None, None]
    if valid_lens is None:
        return None
    lens = jnp.asarray(valid_lens)
    lens = lens[:, None, None, None] if lens.ndim == 1 else lens[:, None, :, None]
    return keys[None, None, None, :] < lens
