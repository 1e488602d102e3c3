"""The survey: its cells follow from the seed, and cover what it says."""

from typing import get_args

import pytest

from regard.bench.cases.case import Regime, make_inputs
from regard.bench.cases.survey import FAMILIES, family_of, survey
from regard.bench.peers.jax_peers import PEERS


@pytest.mark.parametrize(("device", "least"), [("cpu", 80), ("gpu", 150)])
def test_enough_cells_of_every_kind(device, least):
    cells = survey(device)
    assert len(cells) == len({case.name for case in cells}) == len({c.group for c in cells})
    assert len(cells) >= least
    assert {family_of(case.group) for case in cells} == set(FAMILIES)
    assert {case.device for case in cells} == {device}
    assert {case.dtype for case in cells} == {"float32", "bfloat16", "float16"}
    assert {case.score for case in cells} == {"dot", "gaussian", "bilinear", "additive"}
    assert {case.direction for case in cells} == {"forward", "forward+backward"}
    for kind in ("none", "causal", "lengths", "segments", "boolean"):
        assert any(case.mask == kind for case in cells), kind
    assert {case.normalize for case in cells} == set(get_args(Regime))
    assert {case.dropout for case in cells} == {0.0, 0.1}
    assert any(case.bias for case in cells)
    assert any(case.backward for case in cells if case.dropout and case.score == "dot")
    assert any(case.K for case in cells)
    for case in cells:
        assert set(case.against) <= set(PEERS)
        assert case.K is None or case.N % case.K == 0


def test_the_seed_decides():
    assert survey("cpu", seed=3) == survey("cpu", seed=3) != survey("cpu", seed=4)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_every_family_is_reached_before_the_second_cell_of_any(device):
    families = [family_of(case.group) for case in survey(device)]
    assert families == list(FAMILIES) * (len(families) // len(FAMILIES))


@pytest.mark.parametrize("who", ["torch", "flex"])
def test_torch_is_given_what_it_computes(who):
    given = [case for case in survey("gpu") if who in case.against]
    assert {case.score for case in given} == {"dot"} | ({"additive"} if who == "torch" else set())
    assert {case.normalize for case in given} == {"softmax"}
    assert len(given) >= {"torch": 100, "flex": 25}[who]


def test_a_cell_has_inputs():
    case = next(c for c in survey("cpu") if c.mask == "segments" and c.T < 400)
    inputs = make_inputs(case)
    assert inputs.valid_lens.shape == (case.B, case.T)
    assert len(set(inputs.valid_lens[0].tolist())) == 4
