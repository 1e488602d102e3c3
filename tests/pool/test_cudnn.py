"""The cuDNN backend: what it refuses and in which words, what becomes of a mask, what is lowered.

No GPU is needed for any of this. What cuDNN computes: test_cudnn_contract.py.
"""

import dataclasses
import functools
import itertools
import re
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regard
from absent_gpu import Cosine, on_hopper, request
from regard import Mask
from regard.mask import resolve
from regard.placement import Device
from regard.pool import cudnn
from regard.pool.backend import BiasFacts
from regard.pool.choose import named
from regard.score.additive import lift_anywhere
from regard.shapes import Axes


@pytest.fixture
def hopper():
    with on_hopper():
        yield


# ---------------------------------------------------------------------------------------------
# Refusals.

AXES = Axes(rank=4, B=2, T=256, S=256, N=4, K=2, query_width=64, key_width=64, V=64)


def ask(axes=None, mask=None, lens=None, **changes):
    """A request that cuDNN takes, with changes."""
    return request(dataclasses.replace(AXES, **(axes or {})), mask, lens, **changes)


def refusal(asked):
    found = named("cudnn").refuses(asked)
    assert found is not None, "cuDNN takes it"
    return found


def accepted(asked):
    assert named("cudnn").refuses(asked) is None
    return named("cudnn").describe(asked)


def f32(*shape):
    return jnp.ones(shape, jnp.float32)


REFUSED = {
    "no GPU": (dict(device=Device("cpu")), "needs an NVIDIA GPU (running on cpu)"),
    "another maker's GPU": (dict(device=Device("gpu")), "needs an NVIDIA GPU (running on gpu)"),
    "an old GPU": (
        dict(device=Device("gpu", (7, 5))),
        "needs compute capability 8.0 or newer (this GPU has 7.5)",
    ),
    "float32": (
        dict(dtype=jnp.dtype("float32"), value_dtype=jnp.dtype("float32")),
        "needs query, key and value all float16 or all bfloat16 "
        "(got query and key float32, value float32)",
    ),
    "two dtypes": (
        dict(value_dtype=jnp.dtype("float16")),
        "(got query and key bfloat16, value float16)",
    ),
    "regime": (dict(normalize=regard.Sparsemax()), "has no regime but Softmax (got Sparsemax)"),
    "dropout": (dict(dropout=True), "draws its own random numbers for dropout"),
    "bias of one head": (
        dict(bias=BiasFacts((1, 1, 256, 256), np.dtype("bfloat16"))),
        "takes a bias of shape [1, 4, 256, 256] only (got [1, 1, 256, 256])",
    ),
    "bias of float32": (
        dict(bias=BiasFacts((1, 4, 256, 256), np.dtype("float32"))),
        "takes a bias in the dtype of the query only (got float32)",
    ),
    "bias of an odd length": (
        dict(bias=BiasFacts((1, 4, 255, 256), np.dtype("bfloat16")), axes=dict(T=255)),
        "has no gradient of a bias for odd lengths (T = 255, S = 256)",
    ),
    "lengths per query": (
        dict(lens=jnp.ones((2, 256), int)),
        "takes valid lengths per example, not per query",
    ),
    "lengths per head": (
        dict(lens=jnp.ones((2, 4, 256), int)),
        "takes valid lengths per example, not per query",
    ),
    "segments": (
        dict(mask=Mask.segments(jnp.zeros(256, int), jnp.zeros(256, int))),
        "takes no segments",
    ),
    "boolean": (
        dict(mask=jnp.ones((256, 256), bool)),
        "takes a boolean mask only as a T×S array of numbers",
    ),
    "causal from the end": (
        dict(mask=Mask.causal(), axes=dict(T=128)),
        "has no band of keys that ends at s = t+128, only at s = t: causal order with T = S, or "
        'with align="start" (here T = 128, S = 256)',
    ),
    "a window to the right": (
        dict(mask=Mask.window(7, 2)),
        "has no band of keys that ends at s = t+2",
    ),
    "a window to the left alone": (
        dict(mask=Mask.window(7, None)),
        "has a window to the left only together with causal order",
    ),
    "a window past the keys": (
        dict(mask=Mask.window(7, 0, align="start"), axes=dict(T=512)),
        "has no window that leaves some rows empty (T = 512, S = 256)",
    ),
    "a window of no keys": (
        dict(mask=Mask.window(-1, 0)),
        "has no window that leaves some rows empty",
    ),
    "a window with lengths": (
        dict(mask=Mask.window(7, 0), lens=jnp.ones(2, int)),
        "has no window together with valid lengths",
    ),
    "Gaussian": (
        dict(score=regard.Gaussian()),
        "cannot add the number per key that Gaussian's lift comes with",
    ),
    "no lift": (
        dict(score=regard.Additive(f32(64, 8), f32(64, 8), f32(8), tolerance="exact")),
        "runs inner products only, and Additive has no lift to one here",
    ),
    "width": (
        dict(axes=dict(query_width=60, key_width=60, V=60)),
        "needs a width that is a multiple of 8 (got 60)",
    ),
    "wide": (
        dict(axes=dict(query_width=264, key_width=264, V=264)),
        "takes widths up to 256 here (got 264)",
    ),
    "wide before Hopper": (
        dict(axes=dict(query_width=136, key_width=136, V=136), device=Device("gpu", (8, 6))),
        "takes widths up to 128 here (got 136)",
    ),
    "wide after Hopper": (
        dict(axes=dict(query_width=136, key_width=136, V=136), device=Device("gpu", (10, 0))),
        "takes widths up to 128 here (got 136)",
    ),
    "value width": (
        dict(axes=dict(V=128)),
        "needs values as wide as the keys (V = 128, keys 64)",
    ),
    "value width after a lift": (
        dict(axes=dict(query_width=32), score=regard.Bilinear(f32(32, 64))),
        "needs values as wide as the keys (V = 64, keys 32 after the lift)",
    ),
    "one of each": (dict(axes=dict(T=1, S=1)), "has no gradient for one query and one key"),
}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    changes, text = REFUSED[name]
    assert text in refusal(ask(**changes))


