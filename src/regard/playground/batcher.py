"""Puts requests that arrive at the same time into one beam search.

Requests wait in a queue. A worker takes those that fit into one batch, has it translated in a
thread of its own, and hands each request its own part. While a batch runs the next one collects,
so that batches grow with the load. A batch whose clients have all gone is abandoned.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from regard.playground.requests import Limits, Refusal, TranslateRequest


class Abandoned(Exception):
    """Raised inside a translation when no client waits for its result any more."""


# Requests that one compiled search serves, and a function to call now and then, which raises
# Abandoned when the work is no longer wanted -> the answer to each request.
Translate = Callable[[Sequence[TranslateRequest], Callable[[], None]], list[Any]]


@dataclass
class Waiting:
    """A request in the queue, and how many tokens its texts have."""

    request: TranslateRequest
    tokens: int
    answer: asyncio.Future[Any]


class Batcher:
    """A queue in front of a translator.

    Args:
        translate: makes the answers; called from one thread, never twice at a time.
        limits: the queue's and the batch's.
        seen: called with each batch's number of sentences, its seconds, and whether it was
            abandoned.
    """

    def __init__(
        self,
        translate: Translate,
        limits: Limits,
        seen: Callable[[int, float, bool], None] = lambda sentences, seconds, abandoned: None,
    ) -> None:
        self.translate, self.limits, self.seen = translate, limits, seen
        self.waiting: list[Waiting] = []
        self.sentences = 0  # in the queue and in the batch that runs
        self.closing = False
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="regard-translate")
        self._worker: asyncio.Task | None = None

    def start(self) -> None:
        """Begins to work; call it inside a running event loop."""
        self._worker = asyncio.create_task(self._work())

    async def stop(self) -> None:
        """Finishes the accepted requests, then ends."""
        self.closing = True
        self._arrived.set()
        if self._worker is not None:
            await self._worker
        self._thread.shutdown()

    async def ask(self, request: TranslateRequest, tokens: int = 0) -> Any:
        """The answer to a request. Cancelling this call withdraws the request.

        Args:
            request: what to translate.
            tokens: of all its texts.

        Raises:
            Refusal: 429 where the queue is full, 503 where it took too long or the server is
                shutting down.
        """
        if self.closing:
            raise Refusal(503, "the server is shutting down.", retry=5)
        count = len(request.text)
        if self.sentences + count > self.limits.queue:
            raise Refusal(
                429, f"{self.sentences} sentences are waiting, the queue is full.", retry=1
            )
        waiting = Waiting(request, tokens, asyncio.get_running_loop().create_future())
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
            if batch := self._take():
                await self._run(batch)

    def _take(self) -> list[Waiting]:
        """The oldest request, and others that the same program serves, up to a batch's size."""
        # Requests whose client has gone, or waited too long, are dropped.
        self.waiting = [one for one in self.waiting if not one.answer.done()]
        taken: list[Waiting] = []
        left: list[Waiting] = []
        sentences, tokens = self.limits.batch, self.limits.tokens
        for one in self.waiting:
            fits = not taken or (
                one.request.program == taken[0].request.program
                and len(one.request.text) <= sentences
                and one.tokens <= tokens
            )
            (taken if fits else left).append(one)
            if fits:
                sentences -= len(one.request.text)
                tokens -= one.tokens
        self.waiting = left
        return taken

    async def _run(self, batch: list[Waiting]) -> None:
        def check() -> None:  # called from the worker's thread
            if all(one.answer.done() for one in batch):
                raise Abandoned

        sentences, began = sum(len(one.request.text) for one in batch), time.perf_counter()
        asked, abandoned = [one.request for one in batch], False
        loop = asyncio.get_running_loop()
        try:
            answers = await loop.run_in_executor(self._thread, self.translate, asked, check)
            for one, answer in zip(batch, answers, strict=True):
                if not one.answer.done():
                    one.answer.set_result(answer)
        except Abandoned:
            abandoned = True
        except Exception as error:
            if len(batch) > 1:  # by itself, each request can only fail itself
                for one in batch:
                    if not one.answer.done():
                        await self._run([one])
            elif not batch[0].answer.done():
                batch[0].answer.set_exception(error)
            return
        self.seen(sentences, time.perf_counter() - began, abandoned)
