"""The verb itself: looking does not touch, the choice of implementation, and explain."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
import regard
from cases import BACKENDS, REGIMES, Case, Sizes
from intermediates import largest
from problem import as_arguments, assert_close, draw
from regard.score.additive import lift_anywhere

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.sampled(2)]

LIFTING = Sizes(T=67, S=71, N=2, K=1)  # long enough for the additive lift to be taken

LOOKED_AT = [
    Case(mask="causal window and lengths per query"),
    Case(score="gaussian", sizes=Sizes(N=None, K=None)),
    Case(score="additive", sizes=LIFTING),
    Case(regime="sparsemax"),
    Case(regime="cone", dtype="bfloat16"),
    Case(mask="segments", sizes=Sizes(B=None, N=None, K=None)),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", LOOKED_AT, ids=str)
def test_returning_the_weights_changes_no_bit(case, backend):
    """out is the same with and without return_weights, and the weights are those it was made
    with.
    """
    problem = draw(case)
    chosen = BACKENDS[backend]
    arguments, masks = problem.as_arguments(problem.inputs), as_arguments(problem.facts)
    attend = functools.partial(
        regard.attend,
        normalize=REGIMES[case.regime].normalize,
        implementation=chosen.implementation,
    )
    with chosen.tiling():
        plain = jax.jit(lambda arguments, masks: attend(**arguments, **masks))(arguments, masks)
        out, seen, lifted = jax.jit(
            lambda arguments, masks: attend(
                **arguments, **masks, return_weights=True, return_lifted=True
            )
        )(arguments, masks)
        value = arguments.pop("value")
        alone = jax.jit(
            lambda arguments, masks: regard.weights(
                **arguments,
                **masks,
                normalize=REGIMES[case.regime].normalize,
                implementation=chosen.implementation,
            )
        )(arguments, masks)
    np.testing.assert_array_equal(out, plain)
    np.testing.assert_array_equal(seen, alone)
    assert seen.shape == problem.shape
    if case.score == "additive":
        assert bool(lifted) is (backend == "blockwise")
    # The weights, pooled in float64, are the output up to the rounding of the sum and of the
    # output.
    pooled = np.einsum(
        "...ts,...sv->...tv", np.asarray(seen, np.float64), _per_head(value, problem.shape)
    )
    pooled = pooled.swapaxes(1, 2) if pooled.ndim == 4 else pooled
    assert_close(out, pooled, problem.tolerance("out"), "out from the weights")


def _per_head(value, shape):
    value = np.asarray(value).astype(np.float64)
    if value.ndim < 4:
        return value
    return np.repeat(value.swapaxes(1, 2), shape[1] // value.shape[2], axis=1)  # [B, N, S, V]


def test_the_weights_of_the_lift_are_the_lifts():
    """At tolerance 2e-2 the lift is visibly not the definition; the weights returned are the
    lift's.
    """
    problem = draw(Case(score="additive", mask="none", sizes=LIFTING))
    arguments = problem.as_arguments(problem.inputs)
    score = arguments.pop("score")
    loose = regard.Additive(score.query_kernel, score.key_kernel, score.vector, tolerance=2e-2)
    with lift_anywhere():
        out, seen = regard.attend(
            **arguments, score=loose, implementation="blockwise", return_weights=True
        )
    apart = np.abs(np.asarray(seen) - problem.pooled.weights).max()
    assert 1e-6 < apart < 2e-2
    pooled = np.einsum(
        "bnts,bnsv->btnv",
        np.asarray(seen, np.float64),
        _per_head(arguments["value"], problem.shape),
    )
    assert_close(out, pooled, 2e-6, "out from the weights")


@pytest.mark.parametrize(
    "flags", [(), ("return_weights",), ("return_lifted",), ("return_weights", "return_lifted")]
)
def test_what_comes_back(flags):
    x = jnp.ones((2, 3, 4), jnp.float32)
    got = regard.attend(x, x, x, **dict.fromkeys(flags, True))
    if not flags:
        assert got.shape == (2, 3, 4)
        return
    assert isinstance(got, tuple)
    shapes = [(2, 3, 4)] + [
        {"return_weights": (2, 3, 3), "return_lifted": ()}[flag] for flag in flags
    ]
    assert [part.shape for part in got] == shapes
    if "return_lifted" in flags:
        assert got[-1].dtype == jnp.bool_


def test_defaults_are_scaled_dot_product_attention():
    """softmax(q k^T / sqrt(d)) v, as everyone writes it; and jax.nn's function of the same name."""
    rng = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(rng.standard_normal((2, n, 3, 8)), jnp.float32) for n in (5, 7, 7)
    )
    expected = jax.nn.dot_product_attention(query, key, value)
    np.testing.assert_allclose(regard.attend(query, key, value), expected, rtol=2e-5, atol=1e-6)


