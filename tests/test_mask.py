"""Masks: pytrees, `&`, both alignments, and ranges that stay ranges."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracle
import regard
from cases import BACKENDS, MASKS
from intermediates import largest
from problem import as_arguments
from regard import Mask
from regard.mask import resolve
from regard.shapes import Axes

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.sampled(2)]

B, N, T, S = 2, 3, 5, 7


def seen(shape, mask=None, valid_lens=None):
    """Which weights are not zero: the mask, as attention sees it. Uniform weights are 1/count
    or 0.
    """
    *lead, T, S = shape
    query, key = {
        0: lambda: (jnp.zeros((T, 1), jnp.float32), jnp.zeros((S, 1), jnp.float32)),
        1: lambda: (jnp.zeros((*lead, T, 1), jnp.float32), jnp.zeros((*lead, S, 1), jnp.float32)),
        2: lambda: (
            jnp.zeros((lead[0], T, lead[1], 1), jnp.float32),
            jnp.zeros((lead[0], S, lead[1], 1), jnp.float32),
        ),
    }[len(lead)]()
    weights = regard.weights(
        query,
        key,
        mask=mask,
        valid_lens=valid_lens,
        normalize=regard.Uniform(),
        implementation="reference",
    )
    return np.asarray(weights) > 0


@pytest.mark.parametrize("name", MASKS)
def test_every_mask_is_the_oracles(name):
    facts = MASKS[name](np.random.default_rng(1), B, N, T, S)
    arguments = as_arguments(facts)
    facts.pop("as_mask", None)
    np.testing.assert_array_equal(
        seen((B, N, T, S), **arguments), oracle.allowed((B, N, T, S), **facts)
    )


@pytest.mark.parametrize("shape", [(5, 5), (3, 7), (7, 3), (1, 4), (4, 1)])
@pytest.mark.parametrize("align", ["end", "start"])
def test_causal_alignments(shape, align):
    expected = oracle.allowed(shape, causal=align)
    np.testing.assert_array_equal(seen(shape, Mask.causal(align=align)), expected)
    np.testing.assert_array_equal(seen(shape, Mask.window(None, 0, align=align)), expected)
    # By hand: the last query sees every key, or the first query the first key only.
    if align == "end":
        assert expected[-1].all()
    else:
        np.testing.assert_array_equal(expected[0], np.arange(shape[1]) == 0)


def test_causal_aligns_at_the_end_by_default():
    np.testing.assert_array_equal(
        seen((2, 5), Mask.causal()), seen((2, 5), Mask.causal(align="end"))
    )
    assert (seen((2, 5), Mask.causal()) != seen((2, 5), Mask.causal(align="start"))).any()


@pytest.mark.parametrize(
    ("left", "right"), list(itertools.product([0, 2, 100, None], [0, 1, 100, None]))
)
@pytest.mark.parametrize("align", ["end", "start"])
def test_windows(left, right, align):
    np.testing.assert_array_equal(
        seen((4, 6), Mask.window(left, right, align=align)),
        oracle.allowed((4, 6), window=(left, right, align)),
    )


@pytest.mark.parametrize(
    ("shape", "lens"),
    [
        ((T, S), np.int32(3)),
        ((T, S), np.arange(T)),
        ((B, T, S), np.int32(0)),
        ((B, T, S), np.array([2, 9])),
        ((B, T, S), np.arange(B * T).reshape(B, T)),
        ((B, N, T, S), np.int64(4)),
        ((B, N, T, S), np.array([0, 7], np.uint8)),
        ((B, N, T, S), np.arange(B * T).reshape(B, T) - 2),
        ((B, N, T, S), np.arange(B * N * T).reshape(B, N, T) % 9),
    ],
    ids=lambda x: str(list(np.shape(x)) if not isinstance(x, tuple) else x),
)
def test_lengths_of_every_shape(shape, lens):
    """As valid_lens and as Mask.lengths, below 0 and past S alike clipped."""
    expected = oracle.allowed(shape, valid_lens=lens.astype(np.int64))
    np.testing.assert_array_equal(seen(shape, valid_lens=jnp.asarray(lens)), expected)
    np.testing.assert_array_equal(seen(shape, Mask.lengths(jnp.asarray(lens))), expected)


def test_lengths_beyond_int32_are_clipped_not_wrapped():
    lens = jnp.asarray([2**40 + 1, 2**32], jnp.int64)
    assert seen((2, 3, 4), valid_lens=lens).all()


def test_a_plain_boolean_array_is_a_mask():
    table = np.random.default_rng(0).random((B, 1, T, S)) < 0.5
    np.testing.assert_array_equal(
        seen((B, N, T, S), jnp.asarray(table)), np.broadcast_to(table, (B, N, T, S))
    )


def every_kind():
    rng = np.random.default_rng(3)
    return {
        "causal": Mask.causal(),
        "from the start": Mask.causal(align="start"),
        "window": Mask.window(2, 1),
        "lengths": Mask.lengths(jnp.asarray([2, 5], jnp.int32)),
        "segments": Mask.segments(
            jnp.asarray(rng.integers(0, 2, (B, T)), jnp.int32),
            jnp.asarray(rng.integers(0, 2, (B, S)), jnp.int32),
        ),
        "boolean": Mask.boolean(jnp.asarray(rng.random((B, 1, T, S)) < 0.6)),
    }


KINDS = tuple(every_kind())


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations_with_replacement(KINDS, 2)))
def test_and_is_and(one, other):
    """Both must hold; the order does not matter; a mask and itself is itself."""
    kinds = every_kind()
    shape = (B, N, T, S)
    expected = seen(shape, kinds[one]) & seen(shape, kinds[other])
    np.testing.assert_array_equal(seen(shape, kinds[one] & kinds[other]), expected)
    np.testing.assert_array_equal(seen(shape, kinds[other] & kinds[one]), expected)


@given(st.lists(st.sampled_from(KINDS), min_size=3, max_size=3))
@pytest.mark.slow
def test_and_is_associative(names):
    a, b, c = (every_kind()[name] for name in names)
    shape = (B, N, T, S)
    np.testing.assert_array_equal(seen(shape, (a & b) & c), seen(shape, a & (b & c)))


def test_and_with_something_else_is_a_type_error():
    with pytest.raises(TypeError):
        Mask.causal() & 3


def test_valid_lens_and_mask_hold_together():
    mask, lens = Mask.causal(), jnp.asarray([3, 1], jnp.int32)
    np.testing.assert_array_equal(
        seen((B, T, S), mask, lens), seen((B, T, S), mask & Mask.lengths(lens))
    )


@pytest.mark.parametrize("name", KINDS)
def test_is_a_pytree(name):
    """Arrays are leaves, the rest is structure: equal for equal masks, so that jit does not
    retrace.
    """
    mask, again = every_kind()[name], every_kind()[name]
    leaves, tree = jax.tree.flatten(mask)
    assert tree == jax.tree.structure(again)
    assert len(leaves) == {"lengths": 1, "segments": 2, "boolean": 1}.get(name, 0)
    rebuilt = jax.tree.unflatten(tree, leaves)
    np.testing.assert_array_equal(seen((B, N, T, S), rebuilt), seen((B, N, T, S), mask))
    hash(tree)


def test_jit_takes_a_mask_as_an_argument_and_does_not_retrace():
    traces = []

    @jax.jit
    def weights(query, key, mask):
        traces.append(None)
        return regard.weights(query, key, mask=mask, normalize=regard.Uniform())

    x = jnp.zeros((2, 5, 1), jnp.float32)
    for lens in ([1, 2], [3, 5]):
        got = weights(x, x, Mask.causal() & Mask.lengths(jnp.asarray(lens, jnp.int32)))
        np.testing.assert_array_equal(
            np.asarray(got) > 0, oracle.allowed((2, 5, 5), causal="end", valid_lens=lens)
        )
    assert len(traces) == 1
    weights(x, x, Mask.causal(align="start") & Mask.lengths(jnp.asarray([1, 2], jnp.int32)))
    assert len(traces) == 2


# ---------------------------------------------------------------------------------------------
# Ranges stay ranges.


LONG = 2048


@pytest.mark.parametrize("regime", ["Softmax", "Sparsemax", "Uniform"])
@pytest.mark.parametrize(
    "mask",
    [
        Mask.causal() & Mask.lengths(np.array([LONG, 700], np.int32)),
        Mask.window(100, 0) & Mask.lengths(np.full((2, LONG), 9, np.int32)),
        Mask.segments(np.zeros((2, LONG), np.int32), np.zeros((2, LONG), np.int32)),
    ],
    ids=["causal and lengths", "window and lengths per query", "segments"],
)
def test_blockwise_never_makes_a_queries_by_keys_array(mask, regime):
    """No intermediate, forward or backward, is as large as the weights of one head."""
    x = jax.ShapeDtypeStruct((2, LONG, 4), jnp.float32)

    def loss(query, key, value, mask):
        out = regard.attend(
            query,
            key,
            value,
            mask=mask,
            normalize=getattr(regard, regime)(),
            implementation="blockwise",
        )
        return out.sum()

    name, shape = largest(jax.value_and_grad(loss, argnums=(0, 1, 2)), x, x, x, mask)
    assert np.prod(shape) < LONG * LONG, f"{name} makes {shape}"


def test_the_walk_over_the_jaxpr_sees_inside_loops():
    """Negative control: the reference does make that array, and so does one inside a scan, and the
    walk over the jaxpr sees both.
    """
    x = jax.ShapeDtypeStruct((2, LONG, 4), jnp.float32)
    _, shape = largest(lambda q, k, v: regard.attend(q, k, v, implementation="reference"), x, x, x)
    assert np.prod(shape) >= LONG * LONG

    def hidden(x):
        return jax.lax.scan(
            lambda carry, _: (carry + jnp.sum(x @ x.T), None), jnp.float32(0), None, length=2
        )[0]

    _, shape = largest(jax.jit(hidden), jax.ShapeDtypeStruct((LONG, 4), jnp.float32))
    assert np.prod(shape) == LONG * LONG


@pytest.mark.parametrize("backend", BACKENDS)
def test_polarity_true_takes_part(backend):
    """Negative control of every mask test: the other polarity is the other answer."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((4, 3)), jnp.float32)
    only_first = jnp.zeros((4, 4), bool).at[:, 0].set(True)
    chosen = BACKENDS[backend]
    with chosen.tiling():
        out = regard.attend(x, x, x, mask=only_first, implementation=chosen.implementation)
        other = regard.attend(x, x, x, mask=~only_first, implementation=chosen.implementation)
    np.testing.assert_allclose(out, np.broadcast_to(x[0], (4, 3)), rtol=1e-6)
    assert np.abs(np.asarray(other) - np.asarray(out)).max() > 0.1


