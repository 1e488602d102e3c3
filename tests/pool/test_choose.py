"""The rules of the automatic choice: what they pick, on which device, and what explain says."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regard
from absent_gpu import HOPPER, Cosine, on_hopper, request
from cases import Manhattan
from regard import Mask, placement
from regard.placement import Device, device_of
from regard.pool.backend import BiasFacts
from regard.pool.choose import REGISTRY, choose
from regard.score.additive import lift_anywhere
from regard.shapes import Axes

AXES = Axes(rank=4, B=2, T=512, S=512, N=4, K=2, query_width=64, key_width=64, V=64)
TINY, SHORT = dict(T=8, S=8), dict(T=80, S=80)
CPU, TPU = Device("cpu"), Device("tpu")
ADDITIVE = regard.Additive(
    jnp.ones((64, 8), jnp.float32),
    jnp.ones((64, 8), jnp.float32),
    jnp.ones(8, jnp.float32),
    tolerance="exact",
)
FLOAT32 = dict(dtype=jnp.dtype("float32"), value_dtype=jnp.dtype("float32"))


def ask(axes=None, mask=None, lens=None, **changes):
    return request(dataclasses.replace(AXES, **(axes or {})), mask, lens, **changes)


@pytest.fixture
def hopper():
    with on_hopper():
        yield


PICKED = {
    "a CPU": (dict(device=CPU), "blockwise"),
    "a CPU, tiny": (dict(device=CPU, axes=TINY), "reference"),
    "a CPU, short": (dict(device=CPU, axes=SHORT), "reference"),
    "a CPU, short, a key bias": (
        dict(device=CPU, axes=SHORT, score=regard.Gaussian()),
        "blockwise",
    ),
    "a CPU, short, no lift": (dict(device=CPU, axes=SHORT, score=ADDITIVE), "reference"),
    "a CPU, many short": (dict(device=CPU, axes=dict(B=128, T=50, S=50)), "reference"),
    "a CPU, many less short": (dict(device=CPU, axes=dict(B=128, T=50, S=70)), "blockwise"),
    "a CPU, few queries of few keys": (dict(device=CPU, axes=dict(T=1, S=99)), "blockwise"),
    "a TPU": (dict(device=TPU), "blockwise"),
    "tiny": (dict(axes=TINY), "reference"),
    "dot": ({}, "cudnn"),
    "lengths": (dict(lens=jnp.ones(2, int)), "cudnn"),
    "causal": (dict(mask=Mask.causal()), "cudnn"),
    "bilinear": (dict(score=regard.Bilinear(jnp.ones((64, 64), jnp.float32))), "cudnn"),
    "lengths per query": (dict(lens=jnp.ones((2, 512), int)), "pallas"),
    "causal from the end": (dict(mask=Mask.causal(), axes=dict(T=256)), "pallas"),
    "boolean": (dict(mask=jnp.ones((512, 512), bool)), "pallas"),
    "bias": (dict(bias=BiasFacts((1, 1, 512, 512), np.dtype("float32"))), "pallas"),
    "float32": (FLOAT32, "pallas"),
    "gaussian": (dict(score=regard.Gaussian()), "pallas"),
    "exact additive": (dict(score=ADDITIVE), "pallas"),
    "no lift": (dict(score=Manhattan(jnp.ones(64, jnp.float32))), "blockwise"),
    "another regime": (dict(normalize=regard.Sparsemax()), "pallas"),
    "a regime without a kernel": (dict(normalize=regard.Uniform()), "blockwise"),
}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", PICKED)
def test_the_automatic_choice(name):
    changes, expected = PICKED[name]
    choice = choose(ask(**changes), None)
    assert choice.backend.name == expected
    why_not = choice.why_not()
    assert set(why_not) == {rule.backend.name for rule in REGISTRY} - {expected}
    assert all(why_not.values())


@pytest.mark.usefixtures("hopper")
def test_refusals_are_all_reported():
    """Both GPU backends refuse float64."""
    wide = dict.fromkeys(("dtype", "value_dtype"), jnp.dtype("float64"))
    choice = choose(ask(**wide), None)
    assert choice.backend.name == "blockwise"
    assert "float64" in choice.why_not()["cudnn"]
    assert "float64" in choice.why_not()["pallas"]
    assert choice.why_not()["reference"].startswith("could, but is preferred only for this: at mos")


@pytest.mark.usefixtures("hopper")
def test_a_backend_that_could_run_names_the_one_that_comes_first():
    why_not = choose(ask(), None).why_not()
    assert why_not["pallas"] == why_not["blockwise"]
    assert why_not["pallas"].startswith("could, but cudnn comes first: on a GPU")


def test_every_backend_states_a_preference_and_the_last_takes_everything():
    names = [rule.backend.name for rule in REGISTRY]
    assert len(set(names)) == len(names)
    assert all(rule.when and rule.measured for rule in REGISTRY)
    bias = BiasFacts((1, 1, 1, 512), np.dtype("float32"))
    hard = ask(normalize=regard.Hard(), bias=bias, dropout=True)
    assert REGISTRY[-1].prefers(hard)
    assert REGISTRY[-1].backend.refuses(hard) is None


def test_choosing_skips_what_the_device_rules_out():
    """On a CPU no lift is traced to find out that cuDNN is not for it."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Shy(regard.Score):
        def lift(self, query, key, *, visible=None):
            raise AssertionError("asked for its lift")

    assert choose(ask(device=CPU, score=Shy()), None).backend.name == "blockwise"


