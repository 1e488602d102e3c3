"""The loss over a vocabulary, without an array of tokens × vocabulary in memory.

Projection, softmax, loss and their gradients are computed together for a few hundred tokens at a
time, while the logits are in cache, and only for tokens that count: padding costs nothing.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from regard.score.contract import accumulation_dtype

# Logits held at once: on a CPU what fits its cache, on a GPU nearly always all.
_AT_ONCE = {"cpu": 5 << 20}
_AT_ONCE_ELSEWHERE = 1 << 28
# Rows of the small chunks, for what the large ones leave; theirs are a multiple of it.
SMALL = 64

Operands = tuple[Array, Array, Array, Array, Array]  # readout, kernel, bias, labels, counts


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def cross_entropy(
    readout: Array,
    kernel: Array,
    bias: Array,
    labels: Array,
    counts: Array,
    smoothing: float = 0.0,
    consistency: float = 0.0,
) -> tuple[Array, Array]:
    """The sum over tokens of the label-smoothed loss, and of −log p(label) itself.

        loss = −(1 − ε) log p(label) − ε/V Σ_v log p(v),    p = softmax(readout kernelᵀ + bias)

    Szegedy et al. 2016, section 7. A token may have been read in two passes, with different
    dropout: then both sums are means over the passes, and the loss also has
    c/2 (KL(p₁ ‖ p₂) + KL(p₂ ‖ p₁)), R-Drop (Liang et al. 2021; their α is 2c, beside the sum of
    both losses). Only the first of the two sums is differentiable.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from regard.seq2seq.train.cross_entropy import cross_entropy
        >>> readout, labels = jnp.zeros((3, 1, 4)), jnp.array([1, 2, 0])
        >>> counts = jnp.array([True, True, False])  # the third is padding
        >>> loss, nll = cross_entropy(readout, jnp.ones((5, 4)), jnp.zeros(5), labels, counts, 0.1)
        >>> bool(jnp.allclose(jnp.array([loss, nll]), 2 * jnp.log(5.0)))
        True

    Args:
        readout: [N, P, E], P = 1 or 2 passes over each of N tokens.
        kernel: [V, E], the output embedding.
        bias: [V].
        labels: [N] integers below V.
        counts: [N] bool, which tokens count; the readouts of the others have no effect.
        smoothing: ε.
        consistency: c, of two passes.
    """
    return _in_chunks((readout, kernel, bias, labels, counts), (smoothing, consistency), False)[0]


def _forward(
    readout: Array,
    kernel: Array,
    bias: Array,
    labels: Array,
    counts: Array,
    smoothing: float,
    consistency: float,
) -> tuple[tuple[Array, Array], tuple[Array, Array, Array]]:
    # The gradient is linear in the loss's cotangent, a scalar, so it can be computed here.
    return _in_chunks((readout, kernel, bias, labels, counts), (smoothing, consistency), True)


def _backward(
    smoothing: float,
    consistency: float,
    gradients: tuple[Array, Array, Array],
    d_sums: tuple[Array, Array],
) -> tuple[Array | None, ...]:
    d_readout, d_kernel, d_bias = (g * d_sums[0].astype(g.dtype) for g in gradients)
    return d_readout, d_kernel, d_bias, None, None


cross_entropy.defvjp(_forward, _backward)


def _in_chunks(operands: Operands, weights: tuple[float, float], with_gradients: bool) -> tuple:
    """The two sums and, on request, the gradients, one chunk of tokens at a time.

    Args:
        weights: smoothing and consistency.
    """
    readout, kernel, bias, labels, counts = operands
    N, P, E = readout.shape
    at_once = _AT_ONCE.get(jax.default_backend(), _AT_ONCE_ELSEWHERE)
    large = max(at_once // (P * kernel.shape[0]) // SMALL * SMALL, SMALL)
    part = functools.partial(_chunk, weights=weights, with_gradients=with_gradients)
    if large >= N:
        loss, nll, gradients = part(operands)
        return (loss, nll), _as(gradients, (readout, kernel, bias))
    # Tokens that count come first, so that the loop can stop after them.
    order = jnp.argsort(~counts, stable=True)
    room = -(-N // SMALL) * SMALL
    padded = jnp.pad(order, (0, room - N), constant_values=N)  # N is no row: out of bounds
    rows = jnp.take(readout, padded, axis=0, mode="fill", fill_value=0)  # [room, P, E]
    labels = jnp.take(labels, padded, mode="fill", fill_value=0)
    total = counts.sum(dtype=jnp.int32)

    def body(chunk: int, state: tuple) -> tuple:
        start, loss, nll, sums = state
        here = jax.lax.dynamic_slice_in_dim(rows, start, chunk)
        there = jax.lax.dynamic_slice_in_dim(labels, start, chunk)
        counted = start + jnp.arange(chunk, dtype=jnp.int32) < total
        more_loss, more_nll, more = part((here, kernel, bias, there, counted))
        if with_gradients:
            sums = (
                jax.lax.dynamic_update_slice_in_dim(sums[0], more[0], start, 0),
                sums[1] + more[1],
                sums[2] + more[2],
            )
        return start + chunk, loss + more_loss, nll + more_nll, sums

    wide = accumulation_dtype(kernel.dtype)
    sums = tuple(jnp.zeros(like.shape, wide) for like in (rows, kernel, bias))
    zero = jnp.zeros((), wide)
    state = (jnp.zeros((), jnp.int32), zero, zero, sums if with_gradients else ())
    # Large chunks while they are full, then small ones, so that few rows are wasted.
    for chunk, spare in ((large, large - 1), (SMALL, 0)):

        def more_to_do(state: tuple, spare: int = spare) -> Array:
            return state[0] + spare < total

        state = jax.lax.while_loop(more_to_do, functools.partial(body, chunk), state)
    _, loss, nll, sums = state
    if not with_gradients:
        return (loss, nll), ()
    back = jnp.zeros((N, P, E), wide).at[order].set(sums[0][:N], unique_indices=True)
    return (loss, nll), _as((back, *sums[1:]), (readout, kernel, bias))


def _as(arrays: tuple, like: tuple) -> tuple:
    """Converts each array to the dtype of its counterpart."""
    return tuple(a.astype(b.dtype) for a, b in zip(arrays, like, strict=bool(arrays)))


def _chunk(operands: Operands, weights: tuple[float, float], with_gradients: bool) -> tuple:
    """Loss, −log p and gradients of one chunk of tokens, [C, P, E]."""
    readout, kernel, bias, labels, counts = operands
    smoothing, consistency = weights
    (C, P, E), V = readout.shape, kernel.shape[0]
    wide = accumulation_dtype(kernel.dtype)
    weight = counts.astype(wide)[:, None, None] / P  # [C, 1, 1]
    readout = jnp.where(counts[:, None, None], readout, 0).astype(kernel.dtype)
    rows = readout.reshape(C * P, E)
    logits = jnp.matmul(rows, kernel.T, preferred_element_type=wide) + bias[None].astype(wide)
    logits = logits.reshape(C, P, V)
    top = logits.max(-1, keepdims=True)
    log_total = top + jnp.log(jnp.exp(logits - top).sum(-1, keepdims=True))  # [C, P, 1]
    label = jnp.take_along_axis(logits, labels[:, None, None], axis=-1)  # [C, P, 1]
    nll = ((log_total - label) * weight).sum()
    mean = logits.mean(-1, keepdims=True) if smoothing else label
    loss = ((log_total - (1.0 - smoothing) * label - smoothing * mean) * weight).sum()
    log_p = logits - log_total
    p = jnp.exp(log_p)
    both = consistency and P == 2
    if both:
        gap = log_p - jnp.flip(log_p, axis=1)  # log p₁/p₂, log p₂/p₁
        divergence = (p * gap).sum(-1, keepdims=True)  # [C, P, 1]: of each from the other
        loss += consistency * (divergence * weight).sum()
    if not with_gradients:
        return loss, nll, ()
    at_label = jnp.arange(V, dtype=labels.dtype)[None, None] == labels[:, None, None]  # [C, 1, V]
    target = jnp.where(at_label, 1.0 - smoothing + smoothing / V, smoothing / V)
    d_logits = p - target
    if both:
        d_logits += consistency * (p * (gap - divergence) + p - jnp.flip(p, axis=1))
    d_rows = (d_logits * weight).astype(kernel.dtype).reshape(C * P, V)
    # As a matrix product: a CPU sums along the first axis ten times slower.
    d_bias = jnp.matmul(jnp.ones((1, C * P), kernel.dtype), d_rows, preferred_element_type=wide)[0]
    d_kernel = jnp.matmul(d_rows.T, rows, preferred_element_type=wide)
    d_readout = jnp.matmul(d_rows, kernel, preferred_element_type=wide).reshape(C, P, E)
    return loss, nll, (d_readout, d_kernel, d_bias)
