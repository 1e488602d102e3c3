"""Scores as pytrees: what JAX has to know before it can trace a score and differentiate it."""

import contextlib
import functools
from typing import Any

import jax

from regard.score.contract import Score


def require_score(score: Any) -> None:
    """Raises TypeError unless this is a score, and it and every score inside it are pytrees; those
    without attributes become one.
    """
    if not isinstance(score, Score):
        raise TypeError(
            "score must be a regard.Score: Dot(), Gaussian(), Bilinear(kernel), "
            f"Additive(query_kernel, key_kernel, vector), or your own subclass. Got {score!r}."
        )
    unknown = {type(leaf): leaf for leaf in jax.tree.leaves(score) if isinstance(leaf, Score)}
    for cls, part in unknown.items():
        _refuse_attributes(part)
        make: Any = functools.partial(_without_attributes, cls)
        with contextlib.suppress(ValueError):  # another thread registered it meanwhile
            jax.tree_util.register_pytree_node(cls, _refuse_attributes, make)


def _without_attributes(cls: type[Score], static: None, leaves: tuple[()]) -> Score:
    return cls.__new__(cls)


def _refuse_attributes(score: Score) -> tuple[tuple[()], None]:
    """No leaves and nothing static; TypeError where that would lose an attribute."""
    slots = [name for cls in type(score).__mro__ for name in getattr(cls, "__slots__", ())]
    held = [*vars(score), *(name for name in slots if hasattr(score, name))]
    if not held:
        return (), None
    name = type(score).__name__
    raise TypeError(
        f"a score with parameters must be a pytree, so that JAX can trace and differentiate them. "
        f"Got {name} with {', '.join(held)}. Fix: @jax.tree_util.register_dataclass above "
        f"@dataclass(frozen=True) on class {name}, with field(metadata=dict(static=True)) for what "
        "is no number."
    )