# ---------------------------------------------------------------------------------------------
# explain


def test_explain_is_two_lines():
    x = jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.bfloat16)
    with on_hopper():
        first, second = regard.explain(x, x, x).splitlines()
    assert first.startswith("cudnn runs: fused by cuDNN")
    assert second == "not: ring, reference, pallas, blockwise (verbose=True says why)"


def test_explain_verbose_marks_the_preference_that_decided():
    x = jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.bfloat16)
    with on_hopper():
        lines = regard.explain(x, x, x, verbose=True).splitlines()
    assert lines[0].startswith("cudnn runs: fused by cuDNN")
    others = [line.split()[1] for line in lines[1:5]]
    assert others == ["ring:", "reference:", "pallas:", "blockwise:"]
    told = lines[-len(REGISTRY) :]
    for rule, line in zip(REGISTRY, told, strict=True):
        assert f"{rule.backend.name}: {rule.when} (measured: {rule.measured})" in line
    assert [line[0] for line in told] == [" ", " ", ">", " ", " "]


def test_explain_of_named_implementations_has_no_preferences():
    x = jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.float32)
    names = ("cudnn", "blockwise", "reference")
    text = regard.explain(x, x, x, implementation=names, verbose=True)
    first, second = text.splitlines()
    assert first.startswith(f"blockwise runs: first of {list(names)} that can; ")
    assert second.startswith("not cudnn: needs ")


def test_explain_takes_every_argument_of_attend():
    x = jnp.ones((2, 8, 4), jnp.float32)
    text = regard.explain(
        x,
        x,
        x,
        score=regard.Gaussian(2.0),
        valid_lens=jnp.array([3, 8]),
        mask=Mask.causal(),
        bias=jnp.zeros((8, 8), jnp.float32),
        normalize=regard.Sparsemax(),
        dropout_rate=0.1,
        dropout_rng=jax.random.key(0),
        implementation="blockwise",
        return_weights=True,
        return_lifted=True,
    )
    assert text.startswith("blockwise runs: asked for; ")
    assert "exact up to a per-query constant" in text


def test_explain_names_the_form_that_runs():
    """On a CPU additive scores take their tile form, which is no lift and not the definition."""
    x = jnp.ones((2, 512, 8), jnp.float32)
    w = jnp.ones((8, 8), jnp.float32)
    score = regard.Additive(w, w, w[0])
    assert "tanh(x+y) = 1 - 2/(1 + e^2x e^2y)" in regard.explain(x, x, x, score=score)
    with lift_anywhere():
        lifted = regard.explain(x, x, x, score=score)
    assert "by an inner product of width" in lifted
    assert "where that does not hold, decided on the data at run time, by definition" in lifted
    assert "not needed by this regime" in regard.explain(x, x, x, normalize=regard.Uniform())


