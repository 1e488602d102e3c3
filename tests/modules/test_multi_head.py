"""Multi-head attention against float64 loops, for every score, mask and form of input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
import regard
import regard.linen
import regard.nnx
from modules.front_ends import MIXED, MODULES, WIDE, Module, assert_close, build

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.sampled(2)]

HEADS = {
    name: module
    for name, module in MODULES.items()
    if module.name == "MultiHeadAttention" and "positions" not in module.arguments
}

ORACLES = {
    "dot": oracle.Dot,
    "gaussian": oracle.Gaussian,
    "bilinear": oracle.Bilinear,
    "additive": oracle.Additive,
}


def expected(module, params, query, key, value, may=None, bias=None):
    """Head by head, in float64: project, pool, project out. Returns the output and the weights."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    num_heads = module.arguments["num_heads"]
    scores = module.arguments.get("score", "dot")
    scores = [scores] * num_heads if isinstance(scores, str) else list(scores)
    key_heads = module.arguments.get("key_heads") or num_heads

    def project(x, side, head):
        own = params[side]
        x = x @ own["kernel"][:, head] + (own["bias"][head] if "bias" in own else 0.0)
        if f"{side}_ln" in params:  # a LayerNorm without bias, as Flax's
            x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
            x = x * params[f"{side}_ln"]["scale"]
        return x

    shape = (query.shape[0], num_heads, query.shape[1], key.shape[1])
    may = np.broadcast_to(True if may is None else may, shape)
    bias = np.broadcast_to(0.0 if bias is None else bias, shape)
    out, weights = 0.0, []
    for head, name in enumerate(scores):
        place, of_keys = scores[:head].count(name), head * key_heads // num_heads
        own = {leaf: array[place] for leaf, array in params.get(name, {}).items()}
        score = ORACLES[name](own)
        if module.arguments.get("positions") == "rotary":
            score = oracle.Rotary(ORACLES[name], own)
        pooled = oracle.attend(
            project(query, "query", head),
            project(key, "key", of_keys),
            project(value, "value", of_keys),
            score=score,
            may=may[:, head],
            bias=bias[:, head],
        )
        out = out + pooled.out @ params["out"]["kernel"][head]
        weights.append(pooled.weights)
    return out + params["out"].get("bias", 0.0), np.stack(weights, axis=1)


def check(module, tolerance=2e-6, lengths=(5, 7), may=None, **keywords):
    built, inputs = build("nnx", module), module.inputs(lengths=lengths)
    out, weights = built.call(built.params, *inputs, return_weights=True, **keywords)
    wanted = expected(module, built.params, *inputs, may=may, bias=keywords.get("bias"))
    assert_close(out, wanted[0], tolerance, "out")
    assert_close(weights, wanted[1], tolerance, "weights")


@pytest.mark.parametrize("name", HEADS)
def test_against_loops(name):
    lens = np.array([7, 4])
    may = oracle.allowed((2, 4, 5, 7), valid_lens=lens, causal="end")
    check(HEADS[name], may=may, valid_lens=lens, mask=regard.Mask.causal())


@pytest.mark.parametrize("name", ["mixed heads", "mixed grouped heads"])
def test_masks_and_biases_of_each_head_go_with_it(name):
    """The heads are regrouped by score; what belongs to a head must move along."""
    rng = np.random.default_rng(4)
    lens = rng.integers(1, 8, (2, 4, 5))
    table = rng.random((2, 4, 5, 7)) < 0.7
    bias = rng.standard_normal((4, 5, 7)).astype(np.float32)
    segments = rng.integers(0, 2, (2, 5)), rng.integers(0, 2, (2, 7))
    may = oracle.allowed(
        (2, 4, 5, 7), valid_lens=lens, boolean=table, segments=segments, window=(3, None, "end")
    )
    mask = (
        regard.Mask.boolean(jnp.asarray(table))
        & regard.Mask.segments(*(jnp.asarray(ids) for ids in segments))
        & regard.Mask.window(3, None)
    )
    check(HEADS[name], may=may, valid_lens=jnp.asarray(lens), mask=mask, bias=jnp.asarray(bias))


def test_a_bool_array_is_a_mask():
    table = np.tril(np.ones((5, 7), bool), 2)
    check(HEADS["mixed heads"], may=table, mask=jnp.asarray(table))


@pytest.mark.parametrize("score", [("dot", "gaussian", "additive", "additive"), MIXED])
def test_one_score_per_head_is_each_head_by_itself(score):
    """Head i of the mixture is the head of a module that has its score everywhere."""
    mixed = Module("MultiHeadAttention", dict(num_heads=4, score=score, **WIDE), (6, 5, 3))
    built, inputs = build("linen", mixed), mixed.inputs()
    _, weights = built.call(built.params, *inputs, return_weights=True)
    for name in set(score):
        pure = Module("MultiHeadAttention", dict(num_heads=4, score=name, **WIDE), (6, 5, 3))
        params = {side: built.params[side] for side in ("query", "key", "value", "out")}
        heads = [head for head, one in enumerate(score) if one == name]
        if name in built.params:
            places = [heads.index(head) if head in heads else 0 for head in range(4)]
            params[name] = jax.tree.map(lambda x: x[jnp.asarray(places)], built.params[name])  # noqa: B023
        _, alone = build("linen", pure).call(params, *inputs, return_weights=True)
        for head in heads:
            assert_close(weights[:, head], alone[:, head], 1e-6)


