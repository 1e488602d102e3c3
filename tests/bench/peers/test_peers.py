"""Every peer that is installed computes the same attention, forward and backward."""

import dataclasses
import importlib.util

import jax
import numpy as np
import pytest

from regard.bench.cases.case import Case, make_inputs
from regard.bench.cases.expected import allowed_error, expected, relative_errors
from regard.bench.cases.tables import GPU_CASES
from regard.bench.peers.jax_peers import PEERS, build
from regard.bench.peers.program import Absent, needs_memory
from regard.bench.run.timing import DeviceClock

pytestmark = pytest.mark.sampled(4)

# Different lengths and widths, so that no swapped axis goes unseen.
DOT = Case("tiny", "dot", B=2, T=6, S=9, D=4, V=4, N=3, direction="forward+backward")
ADDITIVE = dataclasses.replace(DOT, score="additive", V=5, N=None)

ABLE = {
    "regard": [DOT, ADDITIVE],
    "jax.nn": [DOT, dataclasses.replace(DOT, score="bilinear")],
    "keras": [DOT, ADDITIVE],
    "book": [ADDITIVE],
    "plain": [DOT, ADDITIVE],
    "torch": [dataclasses.replace(DOT, V=5), ADDITIVE],
    "flex": [dataclasses.replace(DOT, direction="forward")],
}
UNABLE = {
    ("book", "additive", "causal"),
    ("torch", "additive", "causal"),
    ("keras", "additive", "causal"),
    ("keras", "additive", "triangular"),
}
COMBINATIONS = [
    pytest.param(
        who,
        dataclasses.replace(case, mask=mask),
        marks=[] if who in ("regard", "book", "plain", "jax.nn") else pytest.mark.peers,
        id=f"{who}-{case.score}-{mask}",
    )
    for who, cases in ABLE.items()
    for case in cases
    for mask in ("none", "lengths", "triangular", "causal")
    if (who, case.score, mask) not in UNABLE
]


def needs(who):
    package = {"keras": "keras", "torch": "torch", "flex": "torch"}.get(who)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


@pytest.mark.filterwarnings("ignore")  # the peers' own
@pytest.mark.parametrize(("who", "case"), COMBINATIONS)
def test_agrees_with_float64(who, case):
    needs(who)
    if case.mask == "causal":
        # torch aligns the diagonal at the start, the others at the end: squares only.
        case = dataclasses.replace(case, S=case.T)
    inputs = make_inputs(case)
    program = build(who, case, inputs)
    errors = relative_errors(program.outputs(), expected(case, inputs))
    gradients = {f"d_{name}" for name in inputs.arrays} if case.backward else set()
    assert set(errors) == {"out"} | gradients
    assert max(errors.values()) < 1e-5, errors
    program.run()


SHARED = dataclasses.replace(DOT, N=4, K=2, S=6, mask="segments", bias=True)
SURVEYED = [
    *((who, SHARED) for who in ("regard", "jax.nn", "torch")),
    *((who, dataclasses.replace(SHARED, mask="boolean", N=None, K=None))
      for who in ("regard", "jax.nn", "torch")),
    *((who, dataclasses.replace(ADDITIVE, mask="boolean", bias=True))
      for who in ("regard", "book", "torch")),
    ("jax.nn", dataclasses.replace(DOT, score="gaussian", N=4, K=2)),
    ("jax.nn", dataclasses.replace(DOT, mask="causal")),  # T < S
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("who", "case"), SURVEYED)
def test_agrees_with_float64_on_what_the_survey_adds(who, case):
    needs(who)
    inputs = make_inputs(case)
    errors = relative_errors(build(who, case, inputs).outputs(), expected(case, inputs))
    assert set(errors) == {"out"} | {f"d_{name}" for name in inputs.arrays}
    assert max(errors.values()) < 1e-5, errors


REGIMES = ("softmax", "sparsemax", "hard", "uniform", "kernel", "cone")


@pytest.mark.parametrize("who", ["regard", "plain"])
@pytest.mark.parametrize("regime", REGIMES)
def test_every_regime_agrees_with_float64(who, regime):
    score = dict(softmax="additive", kernel="gaussian", cone="bilinear").get(regime, "dot")
    base = ADDITIVE if score == "additive" else dataclasses.replace(DOT, N=4, K=2)
    case = dataclasses.replace(base, score=score, mask="lengths", normalize=regime, bias=True)
    inputs = make_inputs(case)
    program = build(who, case, inputs)
    errors = relative_errors(program.outputs(), expected(case, inputs))
    assert set(errors) == {"out"} | {f"d_{name}" for name in inputs.arrays}
    assert max(errors.values()) < 1e-5, errors
    assert program.ran == ("reference" if who == "regard" else None)


@pytest.mark.parametrize("who", ["regard", "plain", "torch"])
def test_dropout_is_bounded_by_its_own_noise(who):
    needs(who)
    case = dataclasses.replace(DOT, N=4, T=40, S=60, D=16, V=16, dropout=0.1)
    inputs = make_inputs(case)
    answer = expected(case, inputs)
    outputs = build(who, case, inputs).outputs()
    errors = relative_errors(outputs, answer)
    assert max(errors.values()) < allowed_error(case), errors
    assert errors["out"] > 0.05  # weights were dropped
    unscaled = {name: 2.0 * result for name, result in outputs.items()}
    assert max(relative_errors(unscaled, answer).values()) > allowed_error(case)


@pytest.mark.parametrize("who", ["jax.nn", "book", "keras", "flex"])
@pytest.mark.parametrize("change", [dict(dropout=0.1), dict(normalize="sparsemax")])
def test_who_cannot_says_so(who, change):
    needs(who)
    case = dataclasses.replace(ADDITIVE if who == "book" else DOT, direction="forward", **change)
    with pytest.raises(Absent, match="softmax"):
        build(who, case, make_inputs(case))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
