"""A stand-in for a model, so that these tests are about the server and the page."""

import contextlib
import threading
import time
import types
from dataclasses import dataclass

import numpy as np

from regard.seq2seq.decode.layers import LayerWeights


@dataclass(frozen=True)
class Said:
    """The parts of a `Translation` that the server reads."""

    text: str
    score: float
    source_words: tuple[str, ...]
    target_words: tuple[str, ...]
    weights: np.ndarray
    note: str = ""


class Reverser:
    """Translates by writing the words backwards; deterministic, and its alignment is known.

    Args:
        seconds: that one call takes.
        open_door: a call waits for this event, so that a test decides when it ends.
    """

    def __init__(self, seconds: float = 0.0, open_door: threading.Event | None = None) -> None:
        self.seconds, self.open_door = seconds, open_door
        self.tokenizers = types.SimpleNamespace(source=Words(), target=Words())
        self.calls: list[tuple[int, int, int]] = []  # sentences, beam, n_best
        self.hurries: list[bool | None] = []
        self.started = threading.Event()

    def translate(self, texts, *, search, n_best=1, hurry=None, progress=None, **settings):
        self.started.set()
        self.calls.append((len(texts), search.beam, n_best))
        self.hurries.append(hurry)
        time.sleep(self.seconds)
        if self.open_door is not None:
            assert self.open_door.wait(20), "the test forgot the door"
        if progress is not None:
            progress(1, 1)
        if any("BROKEN" in text for text in texts):
            raise RuntimeError("this model cannot do that")
        return [[said(text, k) for k in range(n_best)] for text in texts]

    def next_words(self, text, translations, count):
        """The word itself with 0.9, then the source's other words; "" stands for the end."""
        listed = []
        for one in translations:
            words = [[word, *one.source_words] for word in (*one.target_words, "")]
            ranked = [list(dict.fromkeys(some))[:count] for some in words]
            shares = (0.9, *[0.01] * count)
            listed.append([list(zip(some, shares, strict=False)) for some in ranked])
        return listed

    def layers(self, source, target):
        """Two layers of three heads; in layer 1, head 2, each word looks at its own place."""
        found = {}
        sides = dict(encoder=(source, source), decoder=(target, target), cross=(target, source))
        for name, side in sides.items():
            rows, columns = (text.split() for text in side)
            weights = np.full((2, 3, len(rows), len(columns)), 1 / max(len(columns), 1))
            weights[1, 2] = np.eye(len(rows), len(columns))
            found[name] = LayerWeights(weights, tuple(rows), tuple(columns))
        return found


class Words:
    """A tokenizer whose tokens are words."""

    def encode(self, text):
        words = tuple(text.split())
        return types.SimpleNamespace(ids=words, words=words)

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]


def said(text: str, k: int = 0) -> Said:
    """The k-th best translation of a text: backwards, and turned by k words."""
    words = text.split()
    target = words[::-1][k % max(len(words), 1) :] + words[::-1][: k % max(len(words), 1)]
    S = len(words)
    weights = np.full((S, S), 0.2 / max(S - 1, 1))
    for row, word in enumerate(target):
        weights[row, words.index(word)] = 0.8
    return Said(" ".join(target), -0.1 - 0.3 * k, tuple(words), tuple(target), weights)


@contextlib.contextmanager
def served(app, **options):
    """The app behind uvicorn, in a thread, on a free port of this machine; yields the address."""
    import uvicorn

    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, log_level="error", lifespan="on", ws="none", **options
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        for _ in range(1000):
            if server.started:
                break
            time.sleep(0.01)
        assert server.started, "uvicorn did not start"
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)
