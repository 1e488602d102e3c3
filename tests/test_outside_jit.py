"""Calls outside of jit: one program per signature, the same answers, the same refusals."""

import importlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regard
from regard.pool import choose
from regard.pool.layout import tiling

attend_module = importlib.import_module("regard.attend")
X = jax.random.normal(jax.random.key(0), (2, 5, 4, 8))


@pytest.fixture
def prepared(monkeypatch):
    """How often the front door was passed, while tracing or not."""
    calls, real = [], attend_module.prepare

    def counted(*args, **kwargs):
        calls.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(attend_module, "prepare", counted)
    return calls


def test_a_second_call_of_one_signature_runs_no_python_of_the_first(prepared):
    lens, other = jnp.array([3, 5]), jnp.array([1, 2])
    first = regard.attend(X, X, X, valid_lens=lens, return_lse=True)
    count = len(prepared)
    assert count > 0
    again = regard.attend(X + 1, X, X, valid_lens=other, return_lse=True)
    assert len(prepared) == count
    for arrays, lengths, found in ((X, lens, first), (X + 1, other, again)):
        with jax.disable_jit():
            want = regard.attend(arrays, X, X, valid_lens=lengths, return_lse=True)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), found, want)


IDS = np.array([0, 0, 1, 1, 1])
SPELLINGS = {  # of integers and numbers that are no JAX arrays
    "a list of lengths": dict(valid_lens=[3, 5]),
    "one length": dict(valid_lens=4),
    "a NumPy length": dict(valid_lens=np.int64(4)),
    "NumPy lengths": dict(valid_lens=np.array([3, 2**40])),
    "a mask of lengths": dict(mask=regard.Mask.lengths([3, 5])),
    "NumPy segments": dict(mask=regard.Mask.segments(IDS)),
    "positions": dict(score=regard.Dot() + regard.Alibi(), query_positions=np.arange(5) + 1),
    "a whole width": dict(score=regard.Gaussian(2)),
    "a NumPy width": dict(score=regard.Gaussian(np.float32(2))),
    "a list as bias": dict(bias=[[0.0, 1.0, 0.0, 2.0, 0.0]]),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("call", [regard.attend, regard.weights], ids=["attend", "weights"])
def test_numbers_of_any_kind_are_arguments_of_one_program(prepared, call, spelling):
    arrays = (X, X, X) if call is regard.attend else (X, X)
    found = call(*arrays, **SPELLINGS[spelling])
    count = len(prepared)
    call(*arrays, **SPELLINGS[spelling])
    assert len(prepared) == count
    with jax.disable_jit():
        want = call(*arrays, **SPELLINGS[spelling])
    np.testing.assert_allclose(found, want, atol=2e-6)


def test_other_numbers_in_a_score_need_no_other_program_on_a_cpu(prepared):
    narrow = regard.attend(X, X, X, score=regard.Gaussian(0.5))
    count = len(prepared)
    wide = regard.attend(X, X, X, score=regard.Gaussian(50.0))
    assert len(prepared) == count or jax.default_backend() != "cpu"
    jitted = jax.jit(lambda width: regard.attend(X, X, X, score=regard.Gaussian(width)))
    np.testing.assert_allclose(narrow, jitted(0.5), atol=2e-6)
    np.testing.assert_allclose(wide, jitted(50.0), atol=2e-6)


def test_returning_weights_changes_nothing():
    out, weights = regard.attend(X, X, X, return_weights=True)
    np.testing.assert_array_equal(out, regard.attend(X, X, X))
    np.testing.assert_array_equal(weights, regard.weights(X, X))


def test_numpy_arrays_and_lists_are_taken_too():
    arrays = [np.asarray(X, dtype) for dtype in (np.float32, np.float64)]
    for array in arrays:
        for lens in (np.array([3, 5]), np.array([3, 2**40]), [3, 5]):
            found = regard.attend(array, array, array, valid_lens=lens)
            want = regard.attend(X, X, X, valid_lens=jnp.array([3, 5]))
            np.testing.assert_allclose(found, want, atol=2e-6)
    mask = np.ones((5, 5), bool)
    found = regard.attend(X, X, X, mask=mask)
    np.testing.assert_allclose(found, regard.attend(X, X, X), atol=2e-6)


def test_what_a_choice_depends_on_is_part_of_the_signature(monkeypatch):
    def called():
        regard.attend(X, X, X, implementation="blockwise")
        return len(seen)

    seen, real = [], choose.Blockwise.pool

    def pool(self, problem, settings):
        seen.append(settings)
        return real(self, problem, settings)

    monkeypatch.setattr(choose.Blockwise, "pool", pool)
    jax.clear_caches()
    first = called()
    assert called() == first
    with tiling(block_q=2, block_k=3):
        assert called() > first
    assert seen[-1].sizes is not None
    monkeypatch.setattr(choose, "REGISTRY", choose.REGISTRY[:-1])
    with pytest.raises(ValueError, match="unknown implementation 'blockwise'"):
        called()


def test_a_refusal_is_that_of_the_call_each_time():
    for _ in range(2):
        with pytest.raises(ValueError, match=r"query \[2, 5, 4, 8\], key \[2, 5, 4, 7\]"):
            regard.attend(X, X[..., :7], X)
        with pytest.raises(TypeError, match="valid_lens must be integers"):
            regard.attend(X, X, X, valid_lens=jnp.ones(2))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Checked(regard.Score):
    """A score whose check looks at its number, which no trace has."""

    scale: float

    def check(self, query_width, key_width):
        if self.scale <= 0:
            raise ValueError("scale must be positive")

    def scores(self, query, key):
        return self.scale * regard.Dot(1.0).scores(query, key)


def test_a_score_that_looks_at_its_numbers_still_can():
    found = regard.attend(X, X, X, score=Checked(0.25))
    np.testing.assert_allclose(found, regard.attend(X, X, X, score=regard.Dot(0.25)), atol=2e-6)
    with pytest.raises(ValueError, match="scale must be positive"):
        regard.attend(X, X, X, score=Checked(-1.0))


def test_static_keywords_of_an_array_type_are_run_step_by_step():
    rate, rng = np.float32(0.5), jax.random.key(1)
    found = regard.attend(X, X, X, dropout_rate=rate, dropout_rng=rng)
    want = regard.attend(X, X, X, dropout_rate=0.5, dropout_rng=rng)
    np.testing.assert_allclose(found, want, atol=2e-6)
    rate = jnp.float32(0.5)  # cannot be hashed
    found = regard.attend(X, X, X, dropout_rate=rate, dropout_rng=rng)
    np.testing.assert_allclose(found, want, atol=2e-6)


def test_gradients_through_a_call_outside_of_jit():
    def loss(x):
        return (regard.attend(x, x, x, valid_lens=jnp.array([2, 0])) ** 2).sum()

    np.testing.assert_allclose(jax.grad(loss)(X), jax.jit(jax.grad(loss))(X), atol=1e-5)
