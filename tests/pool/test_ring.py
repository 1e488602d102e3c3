"""Ring attention equals attention on one device: outputs, gradients, dropout, odd lengths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regard
import ring_cases
from eight_devices import lines_of

pytestmark = pytest.mark.sampled(1)

NAMES = [*ring_cases.CASES, *ring_cases.INSIDE, "batch and sequence", "no gather", "memory"]
NAMES += [*ring_cases.KERNELS, "lowered"]
SAID = {"batch and sequence": "causal"} | {
    name: name.removeprefix(ring_cases.BY_KERNELS) for name in ring_cases.KERNELS
}


# Several cases share a process, which takes seconds to start; two let two workers share the work.
@pytest.mark.parametrize("names", [NAMES[0::2], NAMES[1::2]], ids=["even", "odd"])
def test_the_ring_equals_the_definition(names):
    said = [f"{SAID.get(name, name)} ok" for name in names]
    # Most of the time is compiling.
    assert lines_of("ring_cases.py", names, "--xla_backend_optimization_level=0") == said


@pytest.fixture
def mesh():
    return jax.make_mesh((1,), ("seq",))


@pytest.fixture
def x():
    return jnp.asarray(np.random.default_rng(0).standard_normal((2, 9, 4)), jnp.float32)


def test_a_ring_of_one_is_attention(mesh, x):
    mask = regard.Mask.causal()
    got = regard.attend(x, x, x, mask=mask, mesh=mesh, sequence_axis="seq")
    np.testing.assert_allclose(got, regard.attend(x, x, x, mask=mask), atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(normalize=regard.Sparsemax()), "Sparsemax needs whole rows"),
        (dict(normalize=regard.Hard()), "Hard needs whole rows"),
        (dict(bias=np.zeros((9, 9), np.float32)), "the ring takes no bias= per pair"),
        (dict(mask=np.ones((9, 9), bool)), "lengths, causal order, windows and segments only"),
    ],
)
def test_what_it_cannot_do_is_refused(mesh, x, settings, message):
    with pytest.raises(
        NotImplementedError, match=f"can do this over mesh axis 'seq'.\n  ring: .*{message}"
    ):
        regard.attend(x, x, x, **settings, mesh=mesh, sequence_axis="seq")


def test_arguments_that_do_not_fit_together_are_refused(mesh, x):
    with pytest.raises(ValueError, match=r"Got 'sequence', mesh \{'seq': 1\}"):
        regard.attend(x, x, x, mesh=mesh, sequence_axis="sequence")
    with pytest.raises(ValueError, match=r"there is none\. Fix: mesh=, .* inside a shard_map over"):
        regard.attend(x, x, x, sequence_axis="seq")
    with pytest.raises(ValueError, match="mesh= goes with sequence_axis="):
        regard.attend(x, x, x, mesh=mesh)
    with pytest.raises(NotImplementedError, match="reference: pools whole sequences; sequence_axi"):
        regard.attend(x, x, x, mesh=mesh, sequence_axis="seq", implementation="reference")


def test_explain_tells_of_the_ring(mesh, x):
    said = regard.explain(x, x, x, mesh=mesh, sequence_axis="seq")
    assert said.startswith("ring runs: keys and values travel around the mesh axis")


def test_a_union_inside_shard_map_is_not_dropped(x):
    """A shard knows lengths and bands of the whole sequence; anything else is refused."""
    prefix = regard.Mask.causal() | regard.Mask.lengths(jnp.array([2]))
    rows = jax.sharding.PartitionSpec(None, "seq")
    mesh = jax.make_mesh((1,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))

    def on_shards(x):
        return regard.attend(x, x, x, mask=prefix, sequence_axis="seq")

    with pytest.raises(
        NotImplementedError, match="lengths, causal order, windows and segments only"
    ):
        jax.shard_map(on_shards, mesh=mesh, in_specs=(rows,), out_specs=rows)(x)
