"""Sums and multiples of scores: random ones against the sum of their terms by the oracle, what
runs by a lift and what tile by tile, gradients of every parameter, memories, and errors.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import oracle
import regard
from contract import POISON
from problem import assert_close, assert_near
from regard.pool import layout
from regard.pool.pallas import interpreted
from regard.score.additive import lift_anywhere

pytestmark = pytest.mark.usefixtures("quick_compilation")

B, T, S, N, K, D, V = 2, 7, 11, 4, 2, 5, 3
WIDTH_5 = ("dot", "scaled dot", "gaussian", "gaussian per head", "a user's own")
KERNELS = ("bilinear", "additive", "additive per head", "additive, exact")


def drawn(seed):
    """Two to four terms at random, with and without factors; inputs, and the row of the sum."""
    rng = np.random.default_rng([3, seed])

    def normal(*shape):
        return rng.standard_normal(shape)

    names, widths = (WIDTH_5, (D, D)) if seed % 2 else (KERNELS, (5, 7))
    terms = [cases.SINGLE_SCORES[str(name)] for name in rng.choice(names, rng.integers(2, 5))]
    factors = [None, "one", "per head"]
    row = cases.summed(*((term, factors[int(rng.integers(3))]) for term in terms))
    parameters = {k: np.asarray(v, np.float32) for k, v in row.draw(normal, N).items()}
    query, key, value = normal(B, T, N, widths[0]), normal(B, S, K, widths[1]), normal(B, S, K, V)
    arrays = [np.asarray(a, np.float32) for a in (query, key, value)]
    lens = rng.integers(0, S + 1, B).astype(np.int32)
    return row, parameters, arrays, lens


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(8))
def test_random_sums_equal_the_oracle(seed):
    row, parameters, (query, key, value), lens = drawn(seed)
    may = oracle.allowed((B, N, T, S), valid_lens=lens, causal="end")
    exact = [np.float64(a) for a in (query, key, value)]
    of_oracle = row.oracle({name: np.float64(p) for name, p in parameters.items()})
    cotangent = np.random.default_rng(1).standard_normal((B, T, N, V))
    wanted = oracle.attend(*exact, score=of_oracle, may=may)
    gradients = oracle.gradients(cotangent, *exact, score=of_oracle, may=may)

    def loss(parameters, query, key, value):
        out = regard.attend(
            *(query, key, value),
            score=row.make(**parameters),
            mask=regard.Mask.causal(),
            valid_lens=jnp.asarray(lens),
            implementation="blockwise",
        )
        return jnp.sum(out * cotangent.astype(np.float32)), out

    with layout.tiling(block_q=4, block_k=8):
        run = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
        (of_parameters, *of_inputs), out = run(parameters, query, key, value)
    assert_close(out, wanted.out, 4e-6, "out")
    found = dict(zip(("query", "key", "value"), of_inputs, strict=True)) | of_parameters
    largest = max(np.linalg.norm(gradients[name]) for name in of_parameters)
    for name, gradient in found.items():
        least = 0.1 * largest if name in of_parameters else 1e-3
        assert_near(gradient, gradients[name], 4e-5, least, name)


def arrays(width=8, length=(40, 48), dtype=jnp.float32, seed=0, offset=0.0):
    rng = np.random.default_rng(seed)
    shapes = ((B, length[0], N, width), (B, length[1], K, width), (B, length[1], K, V))
    query, key, value = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    return query + offset, key + offset, value


def additive(width=8, hidden=6, seed=5):
    rng = np.random.default_rng(seed)
    shapes = ((width, hidden), (width, hidden), (hidden,))
    return regard.Additive(*(jnp.asarray(rng.standard_normal(s) / 4, jnp.float32) for s in shapes))


class TestLifts:
    def test_a_sum_of_dot_and_gaussian_is_as_wide_as_one(self):
        query, key, value = arrays()
        text = regard.explain(
            *(query, key, value),
            score=regard.Dot() + 0.5 * regard.Gaussian(2.0),
            implementation="blockwise",
        )
        assert "an inner product of width 8, exact up to a per-query constant" in text

    def test_gaussian_keeps_its_center_in_a_sum(self):
        """At an offset of 1,000, where squares of float32 numbers have lost all digits."""
        query, key, _ = arrays(offset=1000.0)
        score = 1e-4 * regard.Dot(scale=1.0) + regard.Gaussian(2.0)
        terms = [oracle.Dot, oracle.Gaussian]
        parameters = {"0 scale": 1e-4, "1 width": 2.0}
        of_oracle = oracle.Sum(terms, parameters)
        wanted = oracle.attend(*map(np.float64, (query, key, key)), score=of_oracle).weights
        found = regard.weights(query, key, score=score, implementation="blockwise")
        np.testing.assert_allclose(found, wanted, atol=3e-5)

    @pytest.mark.parametrize("dots", [0, 1], ids=["gaussian", "dot + gaussian"])
    def test_the_constant_counts_where_it_can_be_seen(self, dots):
        """Log-sum-exp, a soft cap and a cone see what softmax does not."""
        query, key, value = arrays(dtype=jnp.float64, offset=3.0)
        score = sum([regard.Dot()] * dots + [regard.Gaussian(2.0)])
        for options in (
            dict(return_lse=True),
            dict(softcap=2.0),
            dict(normalize=regard.Cone(jax.nn.softplus)),
        ):

            def run(query, key, name, options=options):
                found = regard.attend(
                    *(query, key, value), score=score, implementation=name, **options
                )
                return sum(jnp.sum(jnp.sin(array)) for array in jax.tree.leaves(found))

            blockwise, reference = (
                jax.value_and_grad(run, argnums=(0, 1))(query, key, name)
                for name in ("blockwise", "reference")
            )
            np.testing.assert_allclose(blockwise[0], reference[0], rtol=1e-10)
            for found, wanted in zip(blockwise[1], reference[1], strict=True):
                assert_close(found, wanted, 1e-10)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_the_kernels_run_dot_plus_gaussian(self, dtype):
        query, key, value = arrays(16, (32, 32), dtype)
        score = regard.Dot() + 0.5 * regard.Gaussian(2.0)
        with interpreted(), jax.enable_x64(False):
            found = regard.attend(query, key, value, score=score, implementation="pallas")
        wanted = regard.attend(query, key, value, score=score, implementation="reference")
        eps = float(jnp.finfo(dtype).eps)
        assert_close(np.float32(found), np.float32(wanted), max(2 * eps, 4e-6))

    def test_an_additive_term_is_lifted_with_the_others(self):
        query, key, value = arrays()
        score = regard.Dot() + 0.5 * additive()
        options = dict(score=score, implementation="blockwise", return_lifted=True)
        with lift_anywhere():
            out, lifted = regard.attend(query, key, value, **options)
            far, fell_back = regard.attend(100 * query, key, value, **options)
        assert bool(lifted)
        assert not bool(fell_back)
        wanted = regard.attend(query, key, value, score=score, implementation="reference")
        assert_close(out, wanted, 4e-6)
        wanted = regard.attend(100 * query, key, value, score=score, implementation="reference")
        assert_close(far, wanted, 2e-5)

    def test_the_kernels_refuse_a_lift_that_may_fail(self):
        query, key, value = arrays()
        score, message = regard.Dot() + additive(), r"Dot \+ Additive: its lift holds over"
        with interpreted(), lift_anywhere(), pytest.raises(NotImplementedError, match=message):
            regard.attend(query, key, value, score=score, implementation="pallas")

    def test_the_kernels_name_the_sum_that_has_no_lift(self):
        query, key, value = arrays()
        score = regard.Dot() + cases.Manhattan(jnp.ones(8))
        with interpreted(), pytest.raises(NotImplementedError, match=r"Dot \+ Manhattan has no"):
            regard.attend(query, key, value, score=score, implementation="pallas")

    def test_a_multiple_of_an_additive_score_runs_where_it_does(self):
        query, key, value = arrays(16, (32, 32))
        score = 0.5 * additive(16, 16)
        with interpreted(), jax.enable_x64(False):
            found = regard.attend(query, key, value, score=score, implementation="pallas")
        wanted = regard.attend(query, key, value, score=score, implementation="reference")
        assert_close(found, wanted, 4e-6)


class TestAlgebra:
    def test_sums_of_sums_are_flat_and_multiples_fold(self):
        dot, gaussian = regard.Dot(), regard.Gaussian()
        assert (dot + (gaussian + dot)).terms == (dot, gaussian, dot)
        assert sum([dot, gaussian]).terms == (dot, gaussian)
        assert (3 * (2 * dot)).factor == 6.0
        assert (-dot).factor == -1.0
        assert (dot - gaussian).terms[1].factor == -1.0
        assert (dot * 2).factor == (2 * dot).factor == (np.float32(2) * dot).factor
        assert (dot / 2).factor == 0.5
        assert repr(np.ones(2) * dot) == repr(dot * np.ones(2))

    def test_a_user_s_own_score_without_parameters_adds(self):
        class Last(regard.Score):
            def scores(self, query, key):
                return query[..., :, None, -1] * key[..., None, :, -1]

        query, key, value = arrays()
        score = regard.Dot() + 2.0 * Last()
        found = regard.attend(query, key, value, score=score, implementation="blockwise")
        twice = query.at[..., :].multiply(8.0**-0.5).at[..., -1].add(2 * query[..., -1])
        wanted = regard.attend(twice, key, value, score=regard.Dot(scale=1.0))
        assert_close(found, wanted, 4e-6)

    def test_factors_are_traced_and_differentiated(self):
        query, key, value = arrays()

        @jax.jit
        def loss(factor):
            score = regard.Dot() + factor * regard.Gaussian()
            return jnp.sum(regard.attend(query, key, value, score=score) ** 2)

        step = 1e-2
        slope = (loss(0.5 + step) - loss(0.5 - step)) / (2 * step)
        np.testing.assert_allclose(jax.grad(loss)(0.5), slope, rtol=2e-3)
        per_head = jnp.linspace(0.0, 1.0, N)
        assert jax.grad(loss)(per_head).shape == (N,)
        many = jax.vmap(loss)(jnp.array([0.0, 0.5]))
        np.testing.assert_allclose(many[1], loss(0.5), rtol=1e-5)

    def test_second_derivatives(self):
        """Through blockwise in float64: a Hessian-vector product equals the difference of two
        gradients."""
        query, key, value = arrays(4, (6, 9), jnp.float64)
        width = jnp.asarray(1.5)

        def loss(parameters, implementation):
            score = regard.Dot() + parameters[0] * regard.Gaussian(parameters[1])
            score = score + 0.5 * cases.Manhattan(jnp.ones(4))
            out = regard.attend(query, key, value, score=score, implementation=implementation)
            return jnp.sum(out**2)

        at = (jnp.asarray(0.7), width)
        blockwise, dense = (jax.hessian(loss)(at, name) for name in ("blockwise", "reference"))
        assert_close(np.array(blockwise), np.array(dense), 1e-12)

    @pytest.mark.parametrize("masked", [False, True])
    def test_padding_reaches_nothing(self, masked):
        query, key, value = arrays()
        score = regard.Dot() + additive() + regard.Gaussian(2.0)
        lens = jnp.array([5, 48])
        poison = jnp.asarray(np.resize(POISON, key.shape), jnp.float32)
        bad = jnp.where(
            jnp.arange(48)[None, :, None, None] < lens[:, None, None, None], key, poison
        )

        def loss(key):
            options = dict(score=score, valid_lens=lens, implementation="blockwise")
            return jnp.sum(regard.attend(query, key, value, **options) ** 2)

        clean, poisoned = jax.value_and_grad(loss)(key), jax.value_and_grad(loss)(bad)
        jax.tree.map(np.testing.assert_array_equal, clean, poisoned)


class TestMemory:
    def test_what_terms_store_alike_is_stored_once(self):
        _, key, value = arrays()
        score = regard.Dot() + regard.Gaussian()
        assert regard.Memory.of(key, value, score=score).key.shape == key.shape
        memory = regard.Memory.of(key, value, score=score + additive())
        assert memory.key.shape == (*key.shape[:-1], 8 + 6)

    def test_token_by_token_equals_the_full_pass(self):
        query, key, value = arrays(length=(12, 12))
        score = regard.Dot() + 0.5 * additive() + jnp.linspace(0.1, 1, N) * regard.Gaussian(2.0)
        causal = regard.Mask.causal()
        full = regard.attend(query, key, value, score=score, mask=causal)
        memory = regard.Memory.empty(B, 12, key_heads=K, key_width=8, value_width=V, score=score)
        for t in range(12):
            memory = memory.append(key[:, t : t + 1], value[:, t : t + 1])
            out = regard.attend(query[:, t : t + 1], memory, mask=causal)
            assert_close(out, full[:, t : t + 1], 4e-6)


class TestErrors:
    def test_terms_of_different_widths(self):
        query, key, value = arrays()
        score = regard.Bilinear(jnp.ones((8, 5))) + regard.Dot()
        message = r"terms of a sum share queries and keys, and Dot of Bilinear \+ Dot .*one width"
        with pytest.raises(ValueError, match=message):
            regard.attend(query, key[..., :5], value, score=score)

    @pytest.mark.parametrize("other", [3, 1.5, None, "dot", jnp.ones(3)])
    def test_a_score_is_added_to_a_score(self, other):
        with pytest.raises(TypeError, match="a score is added to a score"):
            regard.Dot() + other

    @pytest.mark.parametrize(
        "factor", ["two", None, True, 1j, jnp.ones((2, 2)), regard.Dot(), jnp.array(True)]
    )
    def test_a_score_is_multiplied_by_numbers(self, factor):
        with pytest.raises(TypeError, match="a score is multiplied by a number"):
            regard.Dot() * factor

    def test_factors_of_another_number_of_heads(self):
        query, key, value = arrays()
        score = regard.Dot() + jnp.ones(3) * regard.Gaussian()
        with pytest.raises(ValueError, match=r"terms\[1\]\.factor \[3\]"):
            regard.attend(query, key, value, score=score)

    def test_parameters_must_be_a_pytree(self):
        class Wide(regard.Score):
            def __init__(self):
                self.width = 2.0

        with pytest.raises(TypeError, match="must be a pytree"):
            regard.Dot() + Wide()