def test_numpy_arrays_and_lists_of_lengths_are_taken():
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((2, n, 4)).astype(np.float32) for n in (3, 5, 5))
    out = regard.attend(query, key, value, valid_lens=np.array([2, 5]))
    may = oracle.allowed((2, 3, 5), valid_lens=[2, 5])
    assert_close(out, oracle.attend(query, key, value, score=oracle.Dot(), may=may).out, 2e-6)


# ---------------------------------------------------------------------------------------------
# Which implementation.


def small():
    x = jnp.ones((2, 8, 4), jnp.float32)
    return x, x, x


LARGE = (jax.ShapeDtypeStruct((1, 4096, 8), jnp.float32),) * 3


def test_a_sequence_is_an_order_of_preference():
    """The first that can do it; an implementation that this device lacks is passed over."""
    expected = regard.attend(*small(), implementation="reference")
    for names in (
        ["reference"],
        ("cudnn", "reference"),
        ("cudnn", "pallas", "reference", "blockwise"),
    ):
        np.testing.assert_array_equal(regard.attend(*small(), implementation=names), expected)
    chosen = regard.explain(*small(), implementation=("blockwise", "reference"))
    assert "blockwise" in chosen.splitlines()[0]


@pytest.mark.parametrize("name", ["cudnn", "pallas"])
def test_a_named_implementation_insists(name):
    with pytest.raises(NotImplementedError, match=name):
        regard.attend(*small(), implementation=name)


def test_all_refusals_come_back_together():
    with pytest.raises(NotImplementedError) as refused:
        regard.attend(*small(), implementation=("cudnn", "pallas"))
    assert "cudnn" in str(refused.value)
    assert "pallas" in str(refused.value)


def test_none_takes_the_dense_path_when_small_and_never_when_large():
    name, shape = largest(regard.attend, *LARGE)
    assert np.prod(shape) < 4096 * 4096, f"{name} makes {shape}"
    assert "reference" in regard.explain(*small()).splitlines()[0]
    assert "blockwise" in regard.explain(*LARGE).splitlines()[0]


def test_explain_says_what_runs_and_why_not_the_others():
    for arguments, chosen in ((small(), "reference"), (LARGE, "blockwise")):
        text = regard.explain(*arguments)
        first, *rest = text.splitlines()
        assert chosen in first
        for name in {"reference", "blockwise", "cudnn", "pallas"} - {chosen}:
            lines = [line for line in rest if name in line]
            assert lines, f"nothing said about {name} in:\n{text}"
            assert len(lines[0].split()) > 2, f"no reason in: {lines[0]}"


def test_explain_takes_shapes_for_arrays():
    arrays = small()
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    assert regard.explain(*shapes) == regard.explain(*arrays)


def test_explain_tells_about_the_additive_lift():
    """Terms, tolerance and range: the static part of which path runs."""
    kernel, vector = jnp.ones((8, 16), jnp.float32), jnp.ones(16, jnp.float32)
    with lift_anywhere():
        text = regard.explain(*LARGE, score=regard.Additive(kernel, kernel, vector))
        exact = regard.explain(
            *LARGE, score=regard.Additive(kernel, kernel, vector, tolerance="exact")
        )
    assert "1e-06" in text
    assert "sine" in text
    assert "sine" not in exact


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what a CPU says")
def test_explain_says_that_a_cpu_does_not_lift():
    kernel, vector = jnp.ones((8, 16), jnp.float32), jnp.ones(16, jnp.float32)
    text = regard.explain(*LARGE, score=regard.Additive(kernel, kernel, vector))
    assert "exact" in text
    assert "sine" not in text


def test_explain_raises_what_attend_raises():
    with pytest.raises(ValueError, match="same length S"):
        regard.explain(
            jnp.ones((2, 3, 4), jnp.float32),
            jnp.ones((2, 5, 4), jnp.float32),
            jnp.ones((2, 6, 4), jnp.float32),
        )
    with pytest.raises(ValueError, match="unknown implementation"):
        regard.explain(*small(), implementation="fast")


