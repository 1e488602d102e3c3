"""The book's short names: what they call, and that none is missing."""

import inspect
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import pytest

from regard import d2l

mpl.use("Agg")

X = jnp.arange(6, dtype=jnp.float32).reshape(2, 3)

# helper(*arguments) must be the NumPy array beside it.
CALLS = [
    ("tensor", ([[1.5, 2], [3, 4]],), np.array([[1.5, 2], [3, 4]])),
    ("ones", ((2, 3),), np.ones((2, 3))),
    ("ones_like", (X,), np.ones((2, 3))),
    ("zeros", ((2, 3),), np.zeros((2, 3))),
    ("zeros_like", (X,), np.zeros((2, 3))),
    ("arange", (0, 5, 2), np.array([0, 2, 4])),
    ("linspace", (0.0, 1.0, 5), np.linspace(0, 1, 5)),
    ("eye", (3,), np.eye(3)),
    ("abs", (-X,), np.arange(6.0).reshape(2, 3)),
    *((name, (X,), getattr(np, name)(X)) for name in ("exp", "sin", "cos", "sinh", "cosh", "tanh")),
    ("log", (X + 1,), np.log(np.asarray(X) + 1)),
    ("sigmoid", (X,), 1 / (1 + np.exp(-np.asarray(X)))),
    ("matmul", (X, X.T), np.array([[5.0, 14], [14, 50]])),
    ("batch_matmul", (X[None], X.T[None]), np.array([[[5.0, 14], [14, 50]]])),
    ("reshape", (X, (3, 2)), np.arange(6.0).reshape(3, 2)),
    ("transpose", (X,), np.array([[0.0, 3], [1, 4], [2, 5]])),
    ("swapaxes", (X[None], 0, 2), np.arange(6.0).reshape(2, 3).T[:, :, None]),
    ("expand_dims", (X, 1), np.arange(6.0).reshape(2, 1, 3)),
    ("concat", ([X, X], 1), np.array([[0.0, 1, 2, 0, 1, 2], [3, 4, 5, 3, 4, 5]])),
    ("stack", ([X[0], X[1]], 1), np.array([[0.0, 3], [1, 4], [2, 5]])),
    ("repeat", (X[0], 2), np.array([0.0, 0, 1, 1, 2, 2])),
    ("reduce_sum", (X, 1), np.array([3.0, 12])),
    ("reduce_mean", (X, 0), np.array([1.5, 2.5, 3.5])),
    ("argmax", (X, 1), np.array([2, 2])),
    ("astype", (X, d2l.int32), np.arange(6).reshape(2, 3)),
    ("size", (X,), np.array(6)),
    ("numpy", (X,), np.arange(6.0).reshape(2, 3)),
    ("to", (X, jax.devices()[0]), np.arange(6.0).reshape(2, 3)),
    ("meshgrid", (X[0], X[1]), np.stack(np.meshgrid(np.arange(3.0), np.arange(3.0, 6)))),
]


@pytest.mark.parametrize(("name", "arguments", "expected"), CALLS, ids=[c[0] for c in CALLS])
def test_helper(name, arguments, expected):
    found = np.asarray(getattr(d2l, name)(*arguments))
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    assert found.dtype.kind == expected.dtype.kind