def test_refuses_a_lift_within_a_tolerance():
    with lift_anywhere():
        asked = ask(score=regard.Additive(f32(64, 8), f32(64, 8), f32(8)))
        text = refusal(asked)
        assert asked.lift.key.shape[-1] == 8
        assert asked.lift.width() > 8
    assert text == "runs exact lifts that are stored whole, and Additive's is not one"


def test_everything_that_is_lacking_comes_back():
    text = refusal(
        ask(
            device=Device("cpu"),
            value_dtype=jnp.dtype("float32"),
            bias=BiasFacts((1, 1, 256, 256), np.dtype("bfloat16")),
            dropout=True,
            mask=Mask.boolean(jnp.ones((256, 256), bool)),
            score=regard.Gaussian(),
        )
    )
    assert len(text.split("; ")) == 7


def test_without_cudnn_jax_refuses():
    """JAX's own words, where it is built without CUDA."""
    if jax.default_backend() == "gpu":
        assert "fused by cuDNN" in accepted(ask())
    else:
        assert refusal(ask()) == "is refused by JAX: cuDNN is not detected."


ACCEPTED = {
    "plain": ({}, "no mask"),
    "float16": (dict(dtype=jnp.dtype("float16"), value_dtype=jnp.dtype("float16")), "no mask"),
    "Ampere": (dict(device=Device("gpu", (8, 0))), "no mask"),
    "weights only": (dict(value_dtype=None, axes=dict(V=0)), "no mask"),
    "256 wide": (dict(axes=dict(query_width=256, key_width=256, V=256)), "no mask"),
    "one length": (dict(lens=jnp.array(7)), "valid lengths inside the kernel"),
    "lengths": (dict(lens=jnp.ones(2, int)), "valid lengths inside the kernel"),
    "one query's lengths": (
        dict(lens=jnp.ones((2, 1), int), axes=dict(T=1)),
        "valid lengths inside the kernel",
    ),
    "causal": (dict(mask=Mask.causal()), "causal order inside the kernel"),
    "causal twice": (dict(mask=Mask.causal() & Mask.causal("start")), "causal order inside"),
    "causal from the start": (
        dict(mask=Mask.causal("start"), axes=dict(T=77)),
        "causal order inside the kernel",
    ),
    "one query, causal": (dict(mask=Mask.causal(), axes=dict(T=1)), "no mask"),
    "one query, causal from the start": (
        dict(mask=Mask.causal("start"), axes=dict(T=1)),
        "valid lengths inside the kernel",
    ),
    "a window that masks nothing": (dict(mask=Mask.window(255, 255)), "no mask"),
    "causal and lengths": (
        dict(mask=Mask.causal(), lens=jnp.ones(2, int)),
        "valid lengths and causal order inside the kernel",
    ),
    "a causal window": (dict(mask=Mask.window(7, 0)), "causal order and window inside the kernel"),
    "bilinear": (dict(score=regard.Bilinear(f32(64, 64))), "no mask"),
    "bilinear, narrower queries": (
        dict(score=regard.Bilinear(f32(64, 96)), axes=dict(key_width=96)),
        "no mask",
    ),
    "bilinear per head": (dict(score=regard.Bilinear(f32(4, 64, 64))), "no mask"),
    "a scale per head": (dict(score=regard.Dot(f32(4))), "no mask"),
    "a user's own": (dict(score=Cosine()), "no mask"),
    "nothing at all": (dict(axes=dict(S=0)), "no mask"),
}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", ACCEPTED)
def test_acceptances(name):
    changes, text = ACCEPTED[name]
    found = accepted(ask(**changes))
    assert found.startswith("fused by cuDNN, memory linear in T and S; ")
    assert text in found


