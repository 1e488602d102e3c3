"""The heads over a 2×2 mesh of (virtual) CPU devices: the one-device answer, and parameters that
lie where the rules say."""

import pytest

from eight_devices import on_four_devices

pytestmark = pytest.mark.sampled(1)

MESH = """
    import jax, jax.numpy as jnp, numpy as np
    from flax import linen as nn, nnx
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    import regard, regard.linen, regard.nnx

    assert jax.device_count() == 4, jax.devices()
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    rules = (("heads", "model"), ("key_heads", "model"), ("batch", "data"))
    sizes = dict(
        num_heads=8, num_kv_heads=4, in_features=16, partitioned=True,
        score=("dot",) * 2 + ("gaussian",) * 2 + ("additive",) * 4,
    )
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((4, 9, 16)), jnp.float32)
    lens = jnp.asarray([9, 3, 0, 5])
    by_head = P(None, "model", None)

    def run(call, params, x):
        def loss(params, x):
            out = call(params, x)
            return jnp.sum(jnp.sin(out)), out
        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    def compare(got, alone, how):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(alone), strict=True):
            scale = np.abs(b).max() + 1e-30
            np.testing.assert_allclose(
                np.asarray(a) / scale, np.asarray(b) / scale, atol=2e-5, err_msg=how
            )
        print(how, "ok")

    # linen: boxes of logical axes, turned into shardings by the rules
    made = regard.linen.MultiHeadAttention(**sizes)
    boxed = made.init(jax.random.key(0), x)
    params = nn.meta.unbox(boxed)
    def call(params, x):
        return made.apply(params, x, valid_lens=lens, mask=regard.Mask.causal())
    alone = jax.jit(lambda *a: run(call, *a))(params, x)
    specs = nn.logical_to_mesh(nn.get_partition_spec(boxed), rules)
    assert specs["params"]["query"]["kernel"] == by_head, specs
    assert specs["params"]["out"]["kernel"] == P("model", None, None), specs
    assert specs["params"]["additive"]["vector"] == P("model", None), specs
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)
    placed = jax.device_put(params, shardings)
    placed_x = jax.device_put(x, NamedSharding(mesh, P("data")))
    got = jax.jit(lambda *a: run(call, *a))(placed, placed_x)
    compare(got, alone, "linen")
    slope = got[1][0]["params"]["query"]["kernel"]
    assert slope.sharding.spec[1] == "model", slope.sharding

    # linen with the boxes left on, which constrain the parameters wherever a mesh is in force
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        constrained = jax.jit(lambda v, x: call(v, x))(boxed, placed_x)
    compare(constrained, alone[0][1], "boxed")

    # nnx: made within a mesh, a module is sharded from the start
    with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
        module = regard.nnx.MultiHeadAttention(**sizes, rngs=nnx.Rngs(0))
        again = nnx.get_partition_spec(nnx.state(module))["query"]["kernel"]
    assert module.query.kernel[...].sharding.spec == by_head, module.query.kernel[...].sharding
    assert module.out.kernel[...].sharding.spec == P("model", None, None)
    assert again.get_value() == P("embed", "model", "head_features"), again
    regard.nnx.load(module, jax.device_put(params["params"], shardings["params"]))
    definition, state = nnx.split(module)
    def call(state, x):
        return nnx.merge(definition, state)(x, valid_lens=lens, mask=regard.Mask.causal())
    with jax.set_mesh(mesh):
        got = jax.jit(lambda *a: run(call, *a))(state, placed_x)
    compare(got[0], alone[0], "nnx")

    # nnx created in jit, as large models are
    with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
        module = nnx.jit(lambda: regard.nnx.MultiHeadAttention(**sizes, rngs=nnx.Rngs(0)))()
    assert module.query.kernel[...].sharding.spec[1] == "model", module.query.kernel[...].sharding

    # a mesh without rules, and one whose axes have the logical names
    with jax.set_mesh(mesh):
        module = regard.nnx.MultiHeadAttention(**sizes, rngs=nnx.Rngs(0))
    assert module.query.kernel[...].sharding.is_fully_replicated
    named = jax.make_mesh((2, 2), ("embed", "heads"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(named):
        module = regard.nnx.MultiHeadAttention(**sizes, rngs=nnx.Rngs(0))
    assert module.query.kernel[...].sharding.spec == P("embed", "heads", None)
    print("made ok")
"""


@pytest.mark.slow
def test_heads_over_a_mesh():
    assert on_four_devices(MESH) == ["linen ok", "boxed ok", "nnx ok", "made ok"]
