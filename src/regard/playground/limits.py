"""What one request may ask for, and how much the server takes on at a time."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds, each answered with a JSON error and the right status when it is passed.

    Attributes:
        body: bytes of a request (413).
        sentences: texts in one request (422).
        characters: of one text (422).
        beam: hypotheses kept alive (422).
        points: queries, and keys, of one `attend` request (422).
        width: numbers of one query or key (422).
        attends: `attend` requests that are worked on or wait for it (429).
        queue: sentences that wait; more are turned away (429).
        seconds: that a request may wait and be worked on (503).
        batch: sentences of one beam search.
        gather: seconds that a beam search waits for company.
    """

    body: int = 256 * 1024
    sentences: int = 64
    characters: int = 2000
    beam: int = 8
    points: int = 64
    width: int = 512
    attends: int = 64
    queue: int = 512
    seconds: float = 30.0
    batch: int = 64
    gather: float = 0.004
