"""Many requests, one beam search.

Requests wait in a queue. A worker takes what has gathered within a few milliseconds, translates
it as one batch in a thread of its own, and gives each request back its own part. While a batch
is under way the next one gathers, so that the busier the server, the larger the batches.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from regard.playground.limits import Limits
from regard.playground.requests import Refusal, TranslateRequest

# texts, beam, how many of the best -> for each text its translations
Translate = Callable[[list[str], int, int], list[list[Any]]]


@dataclass
class Waiting:
    """A request in the queue."""

    request: TranslateRequest
    answer: asyncio.Future[list[list[Any]]]
    since: float = field(default_factory=time.monotonic)


class Batcher:
    """A queue in front of a translator.

    Args:
        translate: makes the translations; called from one thread, never twice at a time.
        limits: the queue's and the batch's.
        seen: told each batch's number of sentences and seconds.
    """

    def __init__(
        self,
        translate: Translate,
        limits: Limits,
        seen: Callable[[int, float], None] = lambda sentences, seconds: None,
    ) -> None:
        self.translate, self.limits, self.seen = translate, limits, seen
        self.waiting: list[Waiting] = []
        self.sentences = 0  # in the queue and in the batch under way
        self.closing = False
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="regard-translate")
        self._worker: asyncio.Task | None = None

    def start(self) -> None:
        """Begins to work; call it inside a running event loop."""
        self._worker = asyncio.create_task(self._work())

    async def stop(self) -> None:
        """Finishes what has been accepted, then ends."""
        self.closing = True
        self._arrived.set()
        if self._worker is not None:
            await self._worker
        self._thread.shutdown()

    async def ask(self, request: TranslateRequest) -> list[list[Any]]:
        """The translations of a request's texts.

        Raises:
            Refusal: 429 where the queue is full, 503 where it took too long or the server is
                going down.
        """
        if self.closing:
            raise Refusal(503, "the server is shutting down.", retry=5)
        count = len(request.text)
        if self.sentences + count > self.limits.queue:
            raise Refusal(
                429, f"{self.sentences} sentences are waiting, the queue is full.", retry=1
            )
        waiting = Waiting(request, asyncio.get_running_loop().create_future())
        self.waiting.append(waiting)
        self.sentences += count
        self._arrived.set()
        try:
            return await asyncio.wait_for(waiting.answer, self.limits.seconds)
        except TimeoutError:
            raise Refusal(
                503, f"no translation within {self.limits.seconds:g} seconds.", retry=5
            ) from None
        finally:
            self.sentences -= count

    async def _work(self) -> None:
        while not (self.closing and not self.waiting):
            if not self.waiting:
                self._arrived.clear()
                await self._arrived.wait()
                if not self.closing:
                    await asyncio.sleep(self.limits.gather)
                continue
            batch = self._take()
            if batch:
                await self._run(batch)

    def _take(self) -> list[Waiting]:
        """The oldest request and others that the same program translates, up to a batch's size."""
        # Whoever went away, or waited too long, is not worked for.
        self.waiting = [one for one in self.waiting if not one.answer.done()]
        taken: list[Waiting] = []
        left: list[Waiting] = []
        room = self.limits.batch
        for one in self.waiting:
            fits = not taken or (
                _program(one.request) == _program(taken[0].request)
                and len(one.request.text) <= room
            )
            (taken if fits else left).append(one)
            room -= len(one.request.text) if fits else 0
        self.waiting = left
        return taken

    async def _run(self, batch: list[Waiting]) -> None:
        texts = [text for one in batch for text in one.request.text]
        beam, n_best = _program(batch[0].request)
        began = time.perf_counter()
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._thread, self.translate, texts, beam, n_best)
        except Exception as error:  # one batch's failure is not the server's
            for one in batch:
                if not one.answer.done():
                    one.answer.set_exception(error)
            return
        self.seen(len(texts), time.perf_counter() - began)
        start = 0
        for one in batch:
            part = found[start : start + len(one.request.text)]
            start += len(one.request.text)
            if not one.answer.done():
                one.answer.set_result([best[: one.request.n_best] for best in part])


def _program(request: TranslateRequest) -> tuple[int, int]:
    """Beam and n_best of the compiled program that a request is for.

    The best one or the whole beam, nothing between, so that there are few programs. The two are
    kept apart because a search for one ends sooner, and so may find something else: what a
    request is answered must not depend on its company.
    """
    return request.beam, 1 if request.n_best == 1 else request.beam
