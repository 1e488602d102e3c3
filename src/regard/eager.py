"""Calls outside of jax.jit: the whole call is one compiled program, checks and all, found again by
what the arguments look like.

Operation by operation, a small call takes longer in Python than on the device, and bringing keys
and values to canonical axes copies them. Arguments that are traced already, that lie on several
devices, or that are no arrays take the way of `attend` itself, as does every call that is refused.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from regard.placement import Device, device_of, in_force
from regard.pool import choose

MOST = 4096  # signatures remembered
_UNKNOWN = object()
_programs: OrderedDict[Hashable, Any] = OrderedDict()


class Signature(NamedTuple):
    """What a call is compiled for: everything but the numbers in its arrays.

    Attributes:
        tree: the structure of the arguments, with what is static in a score or mask.
        kinds: shape and dtype of each array; of a number, its type, and on a GPU, where a kernel
            may be compiled for it, its value.
        static: the keywords that are no arrays.
        settings: the backends, and context variables and settings of JAX that a choice depends on.
    """

    tree: Any
    kinds: tuple[Any, ...]
    device: Device
    static: Hashable
    settings: Hashable


def program_of(arrays: Any, static: Any, make: Callable[[Any, Any, Device], Any]) -> Any:
    """make(arrays, static, device), once for each signature.

    None where the call has to be run step by step, and where `make` raises: the call itself then
    says why.
    """
    found = _signature(arrays, static)
    if found is None:
        return None
    try:
        program = _programs.get(found, _UNKNOWN)
    except TypeError:  # a part of it that cannot be hashed
        return None
    if program is _UNKNOWN:
        try:
            program = make(arrays, static, found.device)
        except Exception:
            program = None
        _programs[found] = program
        if len(_programs) > MOST:
            _programs.popitem(last=False)
    return program


def _signature(arrays: Any, static: Hashable) -> Signature | None:
    """The signature of a call on these arrays; None where it has to be run step by step."""
    leaves, tree = jax.tree.flatten(arrays)
    if not all(_can_be_compiled_for(leaf) for leaf in leaves):
        return None
    device = device_of(leaves)
    by_value = device.platform != "cpu"
    kinds = tuple(
        leaf.aval
        if isinstance(leaf, jax.Array)
        else (leaf.shape, leaf.dtype)
        if isinstance(leaf, np.ndarray | np.generic)
        else (type(leaf), leaf if by_value else None)
        for leaf in leaves
    )
    config: Any = jax.config
    numbers = config.jax_default_matmul_precision, config.jax_enable_x64
    return Signature(tree, kinds, device, static, (*choose.REGISTRY, *numbers, *in_force()))


def _can_be_compiled_for(leaf: Any) -> bool:
    if isinstance(leaf, jax.Array):
        traced = isinstance(leaf, jax.core.Tracer)
        return not traced and type(leaf.sharding) is SingleDeviceSharding
    if type(leaf) is int:  # larger ones do not fit the type that jit gives them
        return abs(leaf) < 2**31
    return type(leaf) is float or isinstance(leaf, np.ndarray | np.generic)
