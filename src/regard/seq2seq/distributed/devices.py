"""The devices of a run, of one process or of many: who has which rows, and which parameters.

A mesh of two axes. Along "data" the devices share each batch, and along "model" each matrix of
the parameters and of Adam's moments, where that is asked for. Every process calls the same
methods in the same order; XLA moves what has to be moved.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from regard.seq2seq.model.dropout import ShareOfRows


class DataParallel:
    """The devices that share a batch: each takes some of its rows.

    Args:
        devices: one or more; where there are several processes, all of all of them.
        model: so many devices share each matrix of the parameters; 1: each device has them all.

    Attributes:
        count: how many share a batch.

    Raises:
        ValueError: `model` does not divide the devices.
    """

    def __init__(self, devices: Sequence[jax.Device], model: int = 1) -> None:
        if model < 1 or len(devices) % model:
            raise ValueError(
                "the devices that share the parameters must divide all devices. Got model axis "
                f"{model}, {len(devices)} devices. Fix: a divisor of {len(devices)}, or other "
                "numbers of processes."
            )
        self.devices, self.model = list(devices), model
        self.count = len(devices) // model
        grid = np.array(devices).reshape(self.count, model)
        # One axis where one will do: the programs are those of a run without parallel parameters.
        self.mesh = Mesh(grid, ("data", "model")) if model > 1 else Mesh(grid[:, 0], ("data",))
        mine = [device for device in devices if device.process_index == jax.process_index()]
        self.local = mine[0]
        self.alone = len(mine) == len(devices)  # one process

    # To the devices --------------------------------------------------------------------------

    def share(self, batch: Any) -> Any:
        """A batch on the devices, filled up with rows of padding until they divide.

        Every process has the whole batch, and gives its own devices theirs.
        """

        def fill(array: np.ndarray) -> np.ndarray:
            array = np.asarray(array)
            missing = -array.shape[0] % self.count
            return np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1))

        return self._put(jax.tree.map(fill, batch), lambda leaf: PartitionSpec("data"))

    def replicate(self, tree: Any) -> Any:
        """A tree on every device."""
        return self._put(tree, lambda leaf: PartitionSpec())

    def place(self, state: Any) -> Any:
        """Parameters or moments where they belong: a part on each device, or all on all."""
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
        """Of a matrix, an even part of its longest axis that can be divided; else all of it."""
        axes = [axis for axis in range(np.ndim(leaf)) if np.shape(leaf)[axis] % self.model == 0]
        if self.model == 1 or np.ndim(leaf) < 2 or not axes:
            return PartitionSpec()
        longest = max(axes, key=lambda axis: np.shape(leaf)[axis])
        return PartitionSpec(*["model" if axis == longest else None for axis in range(longest + 1)])

    # In a program ----------------------------------------------------------------------------

    def keep(self, state: Any) -> Any:
        """Inside a jitted function: the result stays where `place` put it."""
        if self.model == 1:
            return state

        def constrained(leaf: Array) -> Array:
            where = NamedSharding(self.mesh, self._part(leaf))
            return jax.lax.with_sharding_constraint(leaf, where)

        return jax.tree.map(constrained, state)

    def over_rows(self, sums: Callable[..., Any]) -> Callable[..., Any]:
        """sums(params, batch, rng) of the whole batch, from one that sums over some of its rows.

        Each device runs it on its own rows, with its own rows of the random numbers; the results
        are added up.
        """
        if self.count == 1:
            return sums

        def on_each(params: Any, batch: Any, rng: Array | None) -> Any:
            mine = None
            if rng is not None:
                mine = ShareOfRows(rng, jax.lax.axis_index("data"), self.count)
            return jax.lax.psum(sums(params, batch, mine), "data")

        rows, everywhere = PartitionSpec("data"), PartitionSpec()
        return jax.shard_map(
            on_each,
            mesh=self.mesh,
            in_specs=(everywhere, rows, everywhere),
            out_specs=everywhere,
            axis_names={"data"},  # along "model" XLA decides who computes what
            check_vma=False,
        )

    # Back ------------------------------------------------------------------------------------

    def whole(self, tree: Any) -> Any:
        """The same with every leaf whole on every device, so that any process can read it."""
        if self.model == 1:
            return tree
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(jax.jit(lambda leaf: leaf, out_shardings=everywhere), tree)

    def here(self, tree: Any) -> Any:
        """The same on one device of this process, for what the devices do not share: search."""
        if self.alone:
            return jax.device_put(tree, self.local)
        return jax.tree.map(
            lambda leaf: jax.device_put(np.asarray(leaf), self.local), self.whole(tree)
        )
