"""A GPU that is not here: calls chosen and lowered for it, and a stand-in for what it would run."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import AbstractDevice, AbstractMesh

from regard import Dot, Softmax, placement
from regard.attend import _pool
from regard.mask import resolve
from regard.placement import Device
from regard.pool import cudnn
from regard.pool.backend import Request
from regard.score.contract import Lift, Score, inner_products

HOPPER = Device("gpu", (9, 0))


def request(axes, mask, lens, **changes):
    """A bfloat16 call on a Hopper GPU, as the backends see it."""
    fields = dict(
        axes=axes,
        score=Dot(),
        normalize=Softmax(),
        dtype=jnp.dtype("bfloat16"),
        value_dtype=jnp.dtype("bfloat16"),
        mask=resolve(mask, lens, axes).facts,
        device=HOPPER,
    )
    return Request(**(fields | changes))


@contextlib.contextmanager
def on_hopper():
    """A call is chosen for, and may be lowered for, a GPU that is not here."""
    with pytest.MonkeyPatch.context() as patch:
        cudnn._refusal_of_jax.cache_clear()
        patch.setattr(placement, "_described", lambda device: HOPPER)
        patch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91900)
        patch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda target: True)
        try:
            yield
        finally:
            cudnn._refusal_of_jax.cache_clear()


def absent_gpus(count=1, *types, axis="x"):
    """A mesh of GPUs that are not here: from JAX 0.12 on, kernels are lowered for a given one."""
    card = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    return AbstractMesh((count,), (axis,), types or None, abstract_device=card)


def lowered(function, *arrays):
    """The text of a program for a GPU that is not here."""
    with jax.sharding.use_abstract_mesh(absent_gpus()):
        return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


@contextlib.contextmanager
def stand_in():
    """jax.nn's XLA attention, in float32, in the place of its call of cuDNN."""
    attention = jax.nn.dot_product_attention

    def by_xla(*tensors, implementation, **keywords):
        assert implementation == "cudnn"
        # 16-bit sums of a CPU are not cuDNN's.
        wide = [None if x is None else x.astype(jnp.float32) for x in tensors]
        return attention(*wide, implementation="xla", **keywords).astype(tensors[0].dtype)

    _pool.clear_cache()
    # It mixes dtypes inside, which the tests otherwise do not allow.
    with jax.numpy_dtype_promotion("standard"), on_hopper(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.nn, "dot_product_attention", by_xla)
        try:
            yield
        finally:
            _pool.clear_cache()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cosine(Score):
    """q.k / |q||k|, as a user writes it: an exact lift, which is NaN where a key is zero."""

    sharpness: float = 4.0

    def scores(self, query, key):
        lift = self.lift(query, key)
        return inner_products(lift.query, lift.key)

    def lift(self, query, key, *, visible=None):
        query, key = (x.astype(jnp.float32) for x in (query, key))
        query, key = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key))
        return Lift(query * self.sharpness, key)
