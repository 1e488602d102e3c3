"""What the server asks of a translator: answers as JSON, and programs compiled ahead.

The alignment of a hypothesis is returned as 16-bit integers in base64: a tenth of the size of
JSON numbers, and an array at every step on its way.
"""

import base64
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from regard.playground.requests import BEAM, LayersRequest, Limits, Refusal, TranslateRequest
from regard.seq2seq.decode.hypotheses import SearchOptions

STEPS = 65535  # a weight of 1

# The programs that are compiled before the first request: beam and n_best, and for each the shapes,
# as sentences and words of each. The API's default comes in batches of many sizes. A translator
# uses a larger shape that is already compiled rather than a new one, so that these shapes serve
# them all. Every other program has whole batches only, one shape for each width: few are compiled,
# whatever clients ask. The page asks for one sentence and the whole beam.
WORD = "the"  # common enough to be one token of any English vocabulary
MANY = ((1, 28), (1, 60), (8, 12), (8, 28), (64, 12), (32, 28), (16, 60), (8, 90))
PROGRAMS = {(BEAM, BEAM): ((1, 12), (1, 28), (1, 60), (1, 90)), (BEAM, 1): MANY}
SMALL = 128  # tokens of a batch of the other programs


def _settings(program: tuple[int, int], hurry: bool | None) -> dict[str, Any]:
    beam, n_best = program
    found: dict[str, Any] = dict(search=SearchOptions(beam=beam), n_best=n_best, hurry=hurry)
    if program != (BEAM, 1):
        found |= dict(whole_batches=True, batch_tokens=SMALL)
    return found


def answers(
    translator: Any,
    requests: Sequence[TranslateRequest],
    check: Callable[[], None],
    hurry: bool | None,
) -> list[list[list[dict[str, Any]]]]:
    """For each request, for each of its texts, the n best translations as JSON objects.

    Args:
        translator: a `regard.seq2seq.translator.Translator`.
        requests: all of one program.
        check: called between parts of the work; what it raises ends the work.
        hurry: see `Translator.translate`.
    """
    texts = [text for one in requests for text in one.text]
    settings = _settings(requests[0].program, hurry)
    found = iter(translator.translate(texts, progress=lambda done, of: check(), **settings))
    result = []
    for request in requests:
        check()
        best = [next(found)[: request.n_best] for _ in request.text]
        objects = [[_object(one, request.weights) for one in some] for some in best]
        if request.next_words:
            (text,), (some,) = request.text, best
            listed = translator.next_words(text, some, request.next_words)
            for one, words in zip(objects[0], listed, strict=True):
                one["next_words"] = [
                    [[word, round(share, 4)] for word, share in some] for some in words
                ]
        result.append(objects)
    return result


def layers(translator: Any, request: LayersRequest, limits: Limits) -> dict[str, Any]:
    """The JSON of /api/layers: the weights of every layer and head, between tokens.

    Raises:
        Refusal: a side has too many tokens.
    """
    tokenizers = translator.tokenizers
    sides = (tokenizers.source, request.source), (tokenizers.target, request.target)
    longest = max(len(tokenizer.encode(text).ids) for tokenizer, text in sides)
    if longest > limits.layer_tokens:
        raise Refusal(
            422, f"source and target have at most {limits.layer_tokens} tokens. Got {longest}."
        )
    found = translator.layers(request.source, request.target)
    return {
        "maps": {
            name: {
                "queries": list(one.query_labels),
                "keys": list(one.key_labels),
                **packed(one.weights),
            }
            for name, one in found.items()
        }
    }


def _object(one: Any, weights: bool) -> dict[str, Any]:
    score = float(one.score)
    found = {
        "text": one.text,
        "score": round(score, 4) if abs(score) < 1e30 else None,  # JSON has no infinity
        "source_words": list(one.source_words),
        "target_words": list(one.target_words),
    }
    if weights:
        found["weights"] = packed(one.weights)
    return found


def packed(weights: np.ndarray) -> dict[str, Any]:
    """Weights from 0 to 1 as little-endian 16-bit integers in base64, 65535 for 1.

    Example:
        >>> packed(np.array([[1.0, 0.0]]))
        {'shape': [1, 2], 'data': '//8AAA=='}
    """
    steps = np.rint(np.clip(weights, 0.0, 1.0) * STEPS).astype("<u2")
    return {"shape": list(steps.shape), "data": base64.b64encode(steps.tobytes()).decode("ascii")}


def steps(
    translator: Any, done: Callable[[int, int], None], *, hurry: bool
) -> list[Callable[[], None]]:
    """Functions that compile the translator's programs, one shape each.

    The programs are compiled twice: at a low optimization level, so that the first visitor need
    not wait long, and then with all optimizations.

    Example:
        >>> class Silent:
        ...     def translate(self, texts, **settings):
        ...         return [[] for _ in texts]
        >>> count = lambda done, of: print(f"{done} of {of}", end="; ")
        >>> todo = steps(Silent(), count, hurry=False)
        >>> for step in todo[:3]:
        ...     step()
        1 of 12; 2 of 12; 3 of 12;

    Args:
        translator: a `Translator`.
        done: called with how many shapes are compiled, and of how many.
        hurry: whether to compile at a low optimization level: a third of the time to compile, and
            three times the time of a search.
    """
    shapes = [(*shape, program) for program, some in PROGRAMS.items() for shape in some]
    todo: list[Callable[[], None]] = [
        functools.partial(_search, translator, *shape, hurry=hurry) for shape in shapes
    ]
    if hurry:  # these are compiled once only
        todo += [functools.partial(_next_words, translator, words) for words in (20, 50)]

    def step(number: int) -> None:
        todo[number]()
        done(number + 1, len(todo))

    return [functools.partial(step, number) for number in range(len(todo))]


def _search(translator: Any, rows: int, words: int, program: tuple[int, int], hurry: bool) -> None:
    translator.translate([" ".join([WORD] * words)] * rows, **_settings(program, hurry))


def _next_words(translator: Any, words: int) -> None:
    text = " ".join([WORD] * words)
    given = types.SimpleNamespace(text=text, target_words=(WORD,) * words)
    translator.next_words(text, [given], 1)
