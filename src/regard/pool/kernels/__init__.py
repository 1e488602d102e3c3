"""Pallas kernels: softmax pooling over tiles whose scores are inner products, or sums of tanh.

feature_pass.py   pads, picks the kernels, computes d features; features.py and
                  narrow_features.py make the features
forward.py        online softmax over tiles (Triton lowering, Ampere and later)
hopper.py         the same for Hopper GPUs (Mosaic GPU lowering)
backward_wide.py  the backward pass up to d scores
backward_narrow.py  the whole backward pass, for narrow features
weight_summary.py summaries and pictures of the weights, without values
decode_pass.py    few queries, by decode.py: keys split over thread blocks, read where they lie
tanh_pass.py      the same pooling with tanh in registers; tanh_*.py are its parts
tile.py           one tile, and how a kernel is run; padding.py, block_shapes.py its arrays, sizes
"""

import warnings

from jax import Array

# JAX 0.11 says so whenever it lowers a kernel through Triton. Whoever turns warnings into errors
# could not use these kernels.
warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)


def pool_features(phi: Array, psi: Array, value: Array, *, device: str = "hopper") -> Array:
    """Softmax pooling over features alone: what the benchmark times as the wide kernel.

    Args:
        phi: [E, G, T, R].
        psi: [E, S, R].
        value: [E, S, V].
        device: as in `FeaturePass`.

    Returns:
        [E, G, T, V], differentiable.
    """
    # Imported when first used: loading Pallas takes a tenth of `import regard`.
    from regard.mask import Allowed
    from regard.placement import Device
    from regard.pool.kernels.block_shapes import current_blocks
    from regard.pool.kernels.feature_pass import FeatureOperands, FeaturePass
    from regard.pool.score_plan import Passes, pool_by
    from regard.shapes import Axes

    (E, G, T, R), (_, S, V) = phi.shape, value.shape
    axes = Axes(rank=4, B=E, T=T, S=S, N=G, K=1, query_width=R, key_width=R, V=V)
    one = FeaturePass(axes, phi.dtype, 1.0, 0.0, device, current_blocks())
    operands = FeatureOperands(None, phi, psi[:, None], None, value[:, None])
    platform = Device("cpu" if device == "interpret" else "gpu")
    static = Passes((one,), platform, value.dtype, branch=True, sharded=False)
    return pool_by(static, (operands,), Allowed(None, None, (), ()), None, None)
