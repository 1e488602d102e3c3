"""Positions as scores: Rotary, Alibi and RelativeBias beside formulas of their papers, decoding
token by token beside the full pass, given positions, kernels, and errors.

What every score owes (the oracle, gradients, padding, dtypes) is in test_every_score.py.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regard
from absent_gpu import on_hopper
from problem import assert_close
from regard.pool import layout
from regard.pool.pallas import interpreted
from regard.score import positions, relative_bias

pytestmark = pytest.mark.usefixtures("quick_compilation")

B, N, K, D, V, LENGTH = 2, 4, 2, 8, 3, 13
CAUSAL = regard.Mask.causal()
RNG = np.random.default_rng(0)
TABLE = jnp.asarray(RNG.standard_normal((N, 9)), jnp.float32)
BUCKETS = jnp.asarray(RNG.standard_normal(32), jnp.float32)

SCORES = {
    "rotary": regard.Rotary(),
    "rotary gaussian": regard.Rotary(regard.Gaussian(2.0), 100.0, 0.5, interleaved=True),
    "alibi": regard.Dot() + regard.Alibi(),
    "two-sided alibi": regard.Dot() + regard.Alibi(0.3, two_sided=True),
    "table": regard.Dot() + regard.RelativeBias(TABLE),
    "T5": regard.Dot(scale=1.0) + regard.RelativeBias(BUCKETS, 128),
    "all": regard.Rotary(regard.Dot() + regard.Gaussian(3.0))
    + regard.Alibi()
    - 0.5 * regard.RelativeBias(TABLE),
}
every = pytest.mark.parametrize(
    "score",
    [
        pytest.param(score, id=name, marks=() if name in ("rotary", "all") else pytest.mark.slow)
        for name, score in SCORES.items()
    ],
)


def arrays(length=LENGTH, queries=None, dtype=jnp.float32, width=D, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((B, queries or length, N, width), (B, length, K, width), (B, length, K, V))
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def t5_bucket(distance, count, furthest, bidirectional):
    """Raffel et al. 2020, section 2.1: half of a side one by one, the rest by logarithms."""
    size, first = count, 0
    if bidirectional:
        size //= 2
        first = size if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = size // 2
    if distance < exact:
        return first + distance
    share = math.log(distance / exact) / math.log(furthest / exact)
    return first + min(exact + math.floor(share * (size - exact) + 1e-9), size - 1)


class TestFormulas:
    @pytest.mark.parametrize("interleaved", [False, True])
    def test_rotary_is_a_plain_rotation(self, interleaved):
        query, key, _ = arrays()
        angles = np.outer(np.arange(LENGTH), 500.0 ** (-2 * np.arange(D // 2) / D))

        def rotated(x):
            cos, sin = (f(angles)[None, :, None].astype(np.float32) for f in (np.cos, np.sin))
            first, second = (x[..., ::2], x[..., 1::2]) if interleaved else jnp.split(x, 2, -1)
            both = first * cos - second * sin, second * cos + first * sin
            if interleaved:
                return jnp.stack(both, -1).reshape(x.shape)
            return jnp.concatenate(both, -1)

        score = regard.Rotary(base=500.0, interleaved=interleaved)
        found = regard.attend(query, key, key, score=score, mask=CAUSAL)
        wanted = jax.nn.dot_product_attention(rotated(query), rotated(key), key, is_causal=True)
        assert_close(found, wanted, 1e-6)

    def test_a_fraction_leaves_the_rest_alone(self):
        query, key, _ = arrays()
        half = regard.scores(query, key, score=regard.Rotary(regard.Dot(1.0), fraction=0.5))
        turned, plain = (
            regard.scores(query[..., cut], key[..., cut], score=score)
            for cut, score in (
                (slice(None, D // 2), regard.Rotary(regard.Dot(1.0))),
                (slice(D // 2, None), regard.Dot(1.0)),
            )
        )
        assert_close(half, turned + plain, 1e-6)

    @pytest.mark.parametrize("first", [131_071, -100_000, 2**24 + 3, 2**31 - 1, 5 - 2**31])
    def test_angles_stay_exact_at_positions_of_long_texts(self, first):
        """Near 10⁵, position times frequency would lose 0.01 in float32."""
        at = first - np.arange(5)
        step = 10_000.0 ** (-np.arange(0, 64, 2) / 64)
        found = positions._angles(jnp.asarray(at, jnp.int32), 64, 10_000.0, jnp.float32)
        apart = np.angle(np.exp(1j * (np.outer(at, step) - np.float64(found))))
        np.testing.assert_allclose(apart, 0, atol=5e-4)

    @pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 20])
    def test_alibi_slopes_are_the_paper_s(self, heads):
        """Section 3, and the rule of its code where N is no power of two."""

        def slopes(n):
            if math.log2(n).is_integer():
                start = 2 ** (-(2 ** -(math.log2(n) - 3)))
                return [start * start**i for i in range(n)]
            below = 2 ** math.floor(math.log2(n))
            return slopes(below) + slopes(2 * below)[0::2][: n - below]

        np.testing.assert_allclose(positions.alibi_slopes(heads), slopes(heads), rtol=1e-12)

    def test_alibi_is_the_paper_s_bias(self):
        query, key, value = arrays()
        distance = np.arange(LENGTH)[None, :] - np.arange(LENGTH)[:, None]
        slopes = np.array([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])
        bias = jnp.asarray(slopes[None, :, None, None] * distance, jnp.float32)
        wanted = regard.attend(query, key, value, bias=bias, mask=CAUSAL)
        found = regard.attend(query, key, value, score=SCORES["alibi"], mask=CAUSAL)
        assert_close(found, wanted, 1e-6)

    @pytest.mark.parametrize("bidirectional", [False, True])
    @pytest.mark.parametrize(("count", "furthest"), [(32, 128), (8, 20), (4, 6), (64, 1000)])
    def test_buckets_are_t5_s(self, count, furthest, bidirectional):
        found = relative_bias.buckets(count, furthest, bidirectional)
        wanted = [
            t5_bucket(d, count, furthest, bidirectional) for d in range(-furthest, furthest + 1)
        ]
        np.testing.assert_array_equal(found, wanted)

    def test_a_table_s_gradient_is_the_same_by_matrix_products(self, monkeypatch):
        """What runs off a CPU, where a scatter would add up in any order."""
        query, key, value = arrays()

        def loss(table):
            score = regard.Dot() + regard.RelativeBias(table)
            return jnp.sum(regard.attend(query, key, value, score=score) ** 2)

        here = jax.value_and_grad(loss)(TABLE)
        monkeypatch.setattr(relative_bias, "current_platform", lambda *arrays: "gpu")
        jax.clear_caches()
        there = jax.value_and_grad(loss)(TABLE)
        jax.tree.map(lambda a, b: assert_close(a, b, 2e-6), there, here)


class TestDecoding:
    @every
    @pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "raw"])
    def test_token_by_token_equals_the_full_pass(self, score, prepared):
        query, key, value = arrays()
        full = regard.attend(query, key, value, score=score, mask=CAUSAL)
        own = dict(score=score if prepared else None)
        memory = regard.Memory.empty(B, 16, key_heads=K, key_width=D, value_width=V, **own)

        def step(memory, token):
            query, key, value = token
            memory = memory.append(key, value)
            options = {} if prepared else dict(score=score)
            return memory, regard.attend(query, memory, mask=CAUSAL, **options)

        tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0)[:, :, None], (query, key, value))
        _, out = jax.lax.scan(step, memory, tokens)  # [T, B, 1, N, V]
        np.testing.assert_allclose(jnp.moveaxis(out[:, :, 0], 0, 1), full, atol=2e-6)

    @every
    def test_ragged_chunks_and_a_ring_of_slots(self, score):
        """Each example at its own position; and a window whose slots are written over."""
        query, key, value = arrays()
        lens = jnp.array([5, 8])
        memory = regard.Memory.of(key, value, score=score, valid_lens=lens, max_len=16)
        memory = memory.append(key[:, 8:10], value[:, 8:10])
        found = regard.attend(query[:, :2], memory, mask=CAUSAL)
        ring = regard.Memory.empty(
            B, 6, key_heads=K, key_width=D, value_width=V, score=score, window=4
        )
        for start in range(0, LENGTH - 3, 2):
            chunk = slice(start, start + 2)
            ring = ring.append(key[:, chunk], value[:, chunk])
        last = regard.attend(query[:, 8:10], ring, mask=CAUSAL)
        windowed = regard.attend(
            *(query[:, 8:10], key[:, :10], value[:, :10]),
            score=score,
            mask=CAUSAL & regard.Mask.window(3, 0),
        )
        np.testing.assert_allclose(last, windowed, atol=2e-6)
        for b, n in enumerate([5, 8]):
            parts = [
                jnp.concatenate([x[b : b + 1, :n], x[b : b + 1, 8:10]], 1) for x in (key, value)
            ]
            alone = regard.attend(query[b : b + 1, :2], *parts, score=score, mask=CAUSAL)
            np.testing.assert_allclose(found[b : b + 1], alone, atol=2e-6)

    def test_rotated_keys_are_stored_and_nothing_else(self):
        _, key, value = arrays()
        for name in ("rotary", "alibi", "table", "T5"):
            memory = regard.Memory.of(key, value, score=SCORES[name])
            assert memory.key.shape == key.shape, name


class TestGivenPositions:
    @every
    def test_a_part_of_a_text_with_its_positions(self, score):
        query, key, value = arrays()
        full = regard.attend(query, key, value, score=score, implementation="blockwise")
        order = jnp.asarray(RNG.permutation(LENGTH))
        found = regard.attend(
            *(query[:, 4:7], key[:, order], value[:, order]),
            score=score,
            query_positions=jnp.arange(4, 7),
            key_positions=jnp.broadcast_to(order, (B, LENGTH)),
        )
        np.testing.assert_allclose(found, full[:, 4:7], atol=2e-6)

    @every
    def test_only_distances_count(self, score):
        query, key, _ = arrays()
        plain = regard.weights(query, key, score=score, mask=CAUSAL)
        at = jnp.arange(LENGTH) + 50
        given = dict(query_positions=at, key_positions=at)
        moved = regard.weights(query, key, score=score, mask=CAUSAL, **given)
        np.testing.assert_allclose(moved, plain, atol=1e-5)

    @every
    def test_packed_texts_equal_each_alone(self, score):
        query, key, value = arrays()
        ids = jnp.asarray([0] * 6 + [1] * 7)
        mask = CAUSAL & regard.Mask.segments(ids)
        packed = regard.attend(query, key, value, score=score, mask=mask)
        for part in (slice(0, 6), slice(6, 13)):
            alone = regard.attend(
                *(query[:, part], key[:, part], value[:, part]), score=score, mask=CAUSAL
            )
            np.testing.assert_allclose(packed[:, part], alone, atol=2e-6)

    @every
    def test_parts_of_the_keys_merge(self, score):
        query, key, value = arrays()
        parts = [
            regard.attend(
                *(query, key[:, cut], value[:, cut]),
                score=score,
                query_positions=jnp.arange(LENGTH),
                key_positions=jnp.arange(LENGTH)[cut],
                return_lse=True,
                implementation="blockwise",
            )
            for cut in (slice(0, 5), slice(5, None))
        ]
        out, _ = regard.merge(*parts)
        wanted = regard.attend(query, key, value, score=score)
        np.testing.assert_allclose(out, wanted, atol=2e-6)

    @pytest.mark.parametrize("implementation", ["reference", "blockwise"])
    def test_a_mask_of_one_head_leaves_the_positions_of_the_others(self, implementation):
        query, key, _ = arrays()
        mask = jnp.asarray(np.random.default_rng(1).random((B, N, LENGTH, LENGTH)) < 0.15)
        given = dict(query_positions=jnp.arange(LENGTH)[::-1], score=SCORES["table"])
        wanted = regard.masked_softmax(regard.scores(query, key, **given), mask=mask)
        options = dict(given, mask=mask, implementation=implementation)
        found = regard.attend(query, key, key, return_weights=True, **options)[1]
        np.testing.assert_allclose(found, wanted, atol=1e-6)
        pooled = regard.attend(query, key, key, **options)
        values = np.repeat(key, N // K, axis=2)
        expected = np.einsum("bnts,bsnv->btnv", wanted, values)
        np.testing.assert_allclose(pooled, expected, atol=2e-6)

    def test_every_form_of_the_weights_agrees(self):
        query, key, _ = arrays()
        given = dict(query_positions=jnp.arange(LENGTH)[::-1], score=SCORES["all"])
        alpha = regard.weights(query, key, **given)
        raw = regard.scores(query, key, **given)
        np.testing.assert_allclose(jax.nn.softmax(raw, -1), alpha, atol=1e-6)
        picture = regard.attention_map(query, key, **given)
        np.testing.assert_allclose(picture, alpha, atol=1e-6)
        summary = regard.summarize(query, key, **given)
        np.testing.assert_allclose(summary.key_total, alpha.sum(-2), rtol=1e-5)


class TestWhereItRuns:
    @pytest.mark.parametrize("name", ["rotary", "alibi", "two-sided alibi", "table", "T5"])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    def test_the_kernels_run_lifts(self, name, dtype):
        query, key, value = arrays(32, dtype=dtype, width=16)
        options = dict(score=SCORES[name], mask=CAUSAL)
        with interpreted(), jax.enable_x64(False):
            # The reference lift of a CPU's float32 would be tiles; a kernel's is the bias.
            rows = slice(None) if dtype != "float32" else slice(0, 16)
            found = regard.attend(query[:, rows], key, value, implementation="pallas", **options)
        wanted = regard.attend(query[:, rows], key, value, implementation="reference", **options)
        eps = float(jnp.finfo(dtype).eps)
        assert_close(np.float32(found), np.float32(wanted), max(2 * eps, 4e-6))

    @pytest.mark.parametrize("name", ["two-sided alibi", "table", "T5"])
    @pytest.mark.parametrize(("queries", "keys"), [(13, 13), (3, 300), (300, 7), (1, 1)])
    def test_numbers_per_distance_are_the_definition_s(self, name, queries, keys):
        """And lie on straight lines, as kernels assume, from `bends` on."""
        score, (query, key, _) = SCORES[name].terms[1], arrays(keys, queries)
        query, key = (jnp.moveaxis(side, 2, 1) for side in (query, jnp.repeat(key, N // K, 2)))
        at = [one[None, None] for one in positions.default_positions(queries, keys)]
        placed, *sides = score.placed(
            query, key, positions.Placement(query, key, *at, by_default=True)
        )
        lift = placed.lift(*sides)
        wanted = jnp.broadcast_to(placed.scores(*sides), (B, N, queries, keys))
        np.testing.assert_array_equal(jnp.broadcast_to(lift.scores(), wanted.shape), wanted)
        numbers = np.float64(lift.distance_bias)
        for line in (
            numbers[..., : max(keys - lift.bends, 0)],
            numbers[..., keys - 1 + lift.bends :],
        ):
            np.testing.assert_allclose(np.diff(line, 2), 0, atol=2e-5)

    def test_second_derivatives_and_vmap_through_the_kernels(self):
        query, key, value = arrays(20)

        def slope(table, name):
            def loss(table):
                score = regard.Dot() + regard.RelativeBias(table)
                out = regard.attend(query, key, value, score=score, implementation=name)
                return jnp.sum(out**2)

            return jax.jvp(jax.grad(loss), (table,), (jnp.cos(table),))

        tables = jnp.stack([TABLE, -TABLE])
        with interpreted(), jax.enable_x64(False):
            found = jax.vmap(lambda table: slope(table, "pallas"))(tables)
        wanted = jax.vmap(lambda table: slope(table, "reference"))(tables)
        jax.tree.map(lambda a, b: assert_close(a, b, 4e-6), found, wanted)

    def test_given_positions_are_refused_by_name(self):
        query, key, value = arrays(32)
        given = dict(query_positions=jnp.arange(32), implementation="pallas")
        for name, named in (("table", r"Dot \+ RelativeBias"), ("two-sided alibi", r"Alibi\(two")):
            with interpreted(), pytest.raises(NotImplementedError, match=f"{named}.* has no lift"):
                regard.attend(query, key, value, score=SCORES[name], **given)

    def test_a_gpu_runs_rotary_by_cudnn_and_alibi_by_the_kernels(self):
        shapes = [(2, 256, 4, 64), (2, 256, 4, 64), (2, 256, 4, 64)]
        tensors = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        with on_hopper():
            first = [
                regard.explain(*tensors, score=SCORES[name], mask=CAUSAL).split()[0]
                for name in ("rotary", "alibi", "two-sided alibi", "T5")
            ]
        assert first == ["cudnn", "pallas", "pallas", "pallas"]

    def test_explain_names_the_parts(self):
        text = regard.explain(*arrays(), score=SCORES["all"])
        assert "score: Rotary(Dot + Gaussian) + Alibi + c * RelativeBias\n" in text
        text = regard.explain(*arrays(), score=SCORES["T5"], implementation="blockwise")
        assert "scores by an inner product of width 8, exact, and a number per distance" in text
        text = regard.explain(*arrays(), score=SCORES["alibi"], softcap=3.0, sink=0.0)
        assert "score: Dot + Alibi, softcap, sink\n" in text

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
    def test_columns_are_exact(self, dtype):
        ends = [2**24 + 1, -(2**24) - 1, 2**31 - 1, -(2**31)]
        at = [0, 1, 255, 256, 65_535, 131_071, 2**24 - 1, -1, -70_000, *ends]
        at = jnp.array(at, jnp.int32)[None, None]
        columns = positions.as_columns(at, jnp.zeros((1, 2, at.size, 1), dtype))
        np.testing.assert_array_equal(positions.from_columns(columns)[:, :1], at)

    @every
    @pytest.mark.slow
    def test_second_derivatives(self, score):
        query, key, value = arrays(5, dtype=jnp.float64)

        def loss(query, name):
            options = dict(score=score, mask=CAUSAL, implementation=name)
            with layout.tiling(block_q=2, block_k=4):
                return jnp.sum(regard.attend(query, key, value, **options) ** 2)

        found, wanted = (jax.hessian(loss)(query, name) for name in ("blockwise", "reference"))
        assert_close(found, wanted, 1e-12)

    @pytest.mark.slow
    def test_second_derivatives_of_parameters(self):
        query, key, value = arrays(5, dtype=jnp.float64)

        def loss(parameters, name):
            slopes, table = parameters
            score = regard.Rotary() + regard.Alibi(slopes) + regard.RelativeBias(table)
            options = dict(score=score, mask=CAUSAL, implementation=name)
            with layout.tiling(block_q=2, block_k=4):
                return jnp.sum(regard.attend(query, key, value, **options) ** 2)

        at = jnp.linspace(0.1, 0.4, N), jnp.asarray(TABLE[:, 3:6], jnp.float64)
        found, wanted = (jax.hessian(loss)(at, name) for name in ("blockwise", "reference"))
        jax.tree.map(lambda a, b: assert_close(a, b, 1e-12), found, wanted)

    def test_under_vmap_and_jit(self):
        query, key, value = arrays()
        tables = jnp.stack([TABLE, -TABLE])
        score = jax.jit(
            jax.vmap(
                lambda table: regard.attend(
                    *(query, key, value), score=regard.Rotary() + regard.RelativeBias(table)
                )
            )
        )
        one = regard.attend(query, key, value, score=regard.Rotary() + regard.RelativeBias(-TABLE))
        assert_close(score(tables)[1], one, 2e-6)


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "kind", "message"),
        [
            (dict(query_positions=jnp.arange(4)), ValueError, r"query_positions must have shape"),
            (dict(key_positions=jnp.zeros((3, 13), int)), ValueError, r"key_positions \[3, 13\]"),
            (dict(query_positions=jnp.zeros(13)), TypeError, "query_positions must be integers"),
            (dict(key_positions=np.arange(13) + 2**31), ValueError, "key_positions must fit int32"),
            (dict(query_positions=np.full(13, 2**32 - 1, np.uint32)), ValueError, "to 4294967295"),
            (dict(score=regard.RelativeBias([0.0] * 3)), TypeError, "table is an array. Got"),
            (dict(score=regard.Rotary(1e4)), TypeError, r"Got 10000.0. Fix: Rotary\(Dot"),
            (dict(score=regard.Rotary(fraction=0.3)), ValueError, "fraction 0.3 of width 8"),
            (dict(score=regard.Alibi(jnp.ones(3))), ValueError, r"slopes \[3\]"),
            (dict(score=regard.RelativeBias(jnp.ones(4))), ValueError, "an odd number of entries"),
            (
                dict(score=regard.RelativeBias(jnp.ones(7), 9)),
                ValueError,
                "even number of at least",
            ),
            (dict(score=regard.RelativeBias(jnp.ones((3, 5)))), ValueError, r"table \[3, 5\]"),
            (dict(score=regard.Dot(), key_positions=jnp.arange(13)), ValueError, "Dot has none"),
        ],
    )
    def test_arguments(self, options, kind, message):
        with pytest.raises(kind, match=message):
            regard.attend(*arrays(), **{"score": SCORES["alibi"], **options})

    def test_rotary_of_another_width_or_base(self):
        with pytest.raises(ValueError, match=r"Rotary needs queries and keys of one width"):
            regard.scores(jnp.ones((2, 4)), jnp.ones((2, 6)), score=regard.Rotary())
        with pytest.raises(ValueError, match="0 < fraction <= 1 and 0 < base < inf"):
            regard.Rotary(fraction=1.5)
        for base in (jnp.array(1e4), "1e4"):
            with pytest.raises(TypeError, match="Rotary's base is a number that is known before"):
                regard.Rotary(base=base)