def test_ring_without_a_sequence_axis_says_what_is_missing():
    x = jnp.ones((2, 8, 4), jnp.float32)
    with pytest.raises(NotImplementedError, match="needs sequence_axis=, the mesh axis"):
        regard.attend(x, x, x, implementation="ring")


# ---------------------------------------------------------------------------------------------
# What a request knows.


def test_where_a_call_runs():
    here = jax.devices("cpu")[0]
    assert device_of(jax.device_put(jnp.ones(3), here)) == CPU
    with jax.default_device(here):
        assert device_of() == CPU
    assert device_of().platform == jax.default_backend()


def test_arrays_on_the_cpu_of_a_gpu_host_run_on_the_cpu(monkeypatch):
    """`explain` and `attend` go by the arrays, shapes and traces by the default device."""
    monkeypatch.setattr(placement, "_default_device", lambda: HOPPER)
    x = jnp.ones((2, 512, 8), jnp.float32)
    w = jnp.ones((8, 8), jnp.float32)
    score = regard.Additive(w, w, w[0])
    assert regard.explain(x, x, x, score=score).startswith("blockwise runs")
    assert "tanh(x+y) = 1 - 2" in regard.explain(x, x, x, score=score)
    out, lifted = regard.attend(x, x, x, score=score, return_lifted=True)
    assert not lifted
    assert out.shape == x.shape
    half = x.astype(jnp.bfloat16)
    gradient = jax.grad(lambda q: regard.attend(q, half, half).astype(jnp.float32).sum())(half)
    assert gradient.shape == x.shape
    shapes = jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.float32)
    assert regard.explain(shapes, shapes, shapes).startswith("pallas runs")


def test_a_gpu_is_known_by_its_compute_capability():
    class Card:
        platform = "gpu"

        def __init__(self, capability):
            self.compute_capability = capability

    described = placement._described
    assert described(Card("9.0")) == Device("gpu", (9, 0))
    assert described(Card("12.1")) == Device("gpu", (12, 1))
    assert described(Card("gfx942")) == Device("gpu", None)


def ones(*shape):
    return jnp.ones(shape, jnp.float32)


def known(lift):
    """What backends ask of a lift."""
    return dict(
        compact=lift.key.shape[-1],
        width=lift.width(),
        key_heads=lift.key.shape[1],
        key_bias=lift.key_bias is not None,
        query_bias=lift.query_bias is not None,
        expansion=lift.expansion is not None,
        guarded=lift.in_range is not None,
        standing=lift.standing,
    )


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        (regard.Dot(), dict(compact=64, width=64, key_heads=2, key_bias=False)),
        (regard.Dot(0.3), dict(expansion=False, guarded=False, standing="exact")),
        (regard.Dot(ones(4)), dict(key_heads=4)),
        (regard.Gaussian(2.0), dict(key_bias=True, query_bias=True, guarded=False)),
        (regard.Bilinear(ones(4, 64, 64)), dict(key_heads=4, key_bias=False)),
        (Cosine(), dict(width=64, standing="exact")),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_is_known_of_a_lift(score, expected):
    found = known(ask(score=score).lift)
    assert {name: found[name] for name in expected} == expected


def test_what_is_known_of_the_additive_lift():
    """Narrow features, a sine series for what they may not score; or the series alone."""
    score = regard.Additive(ones(64, 8), ones(64, 8), ones(8))
    with lift_anywhere():
        narrow = ask(score=score).lift
        alone = known(ask(score=dataclasses.replace(score, bound="worst")).lift)
    found, after = known(narrow), known(narrow.otherwise)
    assert after == alone
    for one in (found, after):
        assert (one["compact"], one["expansion"], one["guarded"]) == (8, True, True)
    assert after["width"] % (2 * 8) == 0
    assert after["standing"].startswith("each tanh within ")
    assert (found["width"], found["key_bias"], found["query_bias"]) == (8 * 8, True, True)
    assert found["standing"].startswith("the tanhs' root mean square error")


@pytest.mark.parametrize(
    "changes",
    [dict(score=Manhattan(ones(64))), dict(normalize=regard.Uniform()), dict(axes=dict(S=0))],
    ids=["no lift", "no scores", "nothing to score"],
)
def test_where_there_is_no_lift(changes):
    assert ask(**changes).lift is None