def test_all_is_what_is_public():
    public = {
        name
        for name, value in vars(d2l).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert sorted(set(d2l.__all__) - {"plt"}) == sorted(public - {"Any", "pyplot"})
    assert len(d2l.__all__) == len(set(d2l.__all__))
    with pytest.raises(AttributeError, match="has no attribute 'Animator'"):
        d2l.Animator  # noqa: B018


def test_random_numbers_are_new_each_time():
    keys = [tuple(np.asarray(d2l.get_key()).tolist()) for _ in range(100)]
    assert len(set(keys)) == 100
    assert d2l.rand(2, 3).shape == d2l.rand((2, 3)).shape == (2, 3)
    assert d2l.randn(4).shape == d2l.normal(0, 1, 4).shape == (4,)
    many = np.asarray(d2l.normal(3.0, 2.0, (100, 100)))
    assert abs(many.mean() - 3) < 0.1  # 5 sigma
    assert abs(many.std() - 2) < 0.1
    uniform = np.asarray(d2l.rand(10000))
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 0.02


def test_checks():
    d2l.check_shape(X, (2, 3))
    d2l.check_shape(X, [2, 3])
    d2l.check_len([1, 2], 2)
    with pytest.raises(AssertionError, match=r"expected shape \[3, 2\], got \[2, 3\]"):
        d2l.check_shape(X, (3, 2))
    with pytest.raises(AssertionError, match="expected 3 elements, got 2"):
        d2l.check_len([1, 2], 3)


def test_add_to_class():
    class Thing:
        x = 2

    @d2l.add_to_class(Thing)
    def double(self):
        return 2 * self.x

    assert Thing().double() == 4
    assert double(Thing) == 4


@pytest.mark.parametrize(
    ("pred", "label", "k", "expected"),
    [
        ("il est calme .", "il est calme .", 2, 1.0),
        ("il court .", "il est calme .", 2, 0.0),  # no pair of words in common
        # 3 of 4 words, 2 of 3 pairs: sqrt(3/4) (2/3)^(1/4)
        ("il est la .", "il est la !", 2, (3 / 4) ** 0.5 * (2 / 3) ** 0.25),
        # a repeated word counts as often as the label has it; 3 words for 4: exp(1 - 4/3)
        ("il il il", "il est la .", 1, np.exp(-1 / 3) * (1 / 3) ** 0.5),
        ("va", "va", 2, 1.0),  # shorter than k
        ("", "va", 2, 0.0),
    ],
)
def test_bleu(pred, label, k, expected):
    np.testing.assert_allclose(d2l.bleu(pred, label, k=k), expected, rtol=1e-12)


# ---------------------------------------------------------------------------------------------
# Lines.


@pytest.fixture
def lines():
    """Calls d2l.plot, and returns the (x, y) of the lines drawn."""

    def draw(*args, **kwargs):
        d2l.plt.close("all")
        d2l.plot(*args, **kwargs)
        found = [(line.get_xdata(), line.get_ydata()) for line in d2l.plt.gca().lines]
        return [(list(map(float, x)), list(map(float, y))) for x, y in found]

    yield draw
    d2l.plt.close("all")


def test_plot(lines):
    x, y, z = jnp.arange(3), jnp.array([1.0, 4, 9]), [2.0, 3, 5]
    along = [0.0, 1, 2]
    assert lines(y) == [(along, [1.0, 4, 9])]
    assert lines(x, y) == [(along, [1.0, 4, 9])]
    assert lines(x, [y, z]) == [(along, [1.0, 4, 9]), (along, [2.0, 3, 5])]
    assert lines([x, x + 1], [y, z])[1] == ([1.0, 2, 3], [2.0, 3, 5])
    assert len(lines(x, jnp.ones((6, 3), jnp.float32))) == 6
    lines(y, xlabel="step", legend=["loss"], xlim=[0, 2], yscale="log", figsize=(6, 2.5))
    axes = d2l.plt.gca()
    assert (axes.get_xlabel(), axes.get_yscale(), axes.get_xlim()) == ("step", "log", (0, 2))
    assert tuple(axes.figure.get_size_inches()) == (6, 2.5)
    with pytest.raises(ValueError, match="2 X for 3 Y"):
        d2l.plot([x, x], [y, y, y])


# ---------------------------------------------------------------------------------------------
# Without the extras.

SOURCE = Path(d2l.__file__).parents[2]


def test_a_plot_of_the_books_size_shows_its_labels():
    figure = d2l.plt.figure()
    d2l.plot([0, 1], xlabel="epoch", ylabel="a long name", figsize=(3.5, 2.5))
    figure.set_size_inches(3.5, 2.5)
    figure.canvas.draw()
    box = figure.get_tightbbox(figure.canvas.get_renderer())
    d2l.plt.close(figure)
    assert (box.x0 >= 0, box.y0 >= 0, box.x1 <= 3.5, box.y1 <= 2.5) == (True,) * 4


def test_without_flax_the_error_has_the_pip_command():
    code = f"import sys; sys.path.insert(0, {str(SOURCE)!r}); sys.modules['flax'] = None\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "import regard.d2l"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stderr.endswith(
        "ImportError: regard.d2l needs Flax, which is not installed.\n"
        'Install it with: pip install "regard[flax,show]"\n'
    )


def test_without_matplotlib_the_error_has_the_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'Matplotlib.*\n.*pip install "regard\[show\]"'):
        d2l.plt  # noqa: B018
