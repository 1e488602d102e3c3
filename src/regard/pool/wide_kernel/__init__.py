"""Pallas kernels for wide features: softmax pooling whose scores are inner products of any width.

forward.py      online softmax over tiles (Triton lowering, Ampere and later)
hopper.py       the same for Hopper GPUs (Mosaic GPU lowering)
d_scores.py     the way back to the scores
narrow_back.py  the whole way back, for narrow features
wide_pass.py    pads, picks, and turns d scores into d features
"""

from jax import Array


def pool_features(phi: Array, psi: Array, value: Array, *, device: str = "hopper") -> Array:
    """Softmax pooling over features alone: what the benchmark times as the wide kernel.

    Args:
        phi: [E, G, T, R].
        psi: [E, S, R].
        value: [E, S, V].
        device: as in `WidePass`.

    Returns:
        [E, G, T, V], differentiable.
    """
    # Imported when first used: loading Pallas takes a tenth of `import regard`.
    from regard.mask import Allowed
    from regard.pool.passes import Static, pool_by
    from regard.pool.wide_kernel.blocks import current_blocks
    from regard.pool.wide_kernel.wide_pass import WideOperands, WidePass
    from regard.shapes import Axes

    (E, G, T, R), (_, S, V) = phi.shape, value.shape
    axes = Axes(rank=4, B=E, T=T, S=S, N=G, K=1, query_width=R, key_width=R, V=V)
    wide = WidePass(axes, phi.dtype, 1.0, 0.0, device, current_blocks())
    operands = WideOperands(None, phi, psi[:, None], None, value[:, None])
    static = Static((wide,), branch=True, dtype=value.dtype)
    return pool_by(static, (operands,), (Allowed(None, None, (), ()),), None, None)