def test_self_attention_and_a_missing_value():
    module = Module("MultiHeadAttention", dict(num_heads=2, query_features=6), (6, 6, 6))
    built = build("nnx", module)
    query, key, _ = module.inputs()
    call = built.call
    np.testing.assert_array_equal(
        call(built.params, query), call(built.params, query, query, query)
    )
    np.testing.assert_array_equal(
        call(built.params, query, key), call(built.params, query, key, key)
    )


def test_linen_takes_its_widths_from_the_first_call():
    module = HEADS["bilinear heads"]
    left_out = {"query_features", "key_features", "value_features"}
    told = build("linen", module)
    free = regard.linen.MultiHeadAttention(
        **{name: x for name, x in module.arguments.items() if name not in left_out}
    )
    np.testing.assert_array_equal(
        free.apply({"params": told.params}, *module.inputs()),
        told.call(told.params, *module.inputs()),
    )


def test_the_widths_of_the_chapter():
    """p_q h = p_k h = p_v h = p_o = num_hiddens, from inputs of any width."""
    module = Module(
        "MultiHeadAttention",
        dict(num_heads=5, qkv_features=100, out_features=100, query_features=24, key_features=10),
        (24, 10, 10),
    )
    params = build("nnx", module).params
    assert params["query"]["kernel"].shape == (24, 5, 20)
    assert params["value"]["kernel"].shape == (10, 5, 20)
    assert params["out"]["kernel"].shape == (5, 20, 100)


@pytest.mark.parametrize("name", ["mixed heads", "grouped heads"])
def test_one_example_without_a_batch(name):
    module = HEADS[name]
    built = build("nnx", module)
    query, key, value = module.inputs()
    lens = jnp.asarray([[1, 2, 3, 4, 5], [7, 6, 5, 4, 3]], jnp.int32)
    mask = regard.Mask.causal() & regard.Mask.lengths(lens)
    out, weights = built.call(built.params, query, key, value, mask=mask, return_weights=True)
    mask = regard.Mask.causal() & regard.Mask.lengths(lens[1])
    one = built.call(
        built.params, query[1], key[1], value[1], mask=mask, valid_lens=7, return_weights=True
    )
    assert_close(one[0], out[1], 1e-6)
    assert_close(one[1], weights[1], 1e-6)


def test_the_gaussian_width_learns():
    module = HEADS["gaussian heads"]
    built = build("linen", module)

    def loss(params):
        return jnp.sum(jnp.square(built.call(params, *module.inputs())))

    slope = jax.grad(loss)(built.params)["gaussian"]["width"]
    assert slope.shape == (4,)
    assert np.all(np.abs(slope) > 1e-6)
    step = 1e-2 * jnp.sign(slope)
    moved = built.params | {"gaussian": {"width": built.params["gaussian"]["width"] - step}}
    assert loss(moved) < loss(built.params)


def test_a_score_of_numbers_is_fixed():
    """No parameters; per head, equal ones together."""
    fixed = regard.Gaussian(2.0)
    module = Module(
        "MultiHeadAttention",
        dict(
            num_heads=4, score=(fixed, "dot", regard.Dot(scale=1.0), regard.Gaussian(2.0)), **WIDE
        ),
        (6, 5, 3),
    )
    built = build("nnx", module)
    assert set(built.params) == {"query", "key", "value", "out"}
    assert [group.heads for group in built.module.heads.groups] == [(0, 3), (1,), (2,)]
    learned = Module("MultiHeadAttention", dict(num_heads=4, score="gaussian", **WIDE), (6, 5, 3))
    params = built.params | {"gaussian": {"width": jnp.full(4, 2.0, jnp.float32)}}
    weights, wanted = (
        b.call(p, *module.inputs(), return_weights=True)[1]
        for b, p in ((built, built.params), (build("nnx", learned), params))
    )
    assert_close(weights[:, 0], wanted[:, 0], 1e-6)
    assert_close(weights[:, 3], wanted[:, 3], 1e-6)


def test_scores_start_on_one_scale():
    """A fresh Gaussian head weighs q.k as the scaled dot product does, 1/sqrt D."""
    made = regard.linen.MultiHeadAttention(2, query_features=32, score="gaussian")
    x = jnp.zeros((1, 3, 32), jnp.float32)
    width = made.init(jax.random.key(0), x)["params"]["gaussian"]["width"]
    np.testing.assert_allclose(width**2, 4.0, rtol=1e-6)  # sqrt(16)


@pytest.mark.parametrize("lengths", [(1, 1), (0, 3), (3, 0)])
def test_odd_lengths(lengths):
    module = HEADS["mixed grouped heads"]
    built = build("nnx", module)
    out, weights = built.call(built.params, *module.inputs(lengths=lengths), return_weights=True)
    assert out.shape == (2, lengths[0], 7)
    assert weights.shape == (2, 4, *lengths)
    assert np.isfinite(out).all()
