"""`positions=` of MultiHeadAttention against float64 loops; in caches, Flax's too, and memories."""

import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
import regard
import regard.linen
import regard.nnx
from modules.front_ends import FRONT_ENDS, MIXED, Module, assert_close, build
from modules.test_multi_head import expected
from score.test_positions import t5_bucket

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.sampled(2)]

CAUSAL = regard.Mask.causal()
SIZES = dict(num_heads=4, in_features=6, query_head_features=4, value_head_features=2)
FORMS = {
    "rotary": dict(positions="rotary"),
    "relative": dict(positions="relative", score=MIXED, key_heads=2),
    "alibi": dict(positions="alibi", score=MIXED, key_heads=2),
    "rotary, mixed": dict(positions="rotary", score=MIXED, key_heads=2),
    "rotary, normalized": dict(positions="rotary", normalize_qk=True),
    "rotary of a score": dict(positions="rotary", score=regard.Gaussian(1.5)),
    "alibi, dot": dict(positions="alibi"),
    "relative, dot": dict(positions="relative"),
}
every = pytest.mark.parametrize("name", FORMS)


def module_of(name, **more):
    return Module("MultiHeadAttention", SIZES | FORMS[name] | more, (6, 6, 6))


def text(length=10, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal((2, length, 6)), jnp.float32)


def bias_of(positions, params, at, held):
    """What positions add to the scores, [N, T, S], in float64."""
    distance = held[None, :] - at[:, None]
    if positions == "alibi":
        return -(2.0 ** (-2.0 * np.arange(1, 5)))[:, None, None] * np.abs(distance)
    if positions == "relative":
        table = np.float64(params["relative"]["table"])
        return table[:, np.vectorize(lambda d: t5_bucket(d, 32, 128, True))(distance)]
    return 0.0


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both sides"])
@pytest.mark.parametrize("name", ["rotary", "relative", "alibi", "rotary, mixed"])
def test_against_loops(name, causal):
    """The last query stands where the last key does."""
    lens = np.array([7, 4])
    module = module_of(name)
    may = oracle.allowed((2, 4, 5, 7), valid_lens=lens, causal="end" if causal else None)
    mask = CAUSAL if causal else None
    built, inputs = build("nnx", module), module.inputs()
    found = built.call(built.params, *inputs, valid_lens=lens, mask=mask)
    bias = bias_of(FORMS[name]["positions"], built.params, np.arange(2, 7), np.arange(7))
    wanted, _ = expected(module, built.params, *inputs, may=may, bias=bias)
    assert_close(found, wanted, 2e-6)


@every
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_chunks_equal_the_full_causal_pass(front_end, name):
    built, x = build(front_end, module_of(name)), text()
    full = built.call(built.params, x, mask=CAUSAL)
    cache, outs = built.module.init_cache(2, 12), []
    for start, end in ((0, 4), (4, 5), (5, 10)):
        out, cache = built.call(built.params, x[:, start:end], cache=cache)
        outs.append(out)
    assert_close(jnp.concatenate(outs, 1), full, 2e-6)


@pytest.mark.parametrize("name", ["rotary", "relative", "alibi"])
def test_ragged_chunks_equal_each_text_alone(name):
    built, x, lens = build("nnx", module_of(name)), text(), jnp.array([4, 2])
    cache = built.module.init_cache(2, 10)
    _, cache = built.call(built.params, x[:, :4], cache=cache, valid_lens=lens)
    out, _ = built.call(built.params, x[:, 4:6], cache=cache)
    for b, n in enumerate(lens.tolist()):
        alone = jnp.concatenate([x[b : b + 1, :n], x[b : b + 1, 4:6]], 1)
        full = built.call(built.params, alone, mask=CAUSAL)
        assert_close(out[b : b + 1], full[:, n:], 2e-6)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("positions", ["rotary", "alibi", "relative"])
def test_flax_s_decode(front_end, positions):
    x, arguments = text(6), dict(num_heads=4, in_features=6, qkv_features=16, positions=positions)
    if front_end == "nnx":
        layer = regard.nnx.MultiHeadAttention(**arguments, rngs=flax.nnx.Rngs(0))
        full = layer(x, mask=CAUSAL)
        layer.init_cache(x.shape)
        outs = [layer(x[:, t : t + 1], decode=True) for t in range(6)]
    else:
        layer = regard.linen.MultiHeadAttention(**arguments, decode=True)
        variables = layer.init(jax.random.key(0), x)
        params, cache = variables["params"], variables["cache"]
        full = layer.clone(decode=False).apply({"params": params}, x, mask=CAUSAL)
        outs = []
        for t in range(6):
            held = {"params": params, "cache": cache}
            out, state = layer.apply(held, x[:, t : t + 1], mutable=["cache"])
            cache, outs = state["cache"], [*outs, out]
    assert_close(jnp.concatenate(outs, 1), full, 2e-6)


