"""The programs that can run a case: regard, and its peers that are installed.

Each is one function from a case and its inputs to a `Program`. One that is not installed or
cannot do the case raises `Absent` with the reason. Adding a peer is one function and one line
in `PEERS`. Here are those that run on JAX; torch's are in torch_peers.py.
"""

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

import regard
from regard.bench.cases.case import Case, Inputs, dense_mask
from regard.bench.peers import kernels
from regard.bench.peers.program import (
    MASKED,
    Absent,
    Program,
    compile_program,
    import_peer,
    needs_memory,
)
from regard.bench.peers.torch_peers import build_flex, build_torch


def regard_score(case: Case, arrays) -> regard.Score:
    """The case's score as regard spells it."""
    if case.score == "dot":
        return regard.Dot()
    if case.score == "gaussian":
        return regard.Gaussian(arrays["width"])
    if case.score == "bilinear":
        return regard.Bilinear(arrays["kernel"])
    return regard.Additive(
        arrays["query_kernel"], arrays["key_kernel"], arrays["vector"], tolerance=case.tolerance
    )


def build_regard(case: Case, inputs: Inputs) -> Program:
    """`regard.attend`, the implementation left to it; for features, the wide kernel alone."""
    if case.score == "features":
        return kernels.build(case, inputs)
    additive, chosen = case.score == "additive", []

    def attention(arrays, valid_lens):
        masks = {
            "causal": regard.Mask.causal,
            "segments": lambda: regard.Mask.segments(valid_lens),
            "packed": lambda: regard.Mask.segments(valid_lens) & regard.Mask.causal(),
            "boolean": lambda: valid_lens if case.N is None else valid_lens[:, None],
        }
        call: Any = dict(
            query=arrays["query"],
            key=arrays["key"],
            value=arrays["value"],
            score=regard_score(case, arrays),
            valid_lens=None if case.mask in masks else valid_lens,
            mask=masks[case.mask]() if case.mask in masks else None,
            bias=arrays.get("bias"),
            normalize=REGIMES[case.normalize],
            dropout_rate=case.dropout,
            dropout_rng=_rng(case, arrays),
            return_lifted=additive,
        )
        chosen.append(regard.explain(**call).splitlines()[0].partition(":")[0])
        return regard.attend(**call)

    program = compile_program(attention, case, inputs, tells_lifted=additive)
    return dataclasses.replace(program, ran=chosen[0].removesuffix(" runs"))


REGIMES: dict[str, regard.Normalizer] = {
    "softmax": regard.Softmax(),
    "sparsemax": regard.Sparsemax(),
    "hard": regard.Hard(),
    "uniform": regard.Uniform(),
    "kernel": regard.Kernel(jax.nn.softplus),
    "cone": regard.Cone(jax.nn.softplus),
}


def _rng(case: Case, arrays) -> Any:
    """A key of the data, so that no compiler draws the dropout before the program runs."""
    if not case.dropout:
        return None
    first = jax.lax.stop_gradient(arrays["query"]).reshape(-1)[0].astype(jnp.float32)
    return jax.random.key(jax.lax.bitcast_convert_type(first, jnp.int32))


def build_lift(case: Case, inputs: Inputs) -> Program:
    """regard by the additive lift, also on a CPU, where it passes the lift over."""
    with _additive().lift_anywhere():
        return build_regard(case, inputs)


def build_unguarded(case: Case, inputs: Inputs) -> Program:
    """The lift without its run-time range check: what the guard costs is the difference."""
    guarded = build_lift(case, inputs)
    with _additive().unguarded():
        program = build_lift(case, inputs)
    if program.text == guarded.text:
        raise Absent("the program without the guard is the same program")
    return program


def _additive():
    # regard.score.additive may be shadowed by a name of the package, hence import_module.
    return importlib.import_module("regard.score.additive")