@pytest.mark.parametrize("mask", ["none", "lengths", "triangular", "causal"])
@pytest.mark.parametrize("who", ["jax.nn cudnn", "torch", "flex"])
def test_agrees_with_float64_on_a_gpu(who, mask, direction):
    needs(who)
    case = Case(
        "small", "dot", B=2, T=256, S=256, D=64, V=64, N=2,
        dtype="bfloat16", mask=mask, direction=direction, device="gpu",
    )  # fmt: skip
    inputs = make_inputs(case)
    program = build(who, case, inputs)
    errors = relative_errors(program.outputs(), expected(case, inputs))
    assert max(errors.values()) < 1e-2, errors
    assert 0 < DeviceClock()(program.run) < 0.1


@pytest.mark.parametrize("who", ["jax.nn", "book"])
def test_a_broken_parameter_is_seen(who):
    case = DOT if who == "jax.nn" else ADDITIVE
    inputs = make_inputs(case)
    key = inputs.arrays["key"].copy()
    key[1, 4] += 0.5
    broken = dataclasses.replace(inputs, arrays=inputs.arrays | {"key": key})
    errors = relative_errors(build(who, case, broken).outputs(), expected(case, inputs))
    assert errors["out"] > 1e-3


@pytest.mark.parametrize("who", ["regard", "jax.nn"])
def test_only_what_is_checked_comes_back(who):
    inputs = dataclasses.replace(make_inputs(DOT), rows=np.array([0, 5]), keys=np.array([2, 3, 8]))
    program = build(who, DOT, inputs)
    outputs = program.outputs()
    assert outputs["out"].shape == outputs["d_query"].shape == (2, 2, 3, 4)
    assert outputs["d_key"].shape == outputs["d_value"].shape == (2, 3, 3, 4)
    assert max(relative_errors(outputs, expected(DOT, inputs)).values()) < 1e-5


def test_a_run_blocks_and_gives_the_output():
    forward = dataclasses.replace(DOT, direction="forward")
    results, _ = build("jax.nn", forward, make_inputs(forward)).run()
    assert set(results) == {"out"}
    assert results["out"].is_ready()


def test_memory_of_a_compiled_program_is_known():
    case = dataclasses.replace(ADDITIVE, T=64, S=64, D=8, direction="forward")
    program = build("book", case, make_inputs(case))
    assert program.temp_bytes is not None
    assert program.temp_bytes >= case.terms * 4  # the (B, T, S, h) tensor


def test_the_guard_can_be_taken_away_for_its_price():
    case = dataclasses.replace(ADDITIVE, T=512, S=512, D=8, direction="forward", tolerance=1e-3)
    inputs = make_inputs(case)
    guarded, bare = build("lift", case, inputs), build("unguarded", case, inputs)
    assert guarded.outputs()["lifted"]
    assert guarded.text != bare.text
    np.testing.assert_allclose(guarded.outputs()["out"], bare.outputs()["out"], atol=1e-5)


@pytest.mark.parametrize(
    ("who", "case", "reason"),
    [
        ("jax.nn", ADDITIVE, "jax.nn has no additive attention"),
        ("book", DOT, "the book's form is additive"),
        ("keras", dataclasses.replace(DOT, score="gaussian"), "keras has no gaussian attention"),
        ("torch", dataclasses.replace(DOT, score="gaussian"), "torch has no gaussian attention"),
        ("keras", dataclasses.replace(ADDITIVE, mask="causal"), "has no causal mask"),
        ("keras", dataclasses.replace(ADDITIVE, mask="triangular"), "has no triangular mask"),
        ("book", dataclasses.replace(ADDITIVE, mask="causal"), "with valid lengths"),
        ("torch", dataclasses.replace(ADDITIVE, mask="causal"), "valid lengths"),
        ("flex", ADDITIVE, "cannot make additive scores"),
        ("flex", DOT, "no backward pass on a CPU"),
    ],
)
def test_a_peer_says_why_it_cannot(who, case, reason):
    needs(who)
    with pytest.raises(Absent, match=reason):
        build(who, case, make_inputs(case))


@pytest.mark.parametrize(("who", "package"), [("keras",) * 2, ("torch",) * 2, ("flex", "torch")])
def test_a_peer_that_is_not_installed_says_so(who, package, monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(Absent, match=f"{package} is not installed"):
        build(who, DOT, make_inputs(DOT))


def test_what_would_not_fit_is_not_tried(monkeypatch):
    monkeypatch.setattr("regard.bench.peers.program._free_memory", lambda: 1000)
    with pytest.raises(Absent, match="would take about 0 GiB of 0"):
        build("book", ADDITIVE, make_inputs(ADDITIVE))


@pytest.mark.parametrize(
    ("case", "fits"),
    [("additive_256", True), ("sweep_16384_backward", True), ("sweep_32768", False)],
)
def test_how_far_the_book_goes_on_a_gpu(case, fits, monkeypatch):
    monkeypatch.setattr("regard.bench.peers.program._device_memory", lambda: 132 * 2**30)
    case = next(c for c in GPU_CASES if c.name == case)
    if fits:
        needs_memory(case)
    else:
        with pytest.raises(Absent, match="would take about 128 GiB of 132"):
            needs_memory(case)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_cudnn_needs_a_gpu():
    forward = dataclasses.replace(DOT, direction="forward", dtype="bfloat16", D=64, V=64)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"(?i)cu"):
        build("jax.nn cudnn", forward, make_inputs(forward))


def test_every_peer_is_tested_here():
    assert set(ABLE) | {"lift", "unguarded", "jax.nn cudnn"} == set(PEERS)
