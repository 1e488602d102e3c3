"""The rules of the automatic choice: what they pick, on which device, and what explain says."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import regard
from absent_gpu import HOPPER, Cosine, on_hopper
from cases import Manhattan
from regard import Mask
from regard.mask import resolve
from regard.pool import request
from regard.pool.choose import ACCEPTS, IMPLEMENTATIONS, RULES, choose
from regard.pool.request import Device, Request, device_of
from regard.score.additive import lift_anywhere
from regard.shapes import Axes

AXES = Axes(rank=4, B=2, T=512, S=512, N=4, K=2, query_width=64, key_width=64, V=64)
TINY = dict(T=8, S=8)
CPU, TPU = Device("cpu"), Device("tpu")
ADDITIVE = regard.Additive(
    jnp.ones((64, 8), jnp.float32),
    jnp.ones((64, 8), jnp.float32),
    jnp.ones(8, jnp.float32),
    tolerance="exact",
)
FLOAT32 = dict(dtype=jnp.dtype("float32"), value_dtype=jnp.dtype("float32"))


def ask(axes=None, mask=None, lens=None, **changes):
    axes = dataclasses.replace(AXES, **(axes or {}))
    fields = dict(
        axes=axes,
        score=regard.Dot(),
        normalize=regard.Softmax(),
        dtype=jnp.dtype("bfloat16"),
        value_dtype=jnp.dtype("bfloat16"),
        mask=resolve(mask, lens, axes).facts,
        device=HOPPER,
    )
    return Request(**(fields | changes))


@pytest.fixture
def hopper():
    with on_hopper():
        yield


PICKED = {
    "a CPU": (dict(device=CPU), "blockwise"),
    "a CPU, tiny": (dict(device=CPU, axes=TINY), "reference"),
    "a TPU": (dict(device=TPU), "blockwise"),
    "tiny": (dict(axes=TINY), "reference"),
    "dot": ({}, "cudnn"),
    "lengths": (dict(lens=jnp.ones(2, int)), "cudnn"),
    "causal": (dict(mask=Mask.causal()), "cudnn"),
    "bilinear": (dict(score=regard.Bilinear(jnp.ones((64, 64), jnp.float32))), "cudnn"),
    "lengths per query": (dict(lens=jnp.ones((2, 512), int)), "pallas"),
    "causal from the end": (dict(mask=Mask.causal(), axes=dict(T=256)), "pallas"),
    "boolean": (dict(mask=jnp.ones((512, 512), bool)), "pallas"),
    "bias": (dict(bias=True), "blockwise"),
    "float32": (FLOAT32, "pallas"),
    "gaussian": (dict(score=regard.Gaussian()), "pallas"),
    "exact additive": (dict(score=ADDITIVE), "pallas"),
    "no lift": (dict(score=Manhattan(jnp.ones(64, jnp.float32))), "blockwise"),
    "another regime": (dict(normalize=regard.Sparsemax()), "blockwise"),
}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", PICKED)
def test_what_the_rules_pick(name):
    changes, expected = PICKED[name]
    choice = choose(ask(**changes), None)
    assert choice.name == expected
    assert choice.rule.backend == expected
    assert set(choice.why_not()) == set(IMPLEMENTATIONS) - {expected}
    assert all(choice.why_not().values())


@pytest.mark.usefixtures("hopper")
def test_a_backend_that_refuses_is_passed_over():
    """Both that run on a GPU refuse a bias, and both are heard."""
    choice = choose(ask(bias=True), None)
    assert choice.name == "blockwise"
    assert "bias" in choice.why_not()["cudnn"]
    assert "bias" in choice.why_not()["pallas"]
    assert "2,097,152 weights" in choice.why_not()["reference"]


@pytest.mark.usefixtures("hopper")
def test_a_backend_that_could_is_told_why_it_does_not():
    refusals = choose(ask(), None).why_not()
    assert refusals["pallas"] == refusals["blockwise"]
    assert refusals["pallas"].startswith("could, but cudnn is first: on a GPU")


def test_every_backend_has_a_rule_and_the_last_holds_always():
    assert {rule.backend for rule in RULES} == set(IMPLEMENTATIONS) == set(ACCEPTS)
    assert RULES[-1].holds(ask())
    assert ACCEPTS[RULES[-1].backend](ask(normalize=regard.Hard(), bias=True, dropout=True))
    assert all(rule.when and rule.measured for rule in RULES)


def test_choosing_asks_nothing_that_the_device_rules_out():
    """On a CPU no lift is traced to find out that cuDNN is not for it."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Shy(regard.Score):
        def lift(self, query, key, *, visible=None):
            raise AssertionError("asked for its lift")

    assert choose(ask(device=CPU, score=Shy()), None).name == "blockwise"


# ---------------------------------------------------------------------------------------------
# explain


def test_explain_tells_the_rules_and_marks_the_one_that_decided():
    x = jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.bfloat16)
    with on_hopper():
        lines = regard.explain(x, x, x).splitlines()
    assert lines[0].startswith("cudnn runs: fused by cuDNN")
    assert [line.split()[1] for line in lines[1:4]] == ["reference:", "blockwise:", "pallas:"]
    told = lines[-len(RULES) :]
    for rule, line in zip(RULES, told, strict=True):
        assert f"{rule.backend}: {rule.when} (measured: {rule.measured})" in line
    assert [line[0] for line in told] == [" ", ">", " ", " "]


def test_explain_of_a_named_implementation_tells_no_rules():
    x = jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.float32)
    text = regard.explain(x, x, x, implementation=("cudnn", "blockwise"))
    first, second = text.splitlines()
    assert first.startswith("blockwise runs: first of ['cudnn', 'blockwise'] that can; ")
    assert second.startswith("not cudnn: needs ")


# ---------------------------------------------------------------------------------------------
# What a request knows.


def test_where_a_call_runs():
    here = jax.devices("cpu")[0]
    assert device_of(jax.device_put(jnp.ones(3), here)) == CPU
    with jax.default_device(here):
        assert device_of(None) == CPU
    assert device_of(None).platform == jax.default_backend()


def test_a_gpu_is_known_by_its_compute_capability():
    class Card:
        platform = "gpu"

        def __init__(self, capability):
            self.compute_capability = capability

    described = request._described
    assert described(Card("9.0")) == Device("gpu", (9, 0))
    assert described(Card("12.1")) == Device("gpu", (12, 1))
    assert described(Card("gfx942")) == Device("gpu", None)


def ones(*shape):
    return jnp.ones(shape, jnp.float32)


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
    found = ask(score=score).lift
    assert {name: getattr(found, name) for name in expected} == expected


def test_what_is_known_of_the_additive_lift():
    score = regard.Additive(ones(64, 8), ones(64, 8), ones(8))
    with lift_anywhere():
        found = ask(score=score).lift
    assert (found.compact, found.expansion, found.guarded) == (8, True, True)
    assert found.width % (2 * 8) == 0
    assert found.standing.startswith("within ")


@pytest.mark.parametrize(
    "changes",
    [dict(score=Manhattan(ones(64))), dict(normalize=regard.Uniform()), dict(axes=dict(S=0))],
    ids=["no lift", "no scores", "nothing to score"],
)
def test_where_there_is_no_lift(changes):
    assert ask(**changes).lift is None
