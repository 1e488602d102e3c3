"""Bad input, at the front door: each message says the rule, every array with its shape, and the
fix.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regard


def ones(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


Q, K, V = ones(2, 3, 4), ones(2, 5, 4), ones(2, 5, 6)
Q4, K4, V4 = ones(2, 3, 4, 8), ones(2, 5, 2, 8), ones(2, 5, 2, 6)
KEYS = jax.random.split(jax.random.key(0), 2)
KERNEL, VECTOR = ones(4, 7), ones(7)
attend = partial(regard.attend, Q, K, V)
attend_heads = partial(regard.attend, Q4, K4, V4)

# name: (call, exception, every text that must be in the message)
BAD = {
    # ranks and sizes
    "ranks differ": (
        lambda: regard.attend(ones(2, 3, 4), ones(5, 4), ones(5, 6)),
        ValueError,
        [
            "rank",
            "(T, D), (B, T, D) or (B, T, N, D)",
            "query [2, 3, 4]",
            "key [5, 4]",
            "value [5, 6]",
        ],
    ),
    "rank 1": (
        lambda: regard.attend(ones(4), ones(4), ones(4)),
        ValueError,
        ["rank", "(T, D), (B, T, D) or (B, T, N, D)", "query [4]", "key [4]", "value [4]"],
    ),
    "rank 5": (
        lambda: regard.attend(ones(1, 1, 2, 3, 4), ones(1, 1, 2, 3, 4), ones(1, 1, 2, 3, 4)),
        ValueError,
        [
            "(T, D), (B, T, D) or (B, T, N, D)",
            "query [1, 1, 2, 3, 4]",
            "key [1, 1, 2, 3, 4]",
            "value [1, 1, 2, 3, 4]",
        ],
    ),
    "lengths differ": (
        lambda: regard.attend(ones(2, 3, 4, 64), ones(2, 7, 4, 64), ones(2, 9, 4, 64)),
        ValueError,
        ["key and value must have the same length S", "key [2, 7, 4, 64]", "value [2, 9, 4, 64]"],
    ),
    "lengths differ at rank 2": (
        lambda: regard.attend(ones(3, 4), ones(5, 4), ones(6, 4)),
        ValueError,
        ["key and value must have the same length S", "key [5, 4]", "value [6, 4]"],
    ),
    "batch sizes differ": (
        lambda: regard.attend(ones(2, 3, 4), ones(1, 5, 4), ones(2, 5, 6)),
        ValueError,
        ["same batch size B", "query [2, 3, 4]", "key [1, 5, 4]", "value [2, 5, 6]"],
    ),
    "key and value heads differ": (
        lambda: regard.attend(ones(2, 3, 4, 8), ones(2, 5, 2, 8), ones(2, 5, 4, 8)),
        ValueError,
        ["heads", "K", "key [2, 5, 2, 8]", "value [2, 5, 4, 8]"],
    ),
    "key heads do not divide": (
        lambda: regard.attend(ones(2, 3, 4, 8), ones(2, 5, 3, 8), ones(2, 5, 3, 8)),
        ValueError,
        ["must divide", "N", "query [2, 3, 4, 8]", "key [2, 5, 3, 8]", "value [2, 5, 3, 8]"],
    ),
    "no key heads": (
        lambda: regard.attend(ones(2, 3, 4, 8), ones(2, 5, 0, 8), ones(2, 5, 0, 8)),
        ValueError,
        ["must divide", "query [2, 3, 4, 8]", "key [2, 5, 0, 8]"],
    ),
    "weights: ranks differ": (
        lambda: regard.weights(ones(2, 3, 4), ones(5, 4)),
        ValueError,
        ["rank", "query [2, 3, 4]", "key [5, 4]"],
    ),
    "scores: ranks differ": (
        lambda: regard.scores(ones(2, 3, 4), ones(5, 4)),
        ValueError,
        ["rank", "query [2, 3, 4]", "key [5, 4]"],
    ),
    "summarize: batch sizes differ": (
        lambda: regard.summarize(ones(2, 3, 4), ones(3, 5, 4)),
        ValueError,
        ["same batch size B", "query [2, 3, 4]", "key [3, 5, 4]"],
    ),
    # dtypes
    "integer query": (
        lambda: regard.attend(ones(2, 3, 4, dtype=jnp.int32), K, V),
        TypeError,
        ["query must be floating point", "query [2, 3, 4]", "int32", "astype"],
    ),
    "integer value": (
        lambda: regard.attend(Q, K, ones(2, 5, 6, dtype=jnp.int32)),
        TypeError,
        ["value must be floating point", "value [2, 5, 6]", "int32", "astype"],
    ),
    "complex key": (
        lambda: regard.attend(Q, ones(2, 5, 4, dtype=jnp.complex64), V),
        TypeError,
        ["key must be floating point", "key [2, 5, 4]", "complex64"],
    ),
    # widths, per score
    "Dot of two widths": (
        lambda: regard.attend(ones(2, 3, 4), ones(2, 5, 6), ones(2, 5, 8)),
        ValueError,
        [
            "Dot needs",
            "one width",
            "query [2, 3, 4]",
            "key [2, 5, 6]",
            "Bilinear",
            "Additive",
            "project",
        ],
    ),
    "Gaussian of two widths": (
        lambda: regard.attend(ones(2, 3, 4), ones(2, 5, 6), ones(2, 5, 8), score=regard.Gaussian()),
        ValueError,
        [
            "Gaussian needs",
            "one width",
            "query [2, 3, 4]",
            "key [2, 5, 6]",
            "Bilinear",
            "Additive",
            "project",
        ],
    ),
    "scores: Dot of two widths": (
        lambda: regard.scores(ones(3, 4), ones(5, 6)),
        ValueError,
        ["Dot needs", "one width", "query [3, 4]", "key [5, 6]"],
    ),
    "Bilinear kernel the wrong way round": (
        lambda: regard.attend(ones(2, 3, 4), ones(2, 5, 6), V, score=regard.Bilinear(ones(6, 4))),
        ValueError,
        ["Bilinear", "(Hq, Hk)", "kernel [6, 4]", "query [2, 3, 4]", "key [2, 5, 6]", "[4, 6]"],
    ),
    "Bilinear kernel per head, wrong number of heads": (
        lambda: attend_heads(score=regard.Bilinear(ones(3, 8, 8))),
        ValueError,
        ["Bilinear", "N", "kernel [3, 8, 8]", "query [2, 3, 4, 8]"],
    ),
    "Additive query kernel": (
        lambda: attend(score=regard.Additive(ones(5, 7), KERNEL, VECTOR)),
        ValueError,
        [
            "Additive",
            "(Hq, h)",
            "query_kernel [5, 7]",
            "key_kernel [4, 7]",
            "vector [7]",
            "query [2, 3, 4]",
        ],
    ),
    "Additive hidden sizes differ": (
        lambda: attend(score=regard.Additive(KERNEL, KERNEL, ones(9))),
        ValueError,
        ["Additive", "query_kernel [4, 7]", "key_kernel [4, 7]", "vector [9]"],
    ),
    "Additive projected, wrong width": (
        lambda: attend(score=regard.Additive(None, None, ones(9))),
        ValueError,
        ["Additive", "vector [9]", "query [2, 3, 4]", "key [2, 5, 4]"],
    ),
    "Additive per head, wrong number of heads": (
        lambda: attend_heads(score=regard.Additive(ones(8, 7), ones(8, 7), ones(3, 7))),
        ValueError,
        ["Additive", "N", "vector [3, 7]", "query [2, 3, 4, 8]"],
    ),
    "Additive per head at rank 3": (
        lambda: attend(score=regard.Additive(KERNEL, KERNEL, ones(3, 7))),
        ValueError,
        ["Additive", "vector [3, 7]", "query [2, 3, 4]"],
    ),
    "Gaussian width per head, wrong number of heads": (
        lambda: attend_heads(score=regard.Gaussian(ones(3))),
        ValueError,
        ["Gaussian", "width [3]", "query [2, 3, 4, 8]"],
    ),
    # tolerance
    "tolerance of zero": (
        lambda: regard.Additive(KERNEL, KERNEL, VECTOR, tolerance=0.0),
        ValueError,
        ["tolerance must be", "positive", '"exact"', "0.0"],
    ),
    "negative tolerance": (
        lambda: regard.Additive(KERNEL, KERNEL, VECTOR, tolerance=-1e-3),
        ValueError,
        ["tolerance must be", "positive", '"exact"', "-0.001"],
    ),
    "tolerance NaN": (
        lambda: regard.Additive(KERNEL, KERNEL, VECTOR, tolerance=float("nan")),
        ValueError,
        ["tolerance must be", "positive", "nan"],
    ),
    "tolerance by another word": (
        lambda: regard.Additive(KERNEL, KERNEL, VECTOR, tolerance="high"),
        ValueError,
        ["tolerance must be", "positive", '"exact"', "'high'"],
    ),
    # lengths, masks, bias
    "float lengths": (
        lambda: attend(valid_lens=ones(2)),
        TypeError,
        ["valid_lens must be integers", "float32", "[2]", "astype"],
    ),
    "boolean lengths": (
        lambda: attend(valid_lens=ones(2, dtype=bool)),
        TypeError,
        ["valid_lens must be integers", "bool"],
    ),
    "lengths of the wrong batch": (
        lambda: attend(valid_lens=ones(3, dtype=jnp.int32)),
        ValueError,
        ["valid_lens must have shape", "(B,)", "(B, T)", "valid_lens [3]", "query [2, 3, 4]"],
    ),
    "lengths per key": (
        lambda: attend(valid_lens=ones(2, 5, dtype=jnp.int32)),
        ValueError,
        ["valid_lens must have shape", "(B, T)", "valid_lens [2, 5]"],
    ),
    "lengths per head at rank 4, wrong": (
        lambda: attend_heads(valid_lens=ones(2, 2, 3, dtype=jnp.int32)),
        ValueError,
        ["valid_lens must have shape", "(), (B,), (B, T) or (B, N, T)", "valid_lens [2, 2, 3]"],
    ),
    "lengths at rank 2, wrong": (
        lambda: regard.attend(
            ones(3, 4), ones(5, 4), ones(5, 4), valid_lens=ones(5, dtype=jnp.int32)
        ),
        ValueError,
        ["valid_lens must have shape", "(T,)", "valid_lens [5]"],
    ),
    "Mask.lengths of the wrong batch": (
        lambda: attend(mask=regard.Mask.lengths(ones(3, dtype=jnp.int32))),
        ValueError,
        ["must have shape", "[3]"],
    ),
    "mask that cannot broadcast": (
        lambda: attend(mask=ones(2, 5, 3, dtype=bool)),
        ValueError,
        ["mask must broadcast to the weights [2, 3, 5]", "mask [2, 5, 3]"],
    ),
    "mask larger than the weights": (
        lambda: attend(mask=ones(1, 2, 3, 5, dtype=bool)),
        ValueError,
        ["mask must broadcast to the weights [2, 3, 5]", "mask [1, 2, 3, 5]"],
    ),
    "mask of numbers": (
        lambda: attend(mask=ones(2, 3, 5)),
        TypeError,
        ["mask must be", "bool", "True takes part", "float32", "bias"],
    ),
    "boolean mask of integers": (
        lambda: attend(mask=regard.Mask.boolean(ones(2, 3, 5, dtype=jnp.int32))),
        TypeError,
        ["bool", "True takes part", "int32"],
    ),
    "segments of the wrong length": (
        lambda: attend(
            mask=regard.Mask.segments(ones(5, dtype=jnp.int32), ones(3, dtype=jnp.int32))
        ),
        ValueError,
        [
            "segments need query_ids (T,) or (B, T) and key_ids (S,) or (B, S)",
            "query_ids [5]",
            "key_ids [3]",
        ],
    ),
    "segments of floats": (
        lambda: attend(mask=regard.Mask.segments(ones(3), ones(5))),
        TypeError,
        ["segment ids must be integers", "float32"],
    ),
    "unknown alignment": (
        lambda: regard.Mask.causal(align="left"),
        ValueError,
        ["align must be", '"start"', '"end"', "'left'"],
    ),
    "window of a float": (
        lambda: regard.Mask.window(1.5, 0),
        TypeError,
        ["left must be an integer or None", "1.5"],
    ),
    "bias that cannot broadcast": (
        lambda: attend(bias=ones(5, 3)),
        ValueError,
        ["bias must broadcast to the weights [2, 3, 5]", "bias [5, 3]"],
    ),
    # It would add 0 and 1 to the scores, which no one means.
    "a mask as the bias": (
        lambda: attend(bias=ones(3, 5, dtype=bool)),
        TypeError,
        ["bias must be", "bias [3, 5]", "bool", "mask="],
    ),
    "masked_softmax: float lengths": (
        lambda: regard.masked_softmax(ones(2, 3, 5), ones(2)),
        TypeError,
        ["valid_lens must be integers", "float32"],
    ),
    "masked_softmax: rank 1": (
        lambda: regard.masked_softmax(ones(5)),
        ValueError,
        ["scores", "(T, S), (B, T, S) or (B, N, T, S)", "scores [5]"],
    ),
    "masked_softmax: integer scores": (
        lambda: regard.masked_softmax(ones(2, 3, 5, dtype=jnp.int32)),
        TypeError,
        ["scores must be floating point", "scores [2, 3, 5]", "int32"],
    ),
    # words
    "unknown implementation": (
        lambda: attend(implementation="fast"),
        ValueError,
        ["unknown implementation 'fast'", "'reference'", "'blockwise'", "'cudnn'", "'pallas'"],
    ),
    "unknown implementation in a sequence": (
        lambda: attend(implementation=("reference", "fast")),
        ValueError,
        ["unknown implementation 'fast'", "'reference'", "'blockwise'"],
    ),
    "no implementation at all": (
        lambda: attend(implementation=()),
        ValueError,
        ["implementation", "'reference'", "'blockwise'"],
    ),
    "score by name": (
        lambda: attend(score="dot"),
        TypeError,
        ["score must be", "'dot'", "Dot", "Gaussian", "Bilinear", "Additive"],
    ),
    "score class instead of a score": (
        lambda: attend(score=regard.Dot),
        TypeError,
        ["score must be", "Dot", "Gaussian", "Bilinear", "Additive"],
    ),
    "normalize by name": (
        lambda: attend(normalize="softmax"),
        TypeError,
        [
            "normalize must be",
            "'softmax'",
            "Softmax",
            "Sparsemax",
            "Kernel",
            "Cone",
            "Hard",
            "Uniform",
        ],
    ),
    "normalize by function": (
        lambda: attend(normalize=jax.nn.softmax),
        TypeError,
        ["normalize must be", "Softmax", "Kernel"],
    ),
    # dropout
    "dropout without an rng": (
        lambda: attend(dropout_rate=0.1),
        ValueError,
        ["dropout_rate 0.1 needs dropout_rng", "jax.random.key"],
    ),
    "dropout of everything": (
        lambda: attend(dropout_rate=1.0, dropout_rng=jax.random.key(0)),
        ValueError,
        ["dropout_rate must be in [0, 1)", "1.0"],
    ),
    "negative dropout": (
        lambda: attend(dropout_rate=-0.1, dropout_rng=jax.random.key(0)),
        ValueError,
        ["dropout_rate must be in [0, 1)", "-0.1"],
    ),
    "dropout by a seed": (
        lambda: attend(dropout_rate=0.1, dropout_rng=0),
        TypeError,
        ["dropout_rng must be one JAX key", "Got 0", "jax.random.key(seed)"],
    ),
    "dropout by several keys": (
        lambda: attend(dropout_rate=0.1, dropout_rng=KEYS),
        TypeError,
        ["dropout_rng must be one JAX key", "jax.vmap"],
    ),
    "dropout by a word": (
        lambda: attend(dropout_rate=0.1, dropout_rng="seed"),
        TypeError,
        ["dropout_rng must be one JAX key", "rngs.dropout()"],
    ),
    "dropout rate by name": (
        lambda: attend(dropout_rate="high", dropout_rng=jax.random.key(0)),
        TypeError,
        ["dropout_rate must be a number known before", "'high'"],
    ),
    "traced dropout rate": (
        lambda: jax.jit(lambda r: attend(dropout_rate=r, dropout_rng=jax.random.key(0)))(0.5),
        TypeError,
        ["dropout_rate must be a number known before", "static argument"],
    ),
    # what is no array at all
    "no query": (lambda: regard.attend(None, K, V), TypeError, ["query must be an array", "None"]),
    "big-endian query": (
        lambda: regard.attend(np.ones((2, 3, 4), ">f4"), K, V),
        TypeError,
        ["query must be an array", ">f4"],
    ),
    "ragged query": (
        lambda: regard.attend([[1.0], [2.0, 3.0]], K, V),
        TypeError,
        ["query must be an array", "[[1.0], [2.0, 3.0]]"],
    ),
    "ragged lengths": (
        lambda: attend(valid_lens=[[1], [2, 3]]),
        TypeError,
        ["valid_lens must be an array", "[[1], [2, 3]]"],
    ),
    "lengths of objects": (
        lambda: attend(valid_lens=np.array([None, 1])),
        TypeError,
        ["valid_lens must be an array", "[None, 1]"],
    ),
    "mask of objects": (
        lambda: attend(mask=np.array([None])),
        TypeError,
        ["mask must be an array", "[None]"],
    ),
    "positions by name": (
        lambda: attend(score=regard.Alibi(), query_positions="end"),
        TypeError,
        ["query_positions must be an array", "end"],
    ),
    "scores by name": (
        lambda: regard.masked_softmax("scores"),
        TypeError,
        ["scores must be an array", "'scores'"],
    ),
    "parts of integers": (
        lambda: regard.merge((ones(2, 2, dtype=jnp.int32), ones(2))),
        TypeError,
        ["merge takes floating-point parts", "int32, float32"],
    ),
    "a kernel as a list": (
        lambda: attend(score=regard.Bilinear([[1.0] * 4] * 4)),
        TypeError,
        ["Bilinear's kernel is an array", "Fix: jnp.array(kernel)"],
    ),
    "a vector as a list": (
        lambda: attend(score=regard.Additive(KERNEL, KERNEL, [1.0] * 7)),
        TypeError,
        ["Additive's vector is an array", "Fix: jnp.array(vector)"],
    ),
    "a scale by name": (
        lambda: attend(score=regard.Dot("sqrt")),
        TypeError,
        ["Dot's parameters are numbers and arrays", "'sqrt'"],
    ),
    "bias by name": (lambda: attend(bias="alibi"), TypeError, ["bias must be an array", "'alibi'"]),
    "mask by name": (
        lambda: attend(mask="causal"),
        TypeError,
        ["mask must be a regard.Mask", "'causal'", "regard.Mask.causal()"],
    ),
    "mask without parentheses": (
        lambda: attend(mask=regard.Mask.causal),
        TypeError,
        ["mask must be a regard.Mask", "regard.Mask.causal()"],
    ),
    "implementation by number": (
        lambda: attend(implementation=3),
        TypeError,
        ["implementation must be None, a name, or a sequence", "Got 3"],
    ),
    "Kernel of a number": (
        lambda: regard.Kernel(3.0),
        TypeError,
        ["Kernel needs a function f", "3.0", "Kernel(jax.nn.relu)"],
    ),
    "8 bits": (
        lambda: regard.attend(Q, ones(2, 5, 4, dtype=jnp.float8_e4m3fn), V),
        TypeError,
        ["key must have 16 bits or more", "key [2, 5, 4]", "float8_e4m3fn", "jnp.bfloat16"],
    ),
    "merge of a list": (
        lambda: regard.merge([(ones(3, 4), ones(3))]),
        TypeError,
        ["merge takes each part as an argument", "merge(*parts)"],
    ),
    # maps
    "resolution of one number": (
        lambda: regard.attention_map(Q, K, resolution=5),
        ValueError,
        ["resolution must be two positive integers", "Got 5"],
    ),
    "resolution of zero": (
        lambda: regard.attention_map(Q, K, resolution=(0, 5)),
        ValueError,
        ["resolution", "positive", "(0, 5)"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_message(name):
    call, kind, texts = BAD[name]
    with pytest.raises(kind) as raised:
        call()
    assert type(raised.value) is kind
    message = str(raised.value)
    missing = [text for text in texts if text not in message]
    assert not missing, f"{missing} not in: {message}"


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in BAD
        if not n.startswith(("tolerance", "negative tol", "unknown align", "window of"))
    ],
)
def test_the_same_error_under_jit(name):
    """The front door is at trace time: inside jit the same exception, with the same text."""
    call, kind, _ = BAD[name]
    with pytest.raises(kind) as eager:
        call()
    with pytest.raises(kind) as jitted:
        jax.jit(call)()
    assert str(jitted.value) == str(eager.value)


@pytest.mark.parametrize(
    "name", ["lengths differ", "float lengths", "mask that cannot broadcast", "Dot of two widths"]
)
@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_the_same_error_on_every_implementation(name, implementation):
    """The check is before the choice."""
    call, kind, _texts = BAD[name]
    with pytest.raises(kind) as raised:
        call()
    calls = {
        "lengths differ": lambda: regard.attend(
            ones(2, 3, 4, 64), ones(2, 7, 4, 64), ones(2, 9, 4, 64), implementation=implementation
        ),
        "float lengths": lambda: attend(valid_lens=ones(2), implementation=implementation),
        "mask that cannot broadcast": lambda: attend(
            mask=ones(2, 5, 3, dtype=bool), implementation=implementation
        ),
        "Dot of two widths": lambda: regard.attend(
            ones(2, 3, 4), ones(2, 5, 6), ones(2, 5, 8), implementation=implementation
        ),
    }
    with pytest.raises(kind) as named:
        calls[name]()
    assert str(named.value) == str(raised.value)


def test_what_is_not_an_error():
    """Near misses that are allowed: the checks above do not refuse too much."""
    for lens in (np.int8(3), np.array([2, 9]), jnp.zeros((2, 3), jnp.uint8)):
        assert attend(valid_lens=jnp.asarray(lens)).shape == (2, 3, 6)
    assert attend(mask=ones(5, dtype=bool)).shape == (2, 3, 6)
    assert attend(bias=ones(2, 1, 5)).shape == (2, 3, 6)
    assert regard.attention_map(Q, K, resolution=(np.int64(2), 9)).shape == (2, 2, 5)
    assert attend(dropout_rng=jax.random.key(0)).shape == (2, 3, 6)
    assert attend(score=regard.Bilinear(ones(4, 4))).shape == (2, 3, 6)
