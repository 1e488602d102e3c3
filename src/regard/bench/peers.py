"""Everybody who can do a case: regard, and the others that are installed.

Each is one function from a case and its inputs to a `Program`. One that is not installed or
cannot do the case raises `Absent` with the reason. Adding a peer is one function and one line
in `PEERS`.
"""

import contextlib
import importlib
import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import regard
from regard.bench.cases import Case, Inputs
from regard.bench.program import Absent, Program, compile_program

MASKED = -1e6  # what the book writes over masked scores


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
    """`regard.attend`, the implementation left to it."""
    additive = case.score == "additive"

    def attention(arrays, valid_lens):
        return regard.attend(
            arrays["query"],
            arrays["key"],
            arrays["value"],
            score=regard_score(case, arrays),
            valid_lens=valid_lens,
            mask=regard.Mask.causal() if case.mask == "causal" else None,
            return_lifted=additive,
        )

    return compile_program(attention, case, inputs, tells_lifted=additive)


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


def build_jax_nn(case: Case, inputs: Inputs) -> Program:
    """jax.nn.dot_product_attention, lowered by XLA."""
    if case.score not in ("dot", "bilinear"):
        raise Absent(f"jax.nn has no {case.score} attention")

    def attention(arrays, valid_lens):
        query, key, value = _with_heads(case, arrays)
        out = jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=_dense_mask(case, valid_lens) if case.mask == "triangular" else None,
            scale=1.0 if case.score == "bilinear" else None,
            is_causal=case.mask == "causal",
            key_value_seq_lengths=valid_lens if case.mask == "lengths" else None,
            implementation="xla",
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
    _needs_memory(case, inputs)

    def attention(arrays, valid_lens):
        queries = arrays["query"] @ arrays["query_kernel"]
        keys = arrays["key"] @ arrays["key_kernel"]
        features = jnp.expand_dims(queries, 2) + jnp.expand_dims(keys, 1)
        features = jnp.tanh(features)  # [B, T, S, h]
        scores = (features @ arrays["vector"][:, None])[..., 0]  # [B, T, S]
        if valid_lens is not None:
            masked = jnp.asarray(MASKED, scores.dtype)
            scores = jnp.where(_dense_mask(case, valid_lens)[:, 0], scores, masked)
        return jax.nn.softmax(scores, axis=-1) @ arrays["value"]

    return compile_program(attention, case, inputs)


def build_keras(case: Case, inputs: Inputs) -> Program:
    """Keras on its JAX backend: AdditiveAttention, or ops.dot_product_attention."""
    keras = _import("keras")
    if keras.backend.backend() != "jax":
        raise Absent(f"keras runs on {keras.backend.backend()} here: set KERAS_BACKEND=jax")
    if case.score == "dot":

        def attention(arrays, valid_lens):
            query, key, value = _with_heads(case, arrays)
            out = keras.ops.dot_product_attention(
                query,
                key,
                value,
                mask=_dense_mask(case, valid_lens),
                flash_attention=False,
            )
            return out if case.N is not None else out[:, :, 0]

    elif case.score == "additive" and case.N is None:
        if case.mask not in ("none", "lengths"):
            raise Absent(f"keras's AdditiveAttention has no {case.mask} mask")
        _needs_memory(case, inputs)
        layer = keras.layers.AdditiveAttention(dtype=case.dtype)
        shapes = [inputs.arrays[name].shape for name in ("query", "value", "key")]
        layer.build(shapes)

        def attention(arrays, valid_lens):
            queries = arrays["query"] @ arrays["query_kernel"]
            keys = arrays["key"] @ arrays["key_kernel"]
            mask = None
            if valid_lens is not None:
                mask = [None, _dense_mask(case, valid_lens)[:, 0, 0]]  # [B, S]
            out, _ = layer.stateless_call(
                [arrays["vector"]], [], [queries, arrays["value"], keys], mask=mask
            )
            return out

    else:
        raise Absent(f"keras has no {case.score} attention for this shape")
    with _lax_promotion():
        return compile_program(attention, case, inputs)