@pytest.mark.parametrize("align", ["start", "end"])
@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 5), (5, 1), (4, 4), (3, 6), (6, 3)])
def test_what_is_known_of_a_band_is_true(T, S, align):
    """Every window up to the edges and past them, with and without lengths, against the pairs."""
    axes = Axes(3, 2, T, S, 1, 1, 4, 4, 4)
    reaches = [None, *sorted({-S - T, -2, -1, 0, 1, S - T, T - S, S - 1, S + T})]
    for left, right in itertools.product(reaches, reaches):
        for lens in (None, np.array([0, S - 1])):
            facts = {"window": (left, right, align)}
            facts |= {} if lens is None else {"valid_lens": lens}
            may = oracle.allowed((2, T, S), **facts)
            mask = Mask.window(left, right, align)
            allowed = resolve(mask, None if lens is None else jnp.asarray(lens), axes)
            lone = allowed.as_lengths_and_band()
            np.testing.assert_array_equal(np.broadcast_to(of(lone, T, S), may.shape), may)
            for found, expected in (
                (allowed.visible_keys(axes), may.any(1)),
                (allowed.non_empty_rows(axes), may.any(2)),
            ):
                shown = np.ones(1) if found is None else np.asarray(found)[:, 0]
                np.testing.assert_array_equal(np.broadcast_to(shown, expected.shape), expected)
            if allowed.everything():
                assert may.all()