# ---------------------------------------------------------------------------------------------
# Masks: what cuDNN is given.


MAPPED = {
    "none": ({}, (False, None, None)),
    "lengths": (dict(lens=jnp.array([3, 0])), (False, None, [3, 1])),
    "one length": (dict(lens=jnp.array(300)), (False, None, [256, 256])),
    "causal": (dict(mask=Mask.causal()), (True, None, None)),
    "causal and lengths": (
        dict(mask=Mask.causal(), lens=jnp.array([9, 256])),
        (True, None, [9, 256]),
    ),
    "causal over more keys, and lengths": (
        dict(mask=Mask.causal("start"), lens=jnp.array([9, 200]), axes=dict(T=128)),
        (True, None, [9, 128]),  # a key past the last query is visible to no query
    ),
    "window": (dict(mask=Mask.window(7, 0)), (True, (7, 0), None)),
    "ragged queries": (dict(axes=dict(T=255)), (False, None, [256, 256])),
    "ragged keys": (dict(axes=dict(S=192)), (False, None, [192, 192])),
    "ragged, causal": (
        dict(mask=Mask.causal(), axes=dict(T=70, S=70)),
        (True, None, [70, 70]),
    ),
    "one query, causal from the start": (
        dict(mask=Mask.causal("start"), axes=dict(T=1)),
        (False, None, [1, 1]),
    ),
}


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ({}, (0,)),
        ({"nvidia-cudnn-cu12": "9.10.2.21"}, (9, 10)),
        ({"nvidia-cudnn-cu13": "9.19.0.56", "nvidia-cudnn-cu12": "9.10.2.21"}, (9, 10)),
        ({"nvidia-cudnn-cu13": "10.2rc1"}, (10, 2)),
    ],
    ids=str,
)
def test_which_cudnn_this_is(installed, expected, monkeypatch):
    """The oldest of those installed: which one JAX loads is not said."""

    def version(name):
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    assert cudnn._version.__wrapped__() == expected


@pytest.mark.parametrize("raw_queries", [False, True])
@pytest.mark.parametrize("name", MAPPED)
def test_mask_arguments(name, raw_queries):
    changes, (causal, window, lens) = MAPPED[name]
    axes = dataclasses.replace(AXES, **changes.get("axes", {}))
    allowed = resolve(changes.get("mask"), changes.get("lens"), axes)
    found = cudnn.mask_arguments(allowed, axes, raw_queries)
    assert (found.is_causal, found.local_window_size) == (causal, window)
    if lens is None:
        assert found.query_seq_lengths is None
        assert found.key_value_seq_lengths is None
        return
    queries = 0 if name == "lengths" and raw_queries else axes.T  # its second example is empty
    for array, expected in (
        (found.key_value_seq_lengths, lens),
        (found.query_seq_lengths, [axes.T, queries]),
    ):
        assert array.dtype == jnp.int32
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        (regard.Dot(), 0.125),
        (regard.Dot(0.5), 0.5),
        (regard.Dot(2), 2.0),
        (regard.Dot(-0.5), None),
        (regard.Dot(0.0), None),
        (regard.Dot(float("inf")), None),
        (regard.Dot(jnp.float32(0.5)), None),
        (regard.Bilinear(f32(64, 64)), None),
        (Cosine(), None),
    ],
    ids=str,
)
def test_which_scales_are_the_kernels(score, expected):
    assert score.static_scale(64) == expected


# ---------------------------------------------------------------------------------------------
# What is lowered: here for a GPU that is not here, below by one that is.

attend = functools.partial(regard.attend, implementation="cudnn")


def gradients(*args, **keywords):
    def loss(*tensors):
        return jnp.square(attend(*tensors, **keywords).astype(jnp.float32)).sum()

    return jax.grad(loss, (0, 1, 2))(*args)


