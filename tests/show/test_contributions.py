"""Contributions add up: to the logarithm of a ratio of the weights that attend uses."""

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import pytest

import regard
from regard.show import Contributions

mpl.use("Agg")
from matplotlib import pyplot

WORDS = ["the", "black", "cat", "sleeps", "now"]


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    pyplot.close("all")


def draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def additive(h=7, Hq=4, Hk=3, heads=()):
    return regard.Additive(draw(1, *heads, Hq, h), draw(2, *heads, Hk, h), draw(3, *heads, h))


def checked(query, key, score, t, s, pick=(), **settings):
    """The contributions to every visible key are those of the weights."""
    weights = np.asarray(regard.weights(query, key, score=score, **settings), np.float64)
    row = weights[(*pick, t)]
    example, head = (*pick, 0, 0)[:2]
    why = Contributions.of(query, key, score, (t, s), example=example, head=head, **settings)
    np.testing.assert_allclose(why.weights, row)
    seen = row > 0
    logs = np.log(row[seen])
    sums = (why.parts.sum(-1) + why.bias)[seen]
    np.testing.assert_allclose(sums, logs - logs.mean(), atol=2e-5)
    np.testing.assert_allclose(why.total, np.log(row[s]) - logs.mean(), atol=2e-5)
    assert np.isnan(why.parts[~seen]).all()
    for other in np.flatnonzero(seen):
        than = Contributions.of(
            query, key, score, (t, s), int(other), example=example, head=head, **settings
        )
        np.testing.assert_allclose(than.total, np.log(row[s] / row[other]), atol=2e-5)
    return why


def test_units_are_the_definitions_terms():
    score, query, key = additive(), draw(4, 2, 4), draw(5, 5, 3)
    why = checked(query, key, score, 1, 3)
    x, y = query[1] @ score.query_kernel, key @ score.key_kernel
    terms = np.asarray(score.vector, np.float64) * np.tanh(np.float64(x) + np.float64(y))
    np.testing.assert_allclose(why.parts, terms - terms.mean(0), atol=1e-5)
    np.testing.assert_array_equal(why.units, why.parts[3])


@pytest.mark.parametrize("head", [0, 3])
@pytest.mark.parametrize("per_head", [False, True])
def test_batches_heads_and_grouped_keys(head, per_head):
    score = additive(heads=(4,) if per_head else ())
    query = draw(4, 2, 6, 4, 4)
    key = draw(5, 2, 5, 4 if per_head else 2, 3)
    checked(query, key, score, 2, 1, (1, head), valid_lens=jnp.array([5, 3]))


@pytest.mark.parametrize(
    "settings",
    [
        {"mask": regard.Mask.causal()},
        {"valid_lens": jnp.array([4, 3])},
        {"bias": draw(9, 5, 5)},
        {"bias": jnp.where(jnp.arange(5) == 4, -jnp.inf, draw(9, 5))},
    ],
    ids=["causal", "lens", "bias", "bias that masks"],
)
def test_masks_and_biases(settings):
    checked(draw(4, 2, 5, 4), draw(5, 2, 5, 3), additive(), 3, 1, (1,), **settings)


def test_projected_inputs_and_large_scores():
    score = regard.Additive(None, None, 5 * draw(3, 6))
    checked(3 * draw(4, 1, 6), 3 * draw(5, 4, 6), score, 0, 2)


def test_the_picture_has_the_numbers():
    why = checked(draw(4, 2, 4), draw(5, 5, 3), additive(40), 0, 2, bias=draw(8, 2, 5))
    names, rows = why.rows(6)
    np.testing.assert_allclose(rows.sum(0), why.parts.sum(1) + why.bias, atol=1e-12)
    assert (len(names), names[-2:]) == (8, ["34 other units", "bias"])
    largest = np.sort(np.abs(why.units))[-6:]
    np.testing.assert_allclose(np.sort(np.abs(rows[:6, 2])), largest)
    above, _, middle, right = why.plot(most=6).axes
    np.testing.assert_array_equal(middle.images[0].get_array(), rows)
    np.testing.assert_allclose([bar.get_width() for bar in right.patches], rows[:, 2])
    np.testing.assert_allclose([bar.get_height() for bar in above.patches], why.weights)
    reach = np.abs(rows).max()
    np.testing.assert_allclose(middle.images[0].get_clim(), (-reach, reach))
    assert [tick.get_text() for tick in middle.get_yticklabels()] == names
    assert right.get_xlabel().endswith(f"{why.total:+.2f}".replace("-", "−"))


def test_words_and_files(tmp_path):
    query, key = draw(4, 2, 4), draw(5, 5, 3)
    why = Contributions.of(
        query, key, additive(), (1, 2), 0, query_labels=["a$b", "chat"], key_labels=WORDS
    )
    ratio = np.exp(why.total)
    assert str(why).startswith("“chat” looks at “cat”: weight 0.")
    assert str(why).endswith("× that of “the”")
    assert float(str(why).split(", ")[1].split()[0]) == pytest.approx(ratio, rel=0.05)
    assert why.save(tmp_path / "why.svg").read_text().count(">cat</text>") == 1
    assert why.save(tmp_path / "why.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"\.png, \.svg or \.pdf. Got 'why.html'"):
        why.save(tmp_path / "why.html")


def test_axes_of_ones_own():
    why = Contributions.of(draw(4, 2, 4), draw(5, 5, 3), additive(), (0, 2))
    figure, axes = pyplot.subplots(1, 3)
    assert why.plot(ax=axes, vmax=0.5) is figure
    assert axes[1].images[0].get_clim() == (-0.5, 0.5)
    with pytest.raises(ValueError, match=r"three axes.* Got 2"):
        why.plot(ax=axes[:2])


@pytest.mark.parametrize(
    ("at", "against", "message"),
    [
        ((2, 0), None, r"2 queries and 5 keys. Got at=\(2, 0\)"),
        ((0, 5), None, "places of 2 queries and 5 keys"),
        ((0, -1), None, "places of 2 queries and 5 keys"),
        ((0, 1), 7, "against=7"),
        ((0, 3), None, r"masked key has no contributions.* Got key 3 of query 0.*\[0 1 2\]"),
        ((0, 1), 4, "Got key 4 of query 0"),
    ],
)
def test_places_that_are_not_there(at, against, message):
    with pytest.raises(ValueError, match=message):
        Contributions.of(
            draw(4, 2, 4), draw(5, 5, 3), additive(), at, against, valid_lens=jnp.array(3)
        )


def test_what_has_no_hidden_units():
    with pytest.raises(TypeError, match=r"additive scores, wᵀ tanh\(x \+ y\).* Got Dot"):
        Contributions.of(draw(4, 2, 4), draw(5, 5, 4), regard.Dot(), (0, 0))
    with pytest.raises(ValueError, match="Got 2 for 5 keys"):
        Contributions.of(draw(4, 2, 4), draw(5, 5, 3), additive(), (0, 0), key_labels=["a", "b"])
