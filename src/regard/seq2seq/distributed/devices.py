"""The devices of a run, in one or several processes: how they share batches and parameters.

They form a mesh of two axes. Along "data" the devices share each batch; along "model" they share
each matrix of the parameters and of Adam's moments, on request. Every process calls the same
methods in the same order; XLA transfers the data.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from regard.seq2seq.model.dropout import ShardOfRows


class DataParallel:
    """The devices that share a batch: each has some of its rows.

    Args:
        devices: one or more; of several processes, all devices.
        model: how many devices share each matrix of the parameters; 1: each device has all.

    Attributes:
        count: how many devices share a batch.

    Raises:
        ValueError: `model` does not divide the devices.
    """

    def __init__(self, devices: Sequence[jax.Device], model: int = 1) -> None:
        if model < 1 or len(devices) % model:
            raise ValueError(
                "the model axis must divide the number of devices. Got model axis "
                f"{model}, {len(devices)} devices. Fix: a divisor of {len(devices)}, or other "
                "numbers of processes."
            )
        self.devices, self.model = list(devices), model
        self.count = len(devices) // model
        grid = np.array(devices).reshape(self.count, model)
        # Only one axis if the parameters are not shared: the programs stay the same.
        self.mesh = Mesh(grid, ("data", "model")) if model > 1 else Mesh(grid[:, 0], ("data",))
        mine = [device for device in devices if device.process_index == jax.process_index()]
        self.local = mine[0]
        self.alone = len(mine) == len(devices)  # one process

    # To the devices --------------------------------------------------------------------------

    def shard(self, batch: Any) -> Any:
        """Puts a batch on the devices, with rows of padding so that it divides among them.

        Every process has the whole batch, and gives its own devices their rows.
        """

        def fill(array: np.ndarray) -> np.ndarray:
            array = np.asarray(array)
            missing = -array.shape[0] % self.count
            return np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1))

        return self._put(jax.tree.map(fill, batch), lambda leaf: PartitionSpec("data"))

    def replicate(self, tree: Any) -> Any:
        """Puts a tree on every device."""
        return self._put(tree, lambda leaf: PartitionSpec())

    def place(self, state: Any) -> Any:
        """Puts parameters or moments on the devices: a part on each, or all on each."""
        return self._put(state, self._part)

    def _put(self, tree: Any, part: Callable[[Any], PartitionSpec]) -> Any:
        def sharding(leaf: Any) -> NamedSharding:
            return NamedSharding(self.mesh, part(leaf))

        if self.alone:
            return jax.device_put(tree, jax.tree.map(sharding, tree))

        def pieces(leaf: Any) -> Array:
            whole = np.asarray(leaf)
            return jax.make_array_from_callback(whole.shape, sharding(whole), whole.__getitem__)

        return jax.tree.map(pieces, tree)

    def _part(self, leaf: Any) -> PartitionSpec:
        """The partition of a matrix along its longest divisible axis; of others, none."""
        axes = [axis for axis in range(np.ndim(leaf)) if np.shape(leaf)[axis] % self.model == 0]
        if self.model == 1 or np.ndim(leaf) < 2 or not axes:
            return PartitionSpec()
        longest = max(axes, key=lambda axis: np.shape(leaf)[axis])
        return PartitionSpec(*["model" if axis == longest else None for axis in range(longest + 1)])

    # In a program ----------------------------------------------------------------------------

    def keep(self, state: Any) -> Any:
        """Inside a jitted function: constrains the result to the sharding of `place`."""
        if self.model == 1:
            return state

        def constrained(leaf: Array) -> Array:
            where = NamedSharding(self.mesh, self._part(leaf))
            return jax.lax.with_sharding_constraint(leaf, where)

        return jax.tree.map(constrained, state)

    def over_rows(self, sums: Callable[..., Any]) -> Callable[..., Any]:
        """sums(params, batch, rng) of a whole batch, from a function that sums over some rows.

        Each device runs it on its own rows, with its own rows of the random numbers; the results
        are added.
        """
        if self.count == 1:
            return sums

        def on_each(params: Any, batch: Any, rng: Array | None) -> Any:
            mine = None
            if rng is not None:
                mine = ShardOfRows(rng, jax.lax.axis_index("data"), self.count)
            return jax.lax.psum(sums(params, batch, mine), "data")

        rows, everywhere = PartitionSpec("data"), PartitionSpec()
        return jax.shard_map(
            on_each,
            mesh=self.mesh,
            in_specs=(everywhere, rows, everywhere),
            out_specs=everywhere,
            axis_names={"data"},  # along "model", XLA distributes the work
            check_vma=False,
        )

    # From the devices --------------------------------------------------------------------------

    def whole(self, tree: Any) -> Any:
        """The same with every leaf complete on every device, so that any process can read it."""
        if self.model == 1:
            return tree
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(jax.jit(lambda leaf: leaf, out_shardings=everywhere), tree)

    def here(self, tree: Any) -> Any:
        """The same on one device of this process, for work that is not shared, such as search."""
        if self.alone:
            return jax.device_put(tree, self.local)
        return jax.tree.map(
            lambda leaf: jax.device_put(np.asarray(leaf), self.local), self.whole(tree)
        )
