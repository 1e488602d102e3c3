"""Scores as pytrees: what JAX has to know before it can trace a score and differentiate it."""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, TypeVar

import jax

from regard.score.contract import Score

S = TypeVar("S", bound=Score)


def register_score(cls: type[S]) -> type[S]:
    """Makes a frozen dataclass a pytree, as jax.tree_util.register_dataclass does.

    JAX (0.10.2) takes the structures of two dataclasses with as many leaves for equal, those of
    Dot(x) and Gaussian(x) for example: one in about a hundred calls of jax.jit then runs the
    program of the other class. It compares the classes of nodes that are registered as here.
    """
    static = [f.name for f in fields(cls) if f.metadata.get("static")]  # type: ignore[arg-type]
    held = [f.name for f in fields(cls) if f.name not in static]  # type: ignore[arg-type]

    def flatten(score: S) -> tuple[tuple, tuple]:
        return tuple(getattr(score, n) for n in held), tuple(getattr(score, n) for n in static)

    def flatten_with_keys(score: S) -> tuple[list, tuple]:
        leaves, known = flatten(score)
        return list(zip(map(jax.tree_util.GetAttrKey, held), leaves, strict=True)), known

    def make(known: tuple, leaves: Any) -> S:
        score = object.__new__(cls)
        for name, value in zip((*held, *static), (*leaves, *known), strict=True):
            object.__setattr__(score, name, value)
        return score

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, make, flatten)
    return cls


def classes_in(score: Score) -> tuple[type, ...]:
    """The classes of a score and of those inside it: part of a jit cache's key, because JAX does
    not tell a caller's own dataclasses apart, see `register_score`.
    """

    def walk(structure: Any) -> Iterator[type]:
        node = structure.node_data()
        if node is not None:
            yield node[0]
        for child in structure.children():
            yield from walk(child)

    return tuple(walk(jax.tree.structure(score)))


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