def shapes(T=256, S=512, N=4, K=2, D=64):
    return [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in ((2, T, N, D), (2, S, K, D), (2, S, K, D))
    ]


def lowered(function, *args):
    text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return text.replace(r"\22", '"')


def calls(text):
    """(target, operand types) of every cuDNN call."""
    found = re.findall(r"custom_call @__cudnn\$(\w+)\(.*?: \((.*?)\) ->", text)
    return [(target, re.findall(r"tensor<(.*?)>", types)) for target, types in found]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("function", [attend, gradients])
def test_lengths_reach_the_call(function):
    lens = jax.ShapeDtypeStruct((2,), jnp.int32)
    text = lowered(lambda *args: function(*args[:3], valid_lens=args[3]), *shapes(), lens)
    for _, operands in calls(text):
        assert operands[-2:] == ["2xi32", "2xi32"]
        assert operands[:3] == ["2x256x4x64xbf16", "2x512x2x64xbf16", "2x512x2x64xbf16"]
    targets = [target for target, _ in calls(text)]
    backward = ["fmhaSoftmaxBackward"] if function is gradients else []
    assert targets == ["fmhaSoftmax", *backward]
    assert re.findall(r"mask_type\W+(\w+)", text) == ["PADDING"] * len(targets)
    assert "256x512" not in text, "a T×S array"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("mask", "lens", "kind", "window"),
    [
        (None, None, "NO_MASK", "0"),
        (Mask.causal("start"), None, "CAUSAL", "0"),
        (Mask.causal("start"), jnp.array([3, 4]), "PADDING_CAUSAL", "0"),
        (Mask.window(99, 0, "start"), None, "CAUSAL", "100"),
    ],
)
def test_masks_reach_the_call(mask, lens, kind, window):
    text = lowered(lambda *args: gradients(*args, mask=mask, valid_lens=lens), *shapes())
    assert re.findall(r"mask_type\W+(\w+)", text) == [kind] * 2
    assert re.findall(r"sliding_window_length\D+(\d+)", text) == [window] * 2
    assert "256x512" not in text, "a T×S array"


@pytest.mark.usefixtures("hopper")
def test_a_scale_that_is_a_number_costs_no_pass():
    for score, scale in ((regard.Dot(), 0.125), (regard.Dot(0.3), 0.3)):
        text = lowered(functools.partial(attend, score=score), *shapes())
        assert [float(x) for x in re.findall(r"fmha_scale\W+([\d.]+)", text)] == [scale]
        assert "multiply" not in text
        assert "f32" not in text
    learned = lowered(
        lambda *args: attend(*args[:3], score=regard.Dot(args[3])),
        *shapes(),
        jax.ShapeDtypeStruct((), jnp.float32),
    )
    assert [float(x) for x in re.findall(r"fmha_scale\W+([\d.]+)", learned)] == [1.0]
    assert "multiply" in learned


@pytest.mark.usefixtures("hopper")
def test_causal_order_alone_costs_no_pass():
    """Every key is visible to some query, which is known beforehand: no select over any array."""
    text = lowered(functools.partial(attend, mask=Mask.causal("start")), *shapes(S=256))
    assert "select" not in text


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("shared", list(itertools.product([False, True], repeat=3))[:-1], ids=str)
def test_vmap_over_any_of_the_arrays(shared):
    """JAX 0.10 maps the call only where all of its arrays are mapped."""
    arrays = [
        x if alone else jax.ShapeDtypeStruct((3, *x.shape), x.dtype)
        for x, alone in zip(shapes(), shared, strict=True)
    ]

    def mapped(function):
        return jax.vmap(function, in_axes=[None if alone else 0 for alone in shared])

    def loss(*args):
        return mapped(attend)(*args).astype(jnp.float32).sum()

    for function in (mapped(gradients), jax.grad(loss, (0, 1, 2))):
        found = calls(lowered(function, *arrays))
        assert [target for target, _ in found] == ["fmhaSoftmax", "fmhaSoftmaxBackward"]
        assert all(operands[0] == "6x256x4x64xbf16" for _, operands in found)


@pytest.mark.usefixtures("hopper")
def test_second_derivatives_make_no_array_of_all_pairs():
    """The first derivative is still cuDNN's; the second one's tiles are smaller than T×S."""

    def products(*args):
        return jax.jvp(gradients, args, args)

    text = lowered(products, *shapes(T=4096, S=4096))
    assert {target for target, _ in calls(text)} == {"fmhaSoftmax", "fmhaSoftmaxBackward"}
    assert "4096x4096" not in text
