"""What to compile before the first visitor comes: a few shapes that nearly every request fits.

A beam search is compiled for its beam, for how many hypotheses are wanted, and for the shape of
its batch. A translator takes a larger shape that is compiled already rather than a new one, so
that these few shapes are enough for one sentence as for a full batch. They are compiled twice:
in a hurry, for the first visitor, and then at leisure, for the crowd.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

WORD = "the"  # common enough to be one token of any English vocabulary

# Sentences and words of each. The small ones come first: they would fit into the large ones too.
ONE, MANY = ((1, 28), (1, 60)), ((8, 12), (8, 28), (64, 12), (32, 28), (16, 60), (8, 90))
# Beam and n_best: what the page asks for, one sentence at a time, and the API's defaults.
PROGRAMS = {(5, 5): ONE, (5, 1): ONE + MANY}

# What the page's Scores ask first: points in the plane, and the eight keys of d numbers.
PLANES = ((3, 5, 2), (1, 8, 4))  # queries, keys, numbers of each


def steps(
    translator: Any, done: Callable[[int, int], None], *, hurry: bool
) -> list[Callable[[], None]]:
    """What compiles the translator's programs, one shape after another.

    Example:
        >>> from regard.playground.warming import steps
        >>> class Silent:
        ...     def translate(self, texts, search, n_best, hurry):
        ...         return [[] for _ in texts]
        >>> count = lambda done, of: print(f"{done} of {of}", end="; ")
        >>> todo = steps(Silent(), count, hurry=True)
        >>> for step in todo[:3]:
        ...     step()
        1 of 10; 2 of 10; 3 of 10;

    Args:
        translator: a `Translator`.
        done: is told how many shapes are compiled, and of how many.
        hurry: whether the programs should rather be ready soon than be fast: a third of the time
            to compile them, and three times as long a search.
    """
    todo = list(_shapes())

    def step(number: int) -> None:
        from regard.seq2seq.decode.hypotheses import SearchOptions

        rows, words, beam, n_best = todo[number]
        texts = [" ".join([WORD] * words)] * rows
        options = SearchOptions(beam=beam)
        translator.translate(texts, search=options, n_best=n_best, hurry=hurry)
        done(number + 1, len(todo))

    return [functools.partial(step, number) for number in range(len(todo))]


def planes() -> list[Callable[[], None]]:
    """What compiles the attention of the page's first look at Scores."""

    def step(T: int, S: int, D: int) -> None:
        from regard.playground import attend_api
        from regard.playground.limits import Limits
        from regard.playground.requests import read_attend

        body = {"query": [[1.0] * D] * T, "key": [[1.0] * D] * S, "valid_len": S}
        attend_api.answer(read_attend(body, Limits()))

    return [functools.partial(step, *sizes) for sizes in PLANES]


def _shapes() -> Iterator[tuple[int, int, int, int]]:
    for (beam, n_best), shapes in PROGRAMS.items():
        for rows, words in shapes:
            yield rows, words, beam, n_best
