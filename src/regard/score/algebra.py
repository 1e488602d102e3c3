"""Sums and multiples of scores: a + b and c * a, as scores.

Where every term has a lift the sum has one: terms that are polynomials of the same key share its
features, other lifts stand side by side, and biases add. Where one has none, each pair is scored by
every term, tile by tile. `Score.__add__` and `Score.__mul__` lead here.
"""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from regard.score.contract import (
    KeyPolynomial,
    Lift,
    Score,
    TileForm,
    as_multiplied,
    over_heads,
    promote,
    with_heads,
)
from regard.score.gaussian import center_of
from regard.score.positions import Placement
from regard.score.registration import register_score, require_score
from regard.score.side_by_side import (
    ScaledExpansion,
    Span,
    columns,
    pack,
    side_by_side,
    width_of,
)


class Inputs(NamedTuple):
    """Which columns of query and key a term of a sum reads."""

    query: Span = None
    key: Span = None


class Part(NamedTuple):
    """A term of a sum, and what it reads. Equal spans are one and the same array here."""

    score: Score
    query: Array
    key: Array


def added(first: Score, second: Score) -> Score:
    """first + second; sums of sums are flat."""
    if not isinstance(second, Score):
        raise TypeError(
            f"a score is added to a score. Got {type(second).__name__}: a number added to every "
            "score changes no weight. Fix: bias= for numbers per pair, or c * score."
        )
    for score in (first, second):
        require_score(score)
    return Sum(_terms(first) + _terms(second))


def _terms(score: Score) -> tuple[Score, ...]:
    return score.terms if isinstance(score, Sum) and not score.inputs else (score,)


def multiplied(factor: Any, score: Score) -> Score:
    """factor * score, for a number, a scalar array or (N,), one number per head."""
    known = isinstance(factor, int | float | np.generic | np.ndarray | Array)
    dtype = jnp.result_type(factor) if known else np.dtype(bool)
    real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    if not real or jnp.ndim(factor) > 1:
        got = type(factor).__name__
        got = f"{got} {list(factor.shape)} of dtype {dtype}" if hasattr(factor, "shape") else got
        raise TypeError(
            "a score is multiplied by a number, a scalar array or (N,), one number per head. Got "
            f"{got}. Fix: c * score; a product of two scores is your own regard.Score."
        )
    require_score(score)
    factor = float(factor) if isinstance(factor, int) else factor
    if isinstance(score, Scaled):
        return Scaled(factor * score.factor, score.score)
    return Scaled(factor, score)