def build_torch(case: Case, inputs: Inputs) -> Program:
    """torch: scaled_dot_product_attention, or the book's additive form, eager, on all cores."""
    torch = _import("torch")
    if case.score not in ("dot", "additive"):
        raise Absent(f"torch has no {case.score} attention")
    if case.score == "additive" and (case.N is not None or case.mask == "causal"):
        raise Absent("torch's additive form is the book's: no heads, valid lengths")
    if case.score == "additive":
        _needs_memory(case, inputs)
    dtype = getattr(torch, case.dtype)
    # SDPA wants [B, N, T, D]; it gets contiguous arrays of that layout, made beforehand.
    heads_first = case.score == "dot"

    def to_torch(array, swap):
        tensor = torch.from_numpy(np.asarray(array).astype(np.float64)).to(dtype)
        if swap:
            tensor = tensor[:, :, None] if case.N is None else tensor
            tensor = tensor.transpose(1, 2).contiguous()
        return tensor

    def to_numpy(tensor, swap):
        array = tensor.detach().to(torch.float64).numpy()
        if swap:
            array = array.swapaxes(1, 2)
            array = array[:, :, 0] if case.N is None else array
        return array

    tensors = {
        name: to_torch(array, heads_first).requires_grad_(case.backward)
        for name, array in inputs.arrays.items()
    }
    mask = None
    if case.mask in ("lengths", "triangular"):
        mask = torch.from_numpy(np.array(_dense_mask(case, inputs.valid_lens)))
        mask = mask if heads_first else mask[:, 0]

    def forward():
        query, key, value = (tensors[name] for name in ("query", "key", "value"))
        if case.score == "dot":
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=case.mask == "causal"
            )
        queries, keys = query @ tensors["query_kernel"], key @ tensors["key_kernel"]
        features = torch.tanh(queries.unsqueeze(2) + keys.unsqueeze(1))  # [B, T, S, h]
        scores = features @ tensors["vector"]
        if mask is not None:
            scores = scores.masked_fill(~mask, MASKED)
        return torch.softmax(scores, dim=-1) @ value

    def run_under(cotangent):
        if not case.backward:
            with torch.no_grad():
                return forward(), ()
        out = forward()
        return out, torch.autograd.grad(out, list(tensors.values()), cotangent)

    cotangent = to_torch(inputs.cotangent, heads_first)

    def outputs():
        out, grads = run_under(to_torch(inputs.checked_cotangent, heads_first))
        results = {"out": to_numpy(out, heads_first)[:, inputs.rows]}
        for name, grad in zip(tensors, grads, strict=False):
            results[f"d_{name}"] = to_numpy(grad, heads_first)
        return results

    return Program(run=lambda: run_under(cotangent), outputs=outputs)


PEERS: dict[str, Callable[[Case, Inputs], Program]] = {
    "regard": build_regard,
    "lift": build_lift,
    "unguarded": build_unguarded,
    "jax.nn": build_jax_nn,
    "book": build_book,
    "keras": build_keras,
    "torch": build_torch,
}


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


def _import(name: str):
    # Keras reads its backend once, when first imported.
    os.environ.setdefault("KERAS_BACKEND", "jax")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Absent(f"{name} is not installed ({error})") from None


def _with_heads(case: Case, arrays):
    """query, key, value as (B, T, N, D); a bilinear kernel goes into the query."""
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    if case.score == "bilinear":
        query = query @ arrays["kernel"]
    if case.N is None:
        query, key, value = (x[:, :, None] for x in (query, key, value))
    return query, key, value


def _dense_mask(case: Case, valid_lens):
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


def _needs_memory(case: Case, inputs: Inputs) -> None:
    """Refuses a (B, T, S, h) tensor that would not fit; the system would kill us instead."""
    if not case.timed:
        return
    copies = 3 if case.backward else 2
    needed = case.terms * inputs.arrays["query"].dtype.itemsize * copies
    free = _free_memory()
    if free is not None and needed > 0.8 * free:
        raise Absent(f"needs about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")


def _free_memory() -> int | None:
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