@every
def test_cross_attention_takes_the_queries_positions(name):
    """Step by step over a memory, as all at once."""
    built = build("nnx", module_of(name))
    x, keys, lens = text(4), text(7, seed=1), jnp.array([7, 3])
    at = jnp.arange(4)
    full = built.call(built.params, x, keys, valid_lens=lens, query_positions=at)
    call = jax.jit(built.module.heads.remember) if name == "rotary" else built.module.heads.remember
    memory = call(built.params, keys, valid_lens=lens)
    for t in range(4):
        given = dict(memory=memory, query_positions=at[t : t + 1])
        assert_close(built.call(built.params, x[:, t : t + 1], **given), full[:, t : t + 1], 2e-6)


def test_a_cache_as_a_memory_lowers_keys_on_both_sides():
    """Without a causal mask ALiBi is two-sided, in a cache too."""
    built, x, at = build("nnx", module_of("alibi")), text(6), jnp.arange(1, 3)
    _, cache = built.call(built.params, x, cache=built.module.init_cache(x.shape[0], 6))
    expected = built.call(built.params, x[:, 1:3], x, query_positions=at)
    found = built.call(built.params, x[:, 1:3], memory=cache, query_positions=at)
    assert_close(found, expected, 2e-6)


def test_a_mask_aligned_at_the_start_puts_the_first_query_there():
    for name in ("alibi", "rotary"):
        built = build("nnx", module_of(name))
        x, keys = text(4), text(7, seed=1)
        found = built.call(built.params, x, keys, is_causal=True)
        start = regard.Mask.causal(align="start")
        wanted = built.call(built.params, x, keys, mask=start, query_positions=jnp.arange(4))
        assert_close(found, wanted, 2e-6)


@pytest.mark.parametrize("name", ["rotary", "relative"])
def test_positions_of_a_batch_with_several_axes_or_none(name):
    built, x = build("nnx", module_of(name)), text(5)
    at = jnp.arange(5)[None] + jnp.array([[0], [40]])
    wanted = built.call(built.params, x, query_positions=at)
    many = built.call(built.params, x[:, None], query_positions=at[:, None])
    assert_close(many[:, 0], wanted, 2e-6)
    assert_close(built.call(built.params, x[1], query_positions=at[1]), wanted[1], 2e-6)


def test_the_table_starts_at_zero_and_learns():
    arguments = SIZES | FORMS["relative, dot"]
    layer = regard.nnx.MultiHeadAttention(**arguments, rngs=flax.nnx.Rngs(0))
    plain = regard.nnx.MultiHeadAttention(**arguments | dict(positions=None), rngs=flax.nnx.Rngs(0))
    assert layer.relative.table.shape == (4, 32)
    x = text(6)
    np.testing.assert_array_equal(layer(x), plain(x))
    slope = flax.nnx.grad(lambda layer: jnp.sum(layer(x) ** 2))(layer)["relative"]["table"][...]
    used = np.abs(slope).max(0) > 1e-6
    assert used.sum() == 11  # distances -5 to 5


def test_a_cache_of_one_score_without_parameters_stores_rotated_keys():
    for name, score in {
        "rotary": regard.Rotary(),
        "rotary of a score": regard.Rotary(regard.Gaussian(1.5)),
        "rotary, mixed": None,
        "relative, dot": None,
    }.items():
        assert build("nnx", module_of(name)).module.init_cache(2, 8).score == score


@pytest.mark.parametrize(
    ("arguments", "call", "message"),
    [
        (dict(positions="sinusoidal"), {}, "unknown positions 'sinusoidal': known are 'rotary'"),
        (dict(positions="rotary", query_head_features=3), {}, "fraction 1.0 of width 3. Fix: an"),
        (
            dict(positions="rotary", score="bilinear", key_head_features=2),
            {},
            "Rotary needs queries and keys of one width. Got query width 4, key width 2",
        ),
        (
            dict(positions="rotary"),
            dict(memory=None),
            r"Rotary\(Dot\) has positions, .* Got query \[2, 3, 4, 4\], memory.key \[2, 5, 4, 4\]",
        ),
        (
            dict(positions="alibi"),
            dict(cache=None, query_positions=jnp.arange(3)),
            "a cache stores its tokens' positions",
        ),
        ({}, dict(query_positions=jnp.arange(3)), "scores with positions; Dot has none"),
    ],
)
def test_errors(arguments, call, message):
    def run():
        layer = regard.nnx.MultiHeadAttention(**SIZES | arguments, rngs=flax.nnx.Rngs(0))
        makers = dict(memory=lambda: layer.remember(text(5)), cache=lambda: layer.init_cache(2, 5))
        layer(
            text(3), **{name: makers[name]() if name in makers else x for name, x in call.items()}
        )

    with pytest.raises(ValueError, match=message):
        run()
