"""The type checker of this suite: jaxtyping's shapes in signatures, and nothing else.

Plain hints are mypy's business. At run time they would stand before the front door, whose own
errors are tested, and a pytree's `__init__` is right to take whatever JAX puts into its leaves.
"""

import inspect
import typing

import beartype
from jaxtyping import AbstractArray


def check_shapes(function):
    """Beartype for what is annotated with a shape; `jaxtyping.install_import_hook` calls this."""
    shapes = {name: hint for name, hint in function.__annotations__.items() if has_shape(hint)}
    if not shapes or function.__name__ == "__init__":
        return function
    function.__annotations__ = shapes
    return beartype.beartype(function)


def has_shape(hint) -> bool:
    if inspect.isclass(hint) and issubclass(hint, AbstractArray):
        return True
    return any(has_shape(part) for part in typing.get_args(hint))