def of(lengths_and_band, T, S):
    """[B|1, T, S]: the pairs that lengths and a band aligned at the start allow."""
    lens, (left, right, align) = lengths_and_band
    assert align == "start"
    t, s = np.arange(T)[:, None], np.arange(S)[None, :]
    may = (s >= t - (T if left is None else left)) & (s <= t + (S if right is None else right))
    return may[None] if lens is None else may & (s < np.asarray(lens)[:, None, None])


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_are_more_than_lengths_and_a_band_say_so(name):
    facts = MASKS[name](np.random.default_rng(0), 2, 4, 19, 37)
    arguments = as_arguments(facts)
    axes = Axes(4, 2, 19, 37, 4, 2, 8, 8, 8)
    found = resolve(arguments["mask"], arguments["valid_lens"], axes).as_lengths_and_band()
    per_query = np.ndim(facts.get("valid_lens", 0)) > 1
    assert (found is None) == (per_query or "segments" in facts or "boolean" in facts)


def test_jit_knows_what_is_static_about_a_mask():
    """The facts travel with a mask through jit, and are not recomputed from data."""

    @jax.jit
    def facts(mask, lens):
        seen.append(resolve(mask, lens, Axes(3, 2, T, T, 1, 1, 8, 8, 8)).facts)

    seen = []
    facts(Mask.causal(), jnp.ones(2, int))
    assert seen[0] == ("per example", (None, 0, "start"), False, False, False)
