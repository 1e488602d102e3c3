"""The tables of cases: complete, consistent, and their inputs are what they say."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from regard.bench.cases.case import CHECKED_KEYS, CHECKED_TERMS, Case, make_inputs, select
from regard.bench.cases.tables import CPU_CASES, GPU_CASES
from regard.bench.peers.jax_peers import PEERS
from regard.bench.results.targets import CPU_TARGETS, GPU_TARGETS

TINY = Case("tiny", "additive", B=2, T=5, S=7, D=4, V=3)
TABLES = {"cpu": CPU_CASES, "gpu": GPU_CASES}
ALL_CASES = [pytest.param(case, id=f"{case.device}-{case.name}") for case in CPU_CASES + GPU_CASES]
ALL_TARGETS = [
    pytest.param(device, target, id=f"{device}-{target.promise}")
    for device, targets in (("cpu", CPU_TARGETS), ("gpu", GPU_TARGETS))
    for target in targets
]


def shapes_of(cases):
    return {
        case.name: (case.score, case.B, case.T, case.S, case.N, case.D, case.V) for case in cases
    }


@pytest.mark.parametrize("device", TABLES, ids="on_{}".format)
def test_a_table_is_for_one_device_and_its_names_are_unique(device):
    names = [case.name for case in TABLES[device]]
    assert len(set(names)) == len(names)
    assert {case.device for case in TABLES[device]} == {device}


def test_the_shapes_that_are_promised_are_there():
    shapes = shapes_of(CPU_CASES)
    assert shapes["additive_book"] == ("additive", 4, 512, 512, None, 64, 64)
    assert shapes["dot_heads"] == ("dot", 2, 1024, 1024, 8, 64, 64)
    assert shapes["causal_4096"] == ("dot", 1, 4096, 4096, 4, 64, 64)
    assert shapes["gaussian_heads"][1:] == shapes["dot_heads"][1:] == shapes["bilinear_heads"][1:]
    assert {case.T for case in CPU_CASES if case.name.startswith("sweep_")} >= {256, 4096, 16384}


def test_the_shapes_of_the_design_are_there_for_a_gpu():
    shapes, cases = shapes_of(GPU_CASES), {case.name: case for case in GPU_CASES}
    for name, tolerance in (("", None), ("_2e-2", 2e-2), ("_exact", "exact")):
        assert shapes[f"additive{name}"] == ("additive", 8, 4096, 4096, None, 64, 64)
        assert cases[f"additive{name}"].tolerance == tolerance
    assert shapes["additive_256"] == ("additive", 8, 4096, 4096, None, 256, 256)
    assert shapes["error_1024"] == ("additive", 8, 1024, 1024, None, 64, 64)
    assert shapes["dot_128"] == ("dot", 4, 4096, 4096, 16, 128, 128)
    assert shapes["gaussian_128"][1:] == shapes["bilinear_128"][1:] == shapes["dot_128"][1:]
    assert shapes["triangular_64"] == shapes["dot_64"] == ("dot", 4, 4096, 4096, 16, 64, 64)
    assert shapes["kernel_3072"] == ("features", 8, 4096, 4096, None, 3072, 256)
    assert shapes["sweep_131072_backward"] == ("additive", 1, 131072, 131072, None, 64, 64)
    wide = {case.name for case in GPU_CASES if case.dtype != "bfloat16"}
    assert wide == {
        f"float32_{name}{way}" for name in ("additive", "dot") for way in ("", "_backward")
    }
    swept = {case.T for case in GPU_CASES if case.name.startswith("sweep_")}
    assert swept == {2**power for power in range(10, 18)}


@pytest.mark.parametrize("case", ALL_CASES)
def test_every_peer_of_a_case_is_known(case):
    assert set(case.against) <= set(PEERS)


@pytest.mark.parametrize(("device", "target"), ALL_TARGETS)
def test_every_target_names_rows_that_a_full_run_has(device, target):
    cases = {case.name: case for case in TABLES[device]}
    for name, who in target.places:
        assert who in ("regard", *cases[name].against)
        assert cases[name].timed or target.measure in ("MiB", "peak GiB")


@pytest.mark.parametrize(("device", "target"), ALL_TARGETS)
def test_cases_that_a_target_compares_are_interleaved(device, target):
    groups = {case.name: case.group for case in TABLES[device]}
    assert len({groups[name] for name, _ in target.places}) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize("score", ["dot", "gaussian", "bilinear", "additive", "features"])
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
    arrays = make_inputs(next(c for c in CPU_CASES if c.name == "additive_book")).arrays
    np.testing.assert_allclose((arrays["query"] @ arrays["query_kernel"]).std(), 1.0, rtol=0.05)
    np.testing.assert_allclose((arrays["key"] @ arrays["key_kernel"]).std(), 1.0, rtol=0.05)


def test_products_of_features_have_unit_variance():
    arrays = make_inputs(Case("wide", "features", B=1, T=64, S=64, D=256, V=8)).arrays
    scores = arrays["query"][0] @ arrays["key"][0].T
    np.testing.assert_allclose(scores.std(), 1.0, rtol=0.1)


def test_long_cases_are_checked_on_some_rows_short_ones_on_all():
    np.testing.assert_array_equal(make_inputs(TINY).rows, np.arange(5))
    np.testing.assert_array_equal(make_inputs(TINY).keys, np.arange(7))
    long = dataclasses.replace(TINY, B=8, T=4096, S=8192, D=64)
    inputs = make_inputs(long)
    for positions, length in ((inputs.rows, long.T), (inputs.keys, long.S)):
        assert positions[0] == 0
        assert positions[-1] == length - 1
    assert len(inputs.rows) * long.terms // long.T <= CHECKED_TERMS
    assert len(inputs.keys) * long.B <= CHECKED_KEYS


@pytest.mark.parametrize(
    "case", [c for c in CPU_CASES if c.backward and c.timed], ids=lambda case: case.name
)
def test_on_a_cpu_gradients_are_checked_at_every_key(case):
    np.testing.assert_array_equal(make_inputs(case).keys, np.arange(case.S))


def test_what_is_checked_of_a_result():
    inputs = dataclasses.replace(make_inputs(TINY), rows=np.array([1]), keys=np.array([2, 6]))
    positions = np.arange(7)[None, :].repeat(2, 0)
    np.testing.assert_array_equal(inputs.checked("d_query", positions), [[1], [1]])
    np.testing.assert_array_equal(inputs.checked("d_value", positions), [[2, 6], [2, 6]])
    np.testing.assert_array_equal(inputs.checked("d_vector", positions), positions)


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
    names = [case.name for case in select(CPU_CASES, ["dot_*", "additive_book"])]
    assert names == ["additive_book", "dot_heads", "dot_heads_backward"]
    assert select(CPU_CASES) == CPU_CASES


def test_select_says_what_there_is_when_nothing_matches():
    with pytest.raises(ValueError, match=r"no case matches 'nothing\*'. Known are additive_book"):
        select(CPU_CASES, ["nothing*"])
