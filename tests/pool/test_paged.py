"""Few queries over a paged memory: the kernels read its pages where they lie, through the table."""

import functools
import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
import regard
from absent_gpu import on_hopper
from cases import SCORES, interpreted_kernels
from problem import assert_close

pytestmark = [pytest.mark.sampled(6), pytest.mark.usefixtures("quick_compilation")]

LENS = np.array([37, 0, 48, 150, 131])  # the last two begin alike, and share the pages of that
N, K, V = 4, 2, 5
B, S = len(LENS), LENS.max()
PAGES = (1, 16, 24, 64)
READ, GATHERED = "pages read in place", "pages gathered into a copy first"
TOLERANCES = {"float32": 3e-6, "bfloat16": 2e-2}
CAUSAL = regard.Mask.causal()


class Drawn:
    """A text of B examples, in a pool of pages that holds NaN everywhere else."""

    def __init__(self, name, page, T, dtype):
        rng, row = np.random.default_rng(3), SCORES[name]

        def normal(*shape):
            return np.float64(jnp.asarray(rng.standard_normal(shape), dtype))

        (Hq, Hk), shared = row.widths, LENS[-2:].min() // page
        parameters = {one: normal(*np.shape(x)) for one, x in row.draw(normal, N).items()}
        self.score = row.make(**{one: jnp.asarray(x, dtype) for one, x in parameters.items()})
        self.oracle = row.oracle(parameters)
        self.query, self.key = normal(B, T, N, Hq), normal(B, S, K, Hk)
        self.value = normal(B, S, K, V)
        self.key[-1, : shared * page] = self.key[-2, : shared * page]
        self.value[-1, : shared * page] = self.value[-2, : shared * page]
        self.arrays = [jnp.asarray(x, dtype) for x in (self.query, self.key, self.value)]
        counts, free = -(-LENS // page), rng.permutation(B * -(-S // page) + 3)
        table = np.full((B, counts.max() + 1), -1, np.int32)
        for b, count in enumerate(counts):
            table[b, :count], free = free[:count], free[count:]
        table[-1, :shared] = table[-2, :shared]
        options = dict(key_heads=K, key_width=Hk, value_width=V, score=self.score, dtype=dtype)
        with interpreted_kernels():  # what an additive score stores depends on where it runs
            pool = regard.Memory.empty(B * -(-S // page) + 3, page, **options)
            pool = replace(pool, key=pool.key + np.nan, value=pool.value + np.nan)
            memory = regard.Memory.paged(pool, jnp.asarray(table), jnp.zeros(B, jnp.int32))
            self.memory = memory.append(*self.arrays[1:], jnp.asarray(LENS))
            lens = jnp.asarray(LENS)
            self.whole = regard.Memory.of(*self.arrays[1:], score=self.score, valid_lens=lens)

    @property
    def expected(self):
        """By the oracle, the queries at the end of each example's own keys."""
        T = self.query.shape[1]
        out = np.zeros((*self.query.shape[:3], V))
        for b, count in enumerate(LENS):
            if count > 0:
                one = [x[b : b + 1, :count] for x in (self.query, self.key, self.value)]
                may = np.tri(T, count, count - T, dtype=bool)
                out[b] = oracle.attend(*one, score=self.oracle, may=may).out[0]
        return out


drawn = functools.lru_cache(maxsize=None)(Drawn)


def by_kernels(query, memory, **options):
    with interpreted_kernels():
        assert READ in regard.explain(query, memory, implementation="pallas", **options)
        return jax.jit(
            lambda query, memory: regard.attend(query, memory, implementation="pallas", **options)
        )(query, memory)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize(
    "name", ["dot", "gaussian", "bilinear", "rotary dot", "additive, exact", "dot + gaussian"]
)
def test_the_kernels_equal_the_oracle_and_the_contiguous_memory(name, page, T, dtype):
    case = drawn(name, page, T, dtype)
    got = by_kernels(case.arrays[0], case.memory, mask=CAUSAL)
    assert got.dtype == dtype
    assert_close(np.float64(got), case.expected, TOLERANCES[dtype], "out")
    np.testing.assert_array_equal(got[1], 0, err_msg="an example without keys")
    with interpreted_kernels():
        same = regard.attend(case.arrays[0], case.whole, mask=CAUSAL, implementation="pallas")
    assert_close(np.float64(got), np.float64(same), TOLERANCES[dtype], "contiguous")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("name", ["dot", "gaussian", "rotary dot", "additive, exact"])
def test_on_a_gpu(name, T, dtype):
    case, options = drawn(name, 16, T, dtype), dict(mask=CAUSAL, implementation="pallas")
    assert READ in regard.explain(case.arrays[0], case.memory, **options)
    got = jax.jit(functools.partial(regard.attend, **options))(case.arrays[0], case.memory)
    assert_close(np.float64(got), case.expected, TOLERANCES[dtype], "out")


MASKS = {
    "lengths": regard.Mask.lengths(jnp.asarray([3, 8, 40, 70, 0], "int32")),
    "window": regard.Mask.window(20, 0),
    "not the first": ~regard.Mask.lengths(jnp.asarray([10, 0, 47, 90, 131], "int32")),
    "boolean": regard.Mask.boolean(jnp.arange(160)[None, None, None] % 3 > 0),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("score", ["dot", "gaussian"])
def test_masks_and_other_terms(score, name):
    case, rng = drawn(score, 16, 4, "float32"), jax.random.key(0)
    mask = MASKS[name]
    if mask.arrays:
        mask = regard.Mask.boolean(mask.arrays[0][..., : case.memory.max_len])
        mask = regard.Mask.boolean(jnp.pad(mask.arrays[0], ((0, 0),) * 3 + ((0, 16),)))
    options = dict(softcap=2.0, sink=0.3, dropout_rate=0.2, dropout_rng=rng, mask=CAUSAL & mask)
    got = by_kernels(case.arrays[0], case.memory, **options)
    expected = regard.attend(case.arrays[0], case.memory, implementation="reference", **options)
    assert_close(got, expected, 3e-6, "out")


@pytest.mark.parametrize("name", ["dot", "gaussian", "additive, exact"])
def test_gradients_reach_the_pool(name):
    """By the gathered arrays: the pool gets the sum over the examples that share a page."""
    case = drawn(name, 16, 4, "float32")

    @functools.partial(jax.jit, static_argnums=2)
    def gradients(query, memory, implementation):
        def loss(query, key, value):
            held = replace(memory, key=key, value=value)
            out = regard.attend(query, held, mask=CAUSAL, implementation=implementation)
            return jnp.sin(out).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(query, memory.key, memory.value)

    with interpreted_kernels():
        found = gradients(case.arrays[0], case.memory, "pallas")
        expected = gradients(case.arrays[0], case.memory, "reference")
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, 1e-5, "gradient")


def test_under_vmap():
    case = drawn("gaussian", 16, 1, "float32")
    query = jnp.stack([case.arrays[0], 2 * case.arrays[0]])
    tables = jnp.stack([case.memory.table, case.memory.table[::-1]])
    lens = jnp.stack([case.memory.length, case.memory.length[::-1]])

    def pool(query, table, lens, implementation):
        memory = regard.Memory.paged(case.memory.pool, table, lens)
        return regard.attend(query, memory, implementation=implementation)

    with interpreted_kernels():
        found, expected = (
            jax.jit(jax.vmap(functools.partial(pool, implementation=name)))(query, tables, lens)
            for name in ("pallas", "reference")
        )
    assert_close(found, expected, 3e-6, "out")


def test_numbers_of_no_page_are_read_as_some_page_and_masked():
    """As a gather reads them: a kernel must not leave the pool."""
    case = drawn("dot", 16, 1, "float32")
    spoiled = jnp.where(case.memory.table < 0, 2**31 - 1, case.memory.table)
    memory = replace(case.memory, table=spoiled)
    query = case.arrays[0]
    np.testing.assert_array_equal(by_kernels(query, memory), by_kernels(query, case.memory))


@pytest.mark.parametrize("score", [regard.Dot(), regard.Gaussian(3.0), regard.Rotary()])
def test_nothing_is_gathered(score):
    """No array of the compiled program is as large as the keys of a table of many pages."""
    pool = regard.Memory.empty(8, 4, key_heads=2, key_width=16, value_width=16, score=score)
    memory = regard.Memory.paged(pool, jnp.arange(512).reshape(2, 256) % 8, jnp.array([900, 1000]))
    query, gathered = jnp.ones((2, 1, 4, 16), jnp.float32), 2 * 256 * 4 * 2 * 16

    def largest(implementation):
        call = jax.jit(functools.partial(regard.attend, implementation=implementation))
        text = call.lower(query, memory).compile().as_text()
        shapes = re.findall(r"f32\[([\d,]+)\]", text)
        return max(math.prod(map(int, shape.split(","))) for shape in shapes)

    with interpreted_kernels():
        assert largest("pallas") < gathered
    assert largest("reference") >= gathered


# ---------------------------------------------------------------------------------------------
# Which calls, on a GPU that is not here.

WIDTHS = dict(key_heads=2, key_width=64, value_width=64)


def served(dtype="bfloat16", T=1, heads=8, **options):
    """256 sequences of up to 64 pages of 16 tokens."""
    pool = jax.eval_shape(lambda: regard.Memory.empty(1000, 16, dtype=dtype, **(WIDTHS | options)))
    table, lens = (jax.ShapeDtypeStruct(shape, "int32") for shape in ((256, 64), (256,)))
    return jax.ShapeDtypeStruct((256, T, heads, 64), dtype), jax.eval_shape(
        regard.Memory.paged, pool, table, lens
    )


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({}, {}, READ),
        (dict(T=4), dict(mask=CAUSAL), READ),
        (dict(T=16), {}, GATHERED),  # 64 queries per key head
        ({}, dict(normalize=regard.Sparsemax()), GATHERED),
        (dict(score=regard.Dot() + regard.Alibi()), {}, GATHERED),  # of keys and their positions
        ({}, dict(implementation="blockwise"), GATHERED),
    ],
)
def test_explain_says_what_becomes_of_the_pages(changes, options, said):
    query, memory = served(**changes)
    with on_hopper():
        assert said in regard.explain(query, memory, **options)


def test_pages_of_another_dtype_are_gathered():
    query, memory = served()
    query = jax.ShapeDtypeStruct(query.shape, "float32")
    with on_hopper(), jax.numpy_dtype_promotion("standard"):
        assert GATHERED in regard.explain(query, memory)
        assert "page" not in regard.explain(query, *[query] * 2)