@register_score
@dataclass(frozen=True)
class Sum(Score):
    """a(q, k) = Σ_i a_i(q, k), made by `+`.

    Lift: where every term has one (tests/score/test_algebra.py). `Dot() + Gaussian()` is as wide
    as one of them: with c the mean of the keys, s q.k = s q.(k-c) + a constant per query, so both
    read the Gaussian's features k-c. Lifts that share no features stand side by side.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> score = regard.Dot(scale=1.0) + 2.0 * regard.Gaussian()
        >>> q, k = jnp.array([[1.0]]), jnp.array([[0.0], [3.0]])
        >>> regard.scores(q, k, score=score).tolist()  # q.k - |q-k|^2
        [[-1.0, -1.0]]

    Attributes:
        terms: the scores.
        inputs: the columns that each term reads, after projection; () where all read everything.
    """

    terms: tuple[Score, ...]
    inputs: tuple[Inputs, ...] = field(default=(), metadata=dict(static=True))

    def label(self) -> str:
        return " + ".join(term.label() for term in self.terms)

    def scores(self, query: Array, key: Array) -> Array:
        found = [part.score.scores(part.query, part.key) for part in self.parts(query, key)]
        return functools.reduce(operator.add, found)

    def scores_back(self, query: Array, key: Array, d_scores: Array) -> tuple[Score, Array, Array]:
        def rows(query: Array, key: Array) -> list[tuple[Array, Array]]:
            return [part[1:] for part in self.parts(query, key)]

        inputs, pull = jax.vjp(rows, query, key)
        terms, cotangents = [], []
        for term, read in zip(self.terms, inputs, strict=True):
            d_term, *d_read = term.scores_back(*read, d_scores)
            terms.append(d_term)
            cotangents.append(tuple(d.astype(x.dtype) for d, x in zip(d_read, read, strict=True)))
        return replace(self, terms=tuple(terms)), *pull(cotangents)

    def lift(self, query: Array, key: Array, *, visible: Array | None = None) -> Lift | None:
        groups: dict[int, list[Part]] = {}
        for part in self.parts(query, key):
            groups.setdefault(id(part.key), []).append(part)
        lifts: list[tuple[str, Lift]] = []
        for parts in groups.values():
            shared = [part for part in parts if _polynomial(part, None) is not None]
            if len(shared) > 1:
                parts = [part for part in parts if not any(part is one for one in shared)]
                name = " + ".join(part.score.label() for part in shared)
                lifts.append((name, _lift_of_polynomials(shared, visible)))
            for part in parts:
                lift = part.score.lift(*part[1:], visible=visible)
                if lift is None:
                    return None
                lifts.append((part.score.label(), lift))
        return side_by_side(lifts)

    def tile_form(
        self, query: Array, key: Array, *, visible: Array | None = None
    ) -> TileForm | None:
        parts, in_range, standings = self.parts(query, key), [], []
        for number, part in enumerate(parts):
            form = part.score.tile_form(*part[1:], visible=visible)
            standings.append(f"{part.score.label()} by definition")
            if form is not None:
                parts[number] = Part(form.score, form.query, form.key)
                in_range.append(form.in_range)
                standings[-1] = f"{part.score.label()} {form.standing}"
        if not in_range:
            return None
        every = functools.reduce(jnp.logical_and, in_range)
        return TileForm(*packed(parts), every, "; ".join(standings))

    def projected(self, query: Array, key: Array) -> tuple[Score, Array, Array]:
        parts = self.parts(query, key)
        return packed([Part(*part.score.projected(*part[1:])) for part in parts])

    def prepared(self, key: Array, positions: Array) -> tuple[Score, Array]:
        """What each term stores of a key, side by side; what several store alike, once."""
        terms, stored = [], []
        for part in self.parts(key, key):
            term, kept = part.score.prepared(part.key, positions)
            terms.append(term)
            stored.append(kept)
        array, spans = pack(stored)
        inputs = tuple(Inputs(None, span) for span in spans)
        return Sum(tuple(terms), inputs if any(spans) else ()), array

    def uses_positions(self) -> bool:
        return any(term.uses_positions() for term in self.terms)

    def placed(self, query: Array, key: Array, at: Placement) -> tuple[Score, Array, Array]:
        parts = self.parts(query, key)
        return packed([Part(*part.score.placed(part.query, part.key, at)) for part in parts])

    def about_keys(self, query: Array, center: Array | None) -> KeyPolynomial | None:
        if self.inputs:
            return None
        return _total([term.about_keys(query, center) for term in self.terms])

    def check(self, query_width: int, key_width: int) -> None:
        every = self.inputs or (Inputs(),) * len(self.terms)
        for term, (of_query, of_key) in zip(self.terms, every, strict=True):
            try:
                term.check(width_of(of_query, query_width), width_of(of_key, key_width))
            except ValueError as error:
                raise ValueError(
                    f"the terms of a sum share queries and keys, and {term.label()} of "
                    f"{self.label()} does not take these: {error}"
                ) from None

    def head_axes(self) -> dict[str, tuple[int, ...]]:
        return {
            f"terms[{number}].{name}": shape
            for number, term in enumerate(self.terms)
            for name, shape in term.head_axes().items()
        }

    def tile_width(self, query_width: int) -> int:
        return max(term.tile_width(query_width) for term in self.terms)

    @property
    def sums_over_shards(self) -> bool:  # type: ignore[override]
        return all(term.sums_over_shards for term in self.terms)

    def static_scale(self, query_width: int) -> float | None:
        scales = [term.static_scale(query_width) for term in self.terms]
        known = [scale for scale in scales if scale is not None]
        return sum(known) if len(known) == len(scales) and not self.inputs else None

    def parts(self, query: Array, key: Array) -> list[Part]:
        """The terms with the columns that they read, those of equal spans sliced once."""
        if not self.inputs:
            return [Part(term, query, key) for term in self.terms]
        queries = {span: columns(query, span) for span, _ in self.inputs}
        keys = {span: columns(key, span) for _, span in self.inputs}
        every = zip(self.terms, self.inputs, strict=True)
        return [Part(term, queries[of_q], keys[of_k]) for term, (of_q, of_k) in every]