def build_jax_nn(
    case: Case, inputs: Inputs, implementation: Literal["xla", "cudnn"] = "xla"
) -> Program:
    """jax.nn.dot_product_attention, lowered by XLA, or by cuDNN where there is one."""
    if case.score not in ("dot", "bilinear", "gaussian"):
        raise Absent(f"jax.nn has no {case.score} attention")
    if case.dropout or case.normalize != "softmax":
        raise Absent("jax.nn has no dropout and no other regime than softmax")

    def attention(arrays, valid_lens):
        query, key, value = _with_heads(case, arrays)
        bias = arrays.get("bias")
        bias = bias if bias is None or case.N is not None else bias[:, None]
        if case.score == "gaussian":  # -|q - k|^2 / 2w^2, less what is constant per query
            squares = (key.astype(jnp.float32) ** 2).sum(-1) / (2 * arrays["width"] ** 2)
            squares = jnp.repeat(squares, query.shape[2] // key.shape[2], axis=2)  # [B, S, N]
            by_key = -squares.swapaxes(1, 2)[:, :, None]
            bias = (by_key if bias is None else bias + by_key).astype(query.dtype)
            query = query / arrays["width"] ** 2
        dense = case.mask in ("triangular", "segments", "packed", "boolean") or (
            case.mask == "causal" and case.T != case.S  # jax.nn aligns the start
        )
        out = jax.nn.dot_product_attention(
            query,
            key,
            value,
            bias=bias,
            mask=dense_mask(case, valid_lens) if dense else None,
            scale=None if case.score == "dot" else 1.0,
            is_causal=case.mask == "causal" and not dense,
            key_value_seq_lengths=valid_lens if case.mask in ("lengths", "full") else None,
            implementation=implementation,
        )
        return out if case.N is not None else out[:, :, 0]

    with _lax_promotion():
        return compile_program(attention, case, inputs)


def build_book(case: Case, inputs: Inputs) -> Program:
    """The additive attention of *Dive into Deep Learning* in plain JAX, jitted.

    Its (B, T, S, h) tensor of features and its masking with -1e6, without its dropout.
    """
    if case.score != "additive" or case.N is not None or case.mask == "causal":
        raise Absent("the book's form is additive, without heads, with valid lengths")
    if case.dropout or case.normalize != "softmax":
        raise Absent("the book's form is measured without dropout, and has softmax only")
    needs_memory(case)

    def attention(arrays, valid_lens):
        queries = arrays["query"] @ arrays["query_kernel"]
        keys = arrays["key"] @ arrays["key_kernel"]
        features = jnp.expand_dims(queries, 2) + jnp.expand_dims(keys, 1)
        features = jnp.tanh(features)  # [B, T, S, h]
        scores = (features @ arrays["vector"][:, None])[..., 0]  # [B, T, S]
        if case.bias:
            scores = scores + arrays["bias"]
        if valid_lens is not None:
            masked = jnp.asarray(MASKED if case.dtype != "float16" else -6e4, scores.dtype)
            scores = jnp.where(dense_mask(case, valid_lens)[:, 0], scores, masked)
        return jax.nn.softmax(scores, axis=-1) @ arrays["value"]

    return compile_program(attention, case, inputs)


def build_plain(case: Case, inputs: Inputs) -> Program:
    """What one writes in plain JAX, jitted: whole weights, in float32, by any regime."""
    needs_memory(case)

    def attention(arrays, valid_lens):
        query, key, value = (a.astype(jnp.float32) for a in _with_heads(case, arrays))
        if case.K is not None:
            key, value = (jnp.repeat(a, query.shape[2] // case.K, axis=2) for a in (key, value))
        if case.score == "additive":
            x, y = (
                jnp.einsum("btnd,dh->bnth", side, arrays[f"{name}_kernel"].astype(side.dtype))
                for name, side in (("query", query), ("key", key))
            )
            tanh = jnp.tanh(x[:, :, :, None] + y[:, :, None])  # [B, N, T, S, h]
            scores = tanh @ arrays["vector"].astype(tanh.dtype)
        else:
            scores = jnp.einsum("btnd,bsnd->bnts", query, key)
        if case.score == "dot":
            scores = scores * case.D**-0.5
        elif case.score == "gaussian":
            norms = [(side**2).sum(-1).swapaxes(1, 2) for side in (query, key)]  # [B, N, T or S]
            squares = norms[0][..., :, None] + norms[1][..., None, :] - 2 * scores
            scores = -squares / (2 * arrays["width"].astype(jnp.float32) ** 2)
        if case.bias:
            scores = scores + arrays["bias"].astype(scores.dtype)
        seen = dense_mask(case, valid_lens)
        seen = jnp.ones_like(scores, bool) if seen is None else jnp.broadcast_to(seen, scores.shape)
        weights = _plain_weights(case, scores, seen)
        if case.dropout:
            kept = jax.random.bernoulli(_rng(case, arrays), 1 - case.dropout, weights.shape)
            weights = jnp.where(kept, weights / (1 - case.dropout), 0.0)
        out = jnp.einsum("bnts,bsnv->btnv", weights, value).astype(case.dtype)
        return out if case.N is not None else out[:, :, 0]

    with _lax_promotion():
        return compile_program(attention, case, inputs)


def _plain_weights(case: Case, scores, seen):
    if case.normalize in ("kernel", "cone"):
        values = jnp.where(seen, jax.nn.softplus(scores), 0.0)
        return values if case.normalize == "cone" else values / values.sum(-1, keepdims=True)
    if case.normalize == "uniform":
        return seen / seen.sum(-1, keepdims=True)
    scores = jnp.where(seen, scores, -1e30)
    if case.normalize == "hard":
        return jax.nn.one_hot(scores.argmax(-1), case.S, dtype=scores.dtype)
    if case.normalize == "softmax":
        return jax.nn.softmax(scores)
    ordered = -jnp.sort(-scores, -1)  # sparsemax, by sorting
    before = ordered.cumsum(-1)
    size = (1 + jnp.arange(1, case.S + 1) * ordered > before).sum(-1, keepdims=True)
    threshold = (jnp.take_along_axis(before, size - 1, -1) - 1) / size
    return jnp.maximum(scores - threshold, 0.0)


def build_keras(case: Case, inputs: Inputs) -> Program:
    """Keras on its JAX backend: AdditiveAttention, or ops.dot_product_attention."""
    if case.dropout or case.normalize != "softmax":
        raise Absent("keras's attention is measured without dropout, and has softmax only")
    if case.bias or case.K is not None or case.mask in ("segments", "packed", "boolean"):
        raise Absent("keras's attention is not measured with a bias, key heads or this mask")
    keras = import_peer("keras")
    if keras.backend.backend() != "jax":
        raise Absent(f"keras runs on {keras.backend.backend()} here: set KERAS_BACKEND=jax")
    if case.score == "dot":

        def attention(arrays, valid_lens):
            query, key, value = _with_heads(case, arrays)
            out = keras.ops.dot_product_attention(
                query,
                key,
                value,
                mask=dense_mask(case, valid_lens),
                flash_attention=False,
            )
            return out if case.N is not None else out[:, :, 0]

    elif case.score == "additive" and case.N is None:
        if case.mask not in ("none", "lengths", "full"):
            raise Absent(f"keras's AdditiveAttention has no {case.mask} mask")
        needs_memory(case)
        layer = keras.layers.AdditiveAttention(dtype=case.dtype)
        shapes = [inputs.arrays[name].shape for name in ("query", "value", "key")]
        layer.build(shapes)

        def attention(arrays, valid_lens):
            queries = arrays["query"] @ arrays["query_kernel"]
            keys = arrays["key"] @ arrays["key_kernel"]
            mask = None
            if valid_lens is not None:
                mask = [None, dense_mask(case, valid_lens)[:, 0, 0]]  # [B, S]
            out, _ = layer.stateless_call(
                [arrays["vector"]], [], [queries, arrays["value"], keys], mask=mask
            )
            return out

    else:
        raise Absent(f"keras has no {case.score} attention for this shape")
    with _lax_promotion():
        return compile_program(attention, case, inputs)


PEERS: dict[str, Callable[[Case, Inputs], Program]] = {
    "regard": build_regard,
    "lift": build_lift,
    "unguarded": build_unguarded,
    "jax.nn": build_jax_nn,
    "jax.nn cudnn": functools.partial(build_jax_nn, implementation="cudnn"),
    "book": build_book,
    "plain": build_plain,
    "keras": build_keras,
    "torch": build_torch,
    "flex": build_flex,
}


def framework(who: str) -> str:
    """The framework that a peer runs on: on a GPU, each has a process of its own.

    FlexAttention, which compiles for seconds, does not keep the rest of torch waiting.
    """
    return who if who in ("torch", "flex") else "jax"


def build(who: str, case: Case, inputs: Inputs) -> Program:
    """Prepares one program.

    Raises:
        Absent: `who` is not installed or cannot do this case.
    """
    return PEERS[who](case, inputs)


@contextlib.contextmanager
def _lax_promotion():
    """The code of others leans on promotions that a strict JAX forbids, as our tests' does."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def _with_heads(case: Case, arrays):
    """query, key, value as (B, T, N, D); a bilinear kernel goes into the query."""
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    if case.score == "bilinear":
        query = query @ arrays["kernel"]
    if case.N is None:
        query, key, value = (x[:, :, None] for x in (query, key, value))
    return query, key, value