# ---------------------------------------------------------------------------------------------
# Scores of one's own, as people write them first.


class Plain(regard.Score):
    """A class without attributes, and nothing registered."""

    def scores(self, query, key):
        return 2 * jnp.einsum("...td,...sd->...ts", query, key)


def test_a_score_without_attributes_needs_no_registration():
    x = jax.random.normal(jax.random.key(0), (2, 6, 4), jnp.float32)
    expected = regard.attend(x, x, x, score=regard.Dot(2.0))
    assert "by definition" in regard.explain(x, x, x, score=Plain())
    for implementation in ("reference", "blockwise"):
        out = regard.attend(x, x, x, score=Plain(), implementation=implementation)
        np.testing.assert_allclose(out, expected, rtol=2e-6)


@pytest.mark.parametrize("attend", ["at once", "from a memory"])
def test_a_score_without_attributes_needs_no_registration_inside_another(attend):
    class Inner(Plain):
        pass

    x, score = jax.random.normal(jax.random.key(0), (2, 6, 4), jnp.float32), regard.Rotary(Inner())
    if attend == "at once":
        found = regard.attend(x, x, x, score=score)
    else:
        found = regard.attend(x, regard.Memory.of(x, x, score=score))
    expected = regard.attend(x, x, x, score=regard.Rotary(regard.Dot(2.0)))
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)


def test_scores_of_equal_structure_are_told_apart():
    """JAX alone takes the structures of these classes for equal, and where their hashes are alike
    it runs the program of another one: in 50 classes, a few times.
    """

    def score_times(factor):
        class Times(regard.Score):
            rate: float = 1.0

            def scores(self, query, key):
                return factor * self.rate * jnp.einsum("...td,...sd->...ts", query, key)

        return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(Times))()

    x = jnp.asarray([[1.0], [0.5]], jnp.float32)
    factors = [0.1 * number for number in range(50)]
    found = [regard.weights(x, x, score=score_times(factor)) for factor in factors]
    wanted = [jax.nn.softmax(factor * x @ x.T, axis=-1) for factor in factors]
    np.testing.assert_allclose(found, wanted, rtol=2e-6)


def test_regard_s_own_scores_have_structures_of_their_own():
    array = jnp.ones(3, jnp.float32)
    scores = [regard.Dot(array), regard.Gaussian(array), regard.Bilinear(array), Plain()]
    structures = [jax.tree.structure(score) for score in scores]
    assert all(one != other for one, other in itertools.combinations(structures, 2))
    assert structures[0] == jax.tree.structure(regard.Dot(2.0))
    paths = jax.tree_util.tree_leaves_with_path(2.0 * scores[0])
    assert [jax.tree_util.keystr(path) for path, _ in paths] == [".factor", ".score.scale"]


def test_an_attribute_set_after_the_first_call_is_not_lost():
    class Scaled(regard.Score):
        rate = 2.0

        def scores(self, query, key):
            return self.rate * jnp.einsum("...td,...sd->...ts", query, key)

    x, score = jnp.ones((2, 6, 4), jnp.float32), Scaled()
    regard.attend(x, x, x, score=score)
    score.rate = 3.0
    with pytest.raises(TypeError, match=r"must be a pytree.* Got Scaled with rate"):
        regard.attend(x, x, x, score=score)


def test_a_score_with_unregistered_slots_says_what_to_write():
    @dataclasses.dataclass(frozen=True, slots=True)
    class Slots(regard.Score):
        rate: float = 2.0

    x = jnp.ones((2, 6, 4), jnp.float32)
    with pytest.raises(TypeError, match=r"must be a pytree.* Got Slots with rate"):
        regard.attend(x, x, x, score=Slots())


def test_a_score_with_unregistered_parameters_says_what_to_write():
    class Unregistered(regard.Score):
        def __init__(self, rate):
            self.rate = rate

        def scores(self, query, key):
            return self.rate * jnp.einsum("...td,...sd->...ts", query, key)

    x = jnp.ones((2, 6, 4), jnp.float32)
    wanted = "must be a pytree.* Got Unregistered with rate. Fix: @jax.tree_util.register_dataclass"
    for call in (regard.attend, regard.explain):
        with pytest.raises(TypeError, match=wanted):
            call(x, x, x, score=Unregistered(2.0))