@register_score
@dataclass(frozen=True)
class Scaled(Score):
    """c · a(q, k), made by `*`. The factor is a leaf: it may be learned, and (N,), one per head.

    Lift: that of the score, its query features times c; an additive score's vector takes c.

    Example:
        >>> import jax.numpy as jnp, regard
        >>> q, k = jnp.ones((1, 4)), jnp.ones((2, 4))
        >>> regard.scores(q, k, score=-0.5 * regard.Dot()).tolist()
        [[-1.0, -1.0]]
    """

    factor: float | Array
    score: Score

    def label(self) -> str:
        return (
            f"c * {self.score.label()}"
            if len(_terms(self.score)) == 1
            else (f"c * ({self.score.label()})")
        )

    def scores(self, query: Array, key: Array) -> Array:
        return self.score.scores(query, key) * over_heads(self.factor, query)

    def lift(self, query: Array, key: Array, *, visible: Array | None = None) -> Lift | None:
        if (alone := self._alone()) is not None:
            return alone.lift(query, key, visible=visible)
        lift = self.score.lift(query, key, visible=visible)
        return None if lift is None else self._times(lift, query)

    def _times(self, lift: Lift, query: Array) -> Lift:
        """The factor times a lift, and times each that comes after it."""
        factor, expansion, rows = over_heads(self.factor, query), lift.expansion, lift.query
        if expansion is None:
            rows = rows.astype(promote(rows.dtype, factor.dtype)) * factor
        else:
            whole = (*query.shape[:-2], 1, 1)  # of every example, as an expansion's arrays are
            expansion = ScaledExpansion(expansion, jnp.broadcast_to(factor, whole))
        biases: dict[str, Any] = {
            name: None if bias is None else bias * factor[..., 0]
            for name in ("key_bias", "query_bias", "distance_bias")
            for bias in (getattr(lift, name),)
        }
        after = None if lift.otherwise is None else self._times(lift.otherwise, query)
        biases |= dict(raw_queries=None, otherwise=after)
        return replace(lift, query=rows, expansion=expansion, **biases)

    def tile_form(
        self, query: Array, key: Array, *, visible: Array | None = None
    ) -> TileForm | None:
        if (alone := self._alone()) is not None:
            return alone.tile_form(query, key, visible=visible)
        form = self.score.tile_form(query, key, visible=visible)
        return None if form is None else replace(form, score=Scaled(self.factor, form.score))

    def projected(self, query: Array, key: Array) -> tuple[Score, Array, Array]:
        if (alone := self._alone()) is not None:
            return alone.projected(query, key)
        score, query, key = self.score.projected(query, key)
        return Scaled(self.factor, score), query, key

    def prepared(self, key: Array, positions: Array) -> tuple[Score, Array]:
        if (alone := self._alone()) is not None:
            return alone.prepared(key, positions)
        score, stored = self.score.prepared(key, positions)
        return Scaled(self.factor, score), stored

    def uses_positions(self) -> bool:
        return self.score.uses_positions()

    def placed(self, query: Array, key: Array, at: Placement) -> tuple[Score, Array, Array]:
        score, query, key = self.score.placed(query, key, at)
        return Scaled(self.factor, score), query, key

    def about_keys(self, query: Array, center: Array | None) -> KeyPolynomial | None:
        found = self.score.about_keys(query, center)
        if found is None:
            return None
        factor = over_heads(self.factor, query)
        of_constant = None if found.constant is None else found.constant * factor[..., 0]
        square = None if found.square is None else found.square * factor
        return KeyPolynomial(found.linear * factor, square, of_constant)

    def scaled(self, factor: Array) -> Score | None:
        return self.score.scaled(jnp.asarray(self.factor) * factor)

    def check(self, query_width: int, key_width: int) -> None:
        self.score.check(query_width, key_width)

    def head_axes(self) -> dict[str, tuple[int, ...]]:
        inner = {f"score.{name}": shape for name, shape in self.score.head_axes().items()}
        return with_heads(0, factor=self.factor) | inner

    def tile_width(self, query_width: int) -> int:
        return self.score.tile_width(query_width)

    @property
    def sums_over_shards(self) -> bool:  # type: ignore[override]
        return self.score.sums_over_shards

    def static_scale(self, query_width: int) -> float | None:
        scale = self.score.static_scale(query_width)
        known = isinstance(self.factor, int | float) and self.factor > 0
        return scale * float(self.factor) if known and scale is not None else None

    def tanh_vector(self) -> Array | None:
        alone = self._alone()
        return None if alone is None else alone.tanh_vector()

    def projects_keys(self) -> bool:
        return self.score.projects_keys()

    def _alone(self) -> Score | None:
        """The same score without this class, where its own class can hold the factor."""
        return self.score.scaled(jnp.asarray(self.factor))


