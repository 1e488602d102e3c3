"""The table of cases: complete, consistent, and its inputs are what it says."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from regard.bench.cases import CASES, CHECKED_TERMS, Case, make_inputs, select
from regard.bench.peers import PEERS
from regard.bench.targets import TARGETS

TINY = Case("tiny", "additive", B=2, T=5, S=7, D=4, V=3)


def test_names_are_unique():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


def test_the_shapes_that_are_promised_are_there():
    shapes = {
        case.name: (case.score, case.B, case.T, case.S, case.N, case.D, case.V) for case in CASES
    }
    assert shapes["additive_book"] == ("additive", 4, 512, 512, None, 64, 64)
    assert shapes["dot_heads"] == ("dot", 2, 1024, 1024, 8, 64, 64)
    assert shapes["causal_4096"] == ("dot", 1, 4096, 4096, 4, 64, 64)
    assert shapes["gaussian_heads"][1:] == shapes["dot_heads"][1:] == shapes["bilinear_heads"][1:]
    assert {case.T for case in CASES if case.name.startswith("sweep_")} >= {256, 4096, 16384}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_peer_of_a_case_is_known(case):
    assert set(case.against) <= set(PEERS)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.over[0])
def test_every_target_names_rows_that_a_full_run_has(target):
    cases = {case.name: case for case in CASES}
    for name, who in filter(None, (target.over, target.under)):
        assert who in ("regard", *cases[name].against)
        assert cases[name].timed or target.measure == "memory"


def test_cases_that_a_target_compares_are_interleaved():
    groups = {case.name: case.group for case in CASES}
    for target in TARGETS:
        if target.under is not None:
            assert groups[target.over[0]] == groups[target.under[0]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize("score", ["dot", "gaussian", "bilinear", "additive"])
def test_inputs_have_the_shapes_and_dtype_of_the_case(score, heads, dtype):
    case = dataclasses.replace(TINY, score=score, N=heads, dtype=dtype)
    inputs = make_inputs(case)
    middle = () if heads is None else (heads,)
    assert inputs.arrays["query"].shape == (2, 5, *middle, 4)
    assert inputs.arrays["key"].shape == (2, 7, *middle, 4)
    assert inputs.arrays["value"].shape == (2, 7, *middle, 3)
    assert inputs.cotangent.shape == (2, 5, *middle, 3)
    for array in (*inputs.arrays.values(), inputs.cotangent):
        assert array.dtype == jnp.dtype(dtype)


def test_valid_lens_by_mask_kind():
    def lens(mask):
        return make_inputs(dataclasses.replace(TINY, mask=mask)).valid_lens

    assert lens("none") is None
    assert lens("causal") is None
    np.testing.assert_array_equal(lens("lengths"), [3, 3])
    np.testing.assert_array_equal(lens("triangular"), [[1, 2, 3, 4, 5]] * 2)


def test_inputs_are_drawn_from_the_seed():
    first, same, other = (make_inputs(TINY, seed).arrays["query"] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, same)
    assert not np.array_equal(first, other)


def test_pre_activations_have_unit_variance():
    arrays = make_inputs(next(case for case in CASES if case.name == "additive_book")).arrays
    np.testing.assert_allclose((arrays["query"] @ arrays["query_kernel"]).std(), 1.0, rtol=0.05)
    np.testing.assert_allclose((arrays["key"] @ arrays["key_kernel"]).std(), 1.0, rtol=0.05)


def test_long_cases_are_checked_on_some_rows_short_ones_on_all():
    np.testing.assert_array_equal(make_inputs(TINY).rows, np.arange(5))
    long = next(case for case in CASES if case.name == "sweep_16384")
    rows = make_inputs(long).rows
    assert rows[0] == 0
    assert rows[-1] == long.T - 1
    assert len(rows) * long.terms // long.T <= CHECKED_TERMS


def test_the_checked_cotangent_is_zero_elsewhere():
    inputs = dataclasses.replace(make_inputs(TINY), rows=np.array([0, 3]))
    checked = inputs.checked_cotangent
    np.testing.assert_array_equal(checked[:, [0, 3]], inputs.cotangent[:, [0, 3]])
    np.testing.assert_array_equal(checked[:, [1, 2, 4]], 0)


def test_cases_of_one_problem_share_their_peers_runs():
    loose = dataclasses.replace(TINY, name="loose", tolerance=1e-3, group="other", rounds=9)
    assert loose.problem == TINY.problem
    assert dataclasses.replace(TINY, mask="lengths").problem != TINY.problem


def test_select_by_glob_keeps_the_table_order():
    names = [case.name for case in select(("dot_*", "additive_book"))]
    assert names == ["additive_book", "dot_heads", "dot_heads_backward"]
    assert select() == CASES


def test_select_says_what_there_is_when_nothing_matches():
    with pytest.raises(ValueError, match=r"no case matches 'nothing\*'. Known are additive_book"):
        select(("nothing*",))
