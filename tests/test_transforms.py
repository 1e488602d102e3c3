"""jit, grad, vmap, scan, remat, shard_map, export, and second derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import regard
from cases import BACKENDS, REGIMES, Case, Sizes, on_every_backend, small_tiles
from eight_devices import on_four_devices
from problem import as_arguments, assert_close, draw

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.sampled(2)]

TENSORS = ("query", "key", "value")
LIFTING = Sizes(T=67, S=71, N=2, K=1)  # long enough for the additive lift to be taken

CASES = [Case(), Case(score="additive", sizes=LIFTING), Case(regime="sparsemax")]


def pool_of(problem):
    """attend of this problem as a function of (query, key, value, lens), and those four as
    arrays.
    """
    chosen = BACKENDS[problem.case.backend]
    arguments, masks = problem.as_arguments(problem.inputs), as_arguments(problem.facts)

    def pool(query, key, value, lens):
        with chosen.tiling():
            return regard.attend(
                query,
                key,
                value,
                score=arguments["score"],
                valid_lens=lens,
                normalize=REGIMES[problem.case.regime].normalize,
                implementation=chosen.implementation,
            )

    return pool, [*(arguments[name] for name in TENSORS), masks["valid_lens"]]


def on_backends(cases):
    return pytest.mark.parametrize("case", on_every_backend(cases), ids=str)


@on_backends([Case(), Case(score="additive", sizes=LIFTING)])
def test_scan_over_decoding_steps(case):
    """One query at a time in a scan, each with its own length, is the whole at once."""
    problem = draw(case)
    pool, (query, key, value, lens) = pool_of(problem)

    @jax.jit
    def decode(query, key, value):
        def step(carry, q):
            return carry, pool(q[:, None], key, value, lens)[:, 0]

        return jnp.moveaxis(jax.lax.scan(step, None, jnp.moveaxis(query, 1, 0))[1], 0, 1)

    assert_close(decode(query, key, value), problem.pooled.out, 2e-6, "out")
    slopes = jax.grad(
        lambda *x: jnp.sum(decode(*x) * problem.cotangent.astype(np.float32)), argnums=(0, 1, 2)
    )(query, key, value)
    for name, slope in zip(TENSORS, slopes, strict=True):
        assert_close(
            slope, problem.gradients[name], 1e-4 if case.score == "additive" else 1e-5, name
        )


@on_backends(CASES)
def test_remat(case):
    problem = draw(case)
    pool, arrays = pool_of(problem)

    def loss(pool, *tensors):
        return jnp.sum(pool(*tensors, arrays[3]) * jnp.asarray(problem.cotangent, jnp.float32))

    slopes = jax.jit(jax.grad(functools.partial(loss, jax.checkpoint(pool)), argnums=(0, 1, 2)))(
        *arrays[:3]
    )
    for name, slope in zip(TENSORS, slopes, strict=True):
        assert_close(slope, problem.gradients[name], problem.tolerance(name), name)


@on_backends(CASES)
def test_shard_map_on_one_device(case):
    problem = draw(case)
    pool, arrays = pool_of(problem)
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(pool, mesh=mesh, in_specs=(P("batch"),) * 4, out_specs=P("batch"))

    def loss(*tensors):
        return jnp.sum(sharded(*tensors, arrays[3]) * jnp.asarray(problem.cotangent, jnp.float32))

    assert_close(jax.jit(sharded)(*arrays), problem.pooled.out, problem.tolerance("out"), "out")
    slopes = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arrays[:3])
    for name, slope in zip(TENSORS, slopes, strict=True):
        assert_close(slope, problem.gradients[name], problem.tolerance(name), name)


FOUR_DEVICES = """
    import jax, jax.numpy as jnp, numpy as np, regard
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

    assert jax.device_count() == 4, jax.devices()
    mesh = jax.make_mesh((2, 2), ("batch", "heads"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(0)
    B, T, N, S, D, h = 4, 67, 2, 71, 6, 5
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    query, key, value = draw(B, T, N, D), draw(B, S, N, D), draw(B, S, N, 3)
    cotangent, lens = draw(B, T, N, 3), jnp.asarray([0, 71, 5, 40])
    scores = {
        "dot": regard.Dot(),
        "additive": regard.Additive(draw(D, h) / D**0.5, draw(D, h) / D**0.5, draw(h)),
    }
    spec = P("batch", None, "heads", None)
    sharding, by_batch = NamedSharding(mesh, spec), NamedSharding(mesh, P("batch"))

    for implementation in ("reference", "blockwise"):
        for name, score in scores.items():
            def pool(score, query, key, value, lens):
                return regard.attend(
                    query, key, value, score=score, valid_lens=lens, implementation=implementation
                )

            def run(pool, score, query, key, value, lens):
                out, pull = jax.vjp(lambda *x: pool(*x, lens), score, query, key, value)
                return out, pull(cotangent)

            alone = jax.jit(lambda *x: run(pool, *x))(score, query, key, value, lens)
            mapped = jax.shard_map(
                pool, mesh=mesh, in_specs=(P(), spec, spec, spec, P("batch")), out_specs=spec
            )
            placed = [jax.device_put(x, sharding) for x in (query, key, value)]
            placed_lens = jax.device_put(lens, by_batch)
            for how, pooled in (("shard_map", mapped), ("automatic", pool)):
                got = jax.jit(lambda *x: run(pooled, *x))(score, *placed, placed_lens)
                for x, y in zip(jax.tree.leaves(alone), jax.tree.leaves(got), strict=True):
                    scale = np.abs(x).max() + 1e-30
                    np.testing.assert_allclose(
                        np.asarray(y) / scale, np.asarray(x) / scale, atol=2e-5,
                        err_msg=f"{implementation}, {name}, {how}",
                    )
            print(implementation, name, "ok")
"""


@pytest.mark.slow
def test_four_devices():
    """Batch and heads over four (virtual) devices, by shard_map and by the compiler: the one-
    device answer.
    """
    assert on_four_devices(FOUR_DEVICES) == [
        f"{backend} {score} ok"
        for backend in ("reference", "blockwise")
        for score in ("dot", "additive")
    ]


@on_backends(CASES)
def test_export_roundtrip(case):
    """Serialized, read back and called, with its gradient: the same numbers."""
    problem = draw(case)
    pool, arrays = pool_of(problem)
    exported = jax.export.export(jax.jit(pool))(*arrays)
    again = jax.export.deserialize(exported.serialize(vjp_order=1))
    assert_close(again.call(*arrays), problem.pooled.out, problem.tolerance("out"), "out")
    _, pull = jax.vjp(lambda *tensors: again.call(*tensors, arrays[3]), *arrays[:3])
    for name, slope in zip(TENSORS, pull(jnp.asarray(problem.cotangent, jnp.float32)), strict=True):
        assert_close(slope, problem.gradients[name], problem.tolerance(name), name)


OPEN = {
    "causal and lengths": (
        dict(mask=regard.Mask.causal()),
        lambda B, T, S: dict(valid_lens=((B,), jnp.int32)),
    ),
    "window, additive": (
        dict(
            mask=~regard.Mask.window(1, 2),
            score=regard.Additive(None, None, jnp.arange(8, dtype=jnp.float32)),
        ),
        lambda B, T, S: {},
    ),
    "bias, sparsemax": (
        dict(normalize=regard.Sparsemax()),
        lambda B, T, S: dict(bias=((1, T, S), jnp.float32)),
    ),
}


@pytest.mark.parametrize("name", OPEN)
def test_export_with_open_sizes(name):
    """Exported once for every B, T and S, with its gradient; called with two sets of sizes."""
    settings, more = OPEN[name]

    def pool(query, key, value, more):
        return regard.attend(query, key, value, **more, **settings)

    def arguments(B, T, S, make):
        shapes = [((B, T, 8), jnp.float32), ((B, S, 8), jnp.float32), ((B, S, 3), jnp.float32)]
        others = {name: make(*given) for name, given in more(B, T, S).items()}
        return [make(*given) for given in shapes] + [others]

    rng = np.random.default_rng(1)

    def random(shape, dtype):
        if dtype == jnp.int32:
            return jnp.asarray(rng.integers(0, 6, shape), dtype)
        return jnp.asarray(rng.standard_normal(shape), dtype)

    open_sizes = jax.export.symbolic_shape("B, T, S")
    exported = jax.export.export(jax.jit(pool))(*arguments(*open_sizes, jax.ShapeDtypeStruct))
    again = jax.export.deserialize(exported.serialize(vjp_order=1))
    for sizes in ((3, 5, 7), (1, 9, 4)):
        given = arguments(*sizes, random)
        out, pull = jax.vjp(again.call, *given)
        expected, expected_pull = jax.vjp(pool, *given)
        np.testing.assert_allclose(out, expected, atol=1e-5)
        for got, want in zip(pull(out)[:3], expected_pull(out)[:3], strict=True):
            np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int32])
def test_export_with_open_sizes_and_lengths_of_few_bits(dtype):
    S = jax.export.symbolic_shape("S")[0]

    def pool(x, lens):
        return regard.weights(x[:1], x, valid_lens=lens)

    arguments = jax.ShapeDtypeStruct((S, 2), jnp.float32), jax.ShapeDtypeStruct((), dtype)
    exported = jax.export.export(jax.jit(pool))(*arguments)
    for size in (300, 5):
        x, lens = jnp.ones((size, 2), jnp.float32), jnp.asarray(100, dtype)
        count = min(size, 100)
        expected = np.where(np.arange(size) < count, 1 / count, 0)[None]
        np.testing.assert_allclose(exported.call(x, lens), expected, rtol=1e-5)


def test_open_sizes_are_explained_and_refused_by_name():
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("B, T, 4"), jnp.float32)
    said = []

    def explained(x):
        said.append(regard.explain(x, x, x))
        return x

    jax.export.export(jax.jit(explained))(x)
    assert said[0].startswith("reference runs: dense, for sizes known only when the program")
    with pytest.raises(NotImplementedError, match=r"blockwise: needs sizes that are numbers \(her"):
        jax.export.export(jax.jit(lambda x: regard.attend(x, x, x, implementation="blockwise")))(x)


# ---------------------------------------------------------------------------------------------
# Second derivatives, in float64: of the exact paths, against differences of the gradient.

SECOND = [
    Case(dtype="float64"),
    Case(dtype="float64", score="gaussian"),
    Case(dtype="float64", score="additive"),
    Case(dtype="float64", regime="kernel"),
    Case(dtype="float64", regime="sparsemax", mask="segments"),
    Case(dtype="float64", mask="everything", bias=(2, 1, 19, 37)),
    Case(dtype="float64", regime="cone", mask="causal window and lengths per query"),
]


def hessian_products(problem):
    """(gradient as a function of the inputs, the inputs, a direction)."""
    chosen = BACKENDS[problem.case.backend]
    arguments, masks = problem.as_arguments(problem.inputs), as_arguments(problem.facts)
    rng = np.random.default_rng(9)
    direction = jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), arguments
    )

    def loss(arguments):
        with chosen.tiling():
            out = regard.attend(
                **arguments,
                **masks,
                normalize=REGIMES[problem.case.regime].normalize,
                implementation=chosen.implementation,
            )
        return jnp.sum(jnp.sin(out))

    return jax.jit(jax.grad(loss)), arguments, direction


def differences(gradient, arguments, direction, step=1e-5):
    def moved(sign):
        return jax.tree.map(lambda x, d: x + sign * step * d, arguments, direction)

    up, down = gradient(moved(1)), gradient(moved(-1))
    return jax.tree.map(lambda a, b: (a - b) / (2 * step), up, down)


def assert_trees_close(got, expected, tolerance):
    for path, leaf in jax.tree_util.tree_leaves_with_path(expected):
        found = functools.reduce(lambda tree, step: _child(tree, step), path, got)
        assert_close(found, leaf, tolerance, jax.tree_util.keystr(path))


def _child(tree, step):
    return tree[step.key] if hasattr(step, "key") else getattr(tree, step.name)


@on_backends(SECOND)
def test_forward_over_reverse(case):
    gradient, arguments, direction = hessian_products(draw(case))
    _, got = jax.jit(lambda x, d: jax.jvp(gradient, (x,), (d,)))(arguments, direction)
    assert_trees_close(got, differences(gradient, arguments, direction), 1e-7)


@on_backends(SECOND)
def test_reverse_over_reverse(case):
    gradient, arguments, direction = hessian_products(draw(case))

    @jax.jit
    def product(arguments):
        return jax.grad(
            lambda x: sum(
                jnp.vdot(a, b)
                for a, b in zip(
                    jax.tree.leaves(gradient(x)), jax.tree.leaves(direction), strict=True
                )
            )
        )(arguments)

    assert_trees_close(product(arguments), differences(gradient, arguments, direction), 1e-7)


@on_backends([Case(dtype="float64", regime=regime, mask="everything") for regime in REGIMES])
def test_forward_mode_is_the_transpose_of_reverse_mode(case):
    """<c, J d> = <Jᵀ c, d>, for jvp, linearize and vjp of one call with dropout."""
    problem = draw(case)
    chosen = BACKENDS[case.backend]
    arguments, masks = problem.as_arguments(problem.inputs), as_arguments(problem.facts)
    rng = np.random.default_rng(9)
    direction = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape)), arguments)
    cotangent = jnp.asarray(problem.cotangent)

    def pool(arguments):
        with chosen.tiling():
            return regard.attend(
                **arguments,
                **masks,
                normalize=REGIMES[case.regime].normalize,
                dropout_rate=0.25,
                dropout_rng=jax.random.key(3),
                implementation=chosen.implementation,
            )

    @jax.jit
    def all_three(arguments, direction):
        _, pushed = jax.jvp(pool, (arguments,), (direction,))
        linear = jax.linearize(pool, arguments)[1](direction)
        pulled = jax.vjp(pool, arguments)[1](cotangent)[0]
        return pushed, linear, pulled

    pushed, linear, pulled = all_three(arguments, direction)
    np.testing.assert_allclose(linear, pushed, atol=1e-12)
    expected = sum(
        np.vdot(a, b)
        for a, b in zip(jax.tree.leaves(pulled), jax.tree.leaves(direction), strict=True)
    )
    np.testing.assert_allclose(np.vdot(cotangent, pushed), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("regime", ["softmax", "hard, straight through", "hard"])
def test_hessians_under_vmap_are_those_of_the_reference(regime):
    """jax.hessian and jax.jacfwd of jacrev, each of a batch of functions by vmap."""
    rng = np.random.default_rng(4)
    query, key, value = (jnp.asarray(rng.standard_normal((1, 5, 2, 3))) for _ in range(3))

    def hessians(implementation):
        def loss(query):
            with small_tiles():
                out = regard.attend(
                    query,
                    key,
                    value,
                    mask=regard.Mask.causal(),
                    normalize=REGIMES[regime].normalize,
                    implementation=implementation,
                )
            return jnp.sum(jnp.sin(out))

        return jax.jit(jax.vmap(jax.hessian(loss)))(jnp.stack([query, query + 1]))

    np.testing.assert_allclose(hessians("blockwise"), hessians("reference"), atol=1e-12)


def test_second_derivatives_in_linear_memory():
    """T = S = 4,096: one array of weights takes 64 MiB; grad of grad takes less in all."""
    x = jax.ShapeDtypeStruct((1, 4096, 1, 64), jnp.float32)

    def loss(query, key, value):
        mask = regard.Mask.causal()
        return jnp.sum(jnp.sin(regard.attend(query, key, value, mask=mask)))

    def squared(*arrays):
        return sum(jnp.vdot(g, g) for g in jax.grad(loss, (0, 1, 2))(*arrays))

    compiled = jax.jit(jax.grad(squared, (0, 1, 2))).lower(x, x, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 64 << 20


def test_hessian_of_empty_rows_is_zero():
    """valid_len 0 and padding: second derivatives are exactly zero too, not NaN."""
    gradient, arguments, direction = hessian_products(
        draw(Case(dtype="float64", mask="no keys at all"))
    )
    _, got = jax.jvp(gradient, (arguments,), (direction,))
    for leaf in jax.tree.leaves(got):
        np.testing.assert_array_equal(leaf, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_grad_inside_vmap_is_vmap_of_grad(backend):
    """Per-example gradients: one problem per example of the batch, lengths included."""
    problem = draw(Case(backend=backend, sizes=Sizes(N=None, K=None)))
    pool, (query, key, value, lens) = pool_of(problem)
    cotangent = jnp.asarray(problem.cotangent, jnp.float32)

    def loss(query, key, value, lens, cotangent):
        return jnp.sum(pool(query, key, value, lens) * cotangent)

    slopes = jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1, 2))))(
        query, key, value, lens, cotangent
    )
    for name, slope in zip(TENSORS, slopes, strict=True):
        assert_close(slope, problem.gradients[name], problem.tolerance(name), name)