def packed(parts: Sequence[Part]) -> tuple[Score, Array, Array]:
    """The sum of the parts on one query and one key, which hold each array that they read once."""
    query, of_query = pack([part.query for part in parts])
    key, of_key = pack([part.key for part in parts])
    inputs = tuple(map(Inputs, of_query, of_key))
    every = any(one != Inputs() for one in inputs)
    return Sum(tuple(part.score for part in parts), inputs if every else ()), query, key


def _polynomial(part: Part, center: Array | None) -> KeyPolynomial | None:
    return part.score.about_keys(part.query, center)


def _total(found: Sequence[KeyPolynomial | None]) -> KeyPolynomial | None:
    every = [one for one in found if one is not None]
    if len(every) < len(found):
        return None

    def total(terms: tuple[Array | None, ...]) -> Any:
        given = [term for term in terms if term is not None]
        return functools.reduce(operator.add, given) if given else None

    return KeyPolynomial(*map(total, zip(*every, strict=True)))


def _lift_of_polynomials(parts: Sequence[Part], visible: Array | None) -> Lift:
    """The sum of polynomials of one key: its features are the key's, around a center c."""
    key = parts[0].key
    plain = _total([_polynomial(part, None) for part in parts])
    assert plain is not None
    if plain.square is None:
        return Lift(plain.linear, key, query_bias=plain.constant)
    wide = plain.linear.dtype
    center = center_of(key, visible)
    # The norm of the rounded key, as in Gaussian.lift: a key that is off by one rounding.
    rounded = as_multiplied((key.astype(wide) - center).astype(key.dtype))
    if visible is not None:
        rounded = jnp.where(visible[..., None], rounded, 0)
    found = _total([_polynomial(part, center) for part in parts])
    assert found is not None
    assert found.square is not None
    key_bias = (found.square * jnp.square(rounded.astype(wide))).sum(-1)
    standing = "exact up to a per-query constant"
    return Lift(found.linear, rounded, key_bias, found.constant, standing=standing)
