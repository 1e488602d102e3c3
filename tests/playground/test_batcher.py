"""Many requests, one search: nobody gets another's answer, and nobody waits for nothing."""

import asyncio
import contextlib
import random
import threading
import time

import pytest

from regard.playground.batcher import Batcher
from regard.playground.limits import Limits
from regard.playground.requests import Refusal, TranslateRequest


class Upper:
    """Shouts: the k-th best translation of "a" with beam 5 is "A/5/k"."""

    def __init__(self, seconds=0.0, door=None):
        self.seconds, self.door, self.calls = seconds, door, []

    def __call__(self, texts, beam, n_best):
        self.calls.append((list(texts), beam, n_best))
        time.sleep(self.seconds)
        if self.door is not None:
            assert self.door.wait(20)
        if "broken" in texts:
            raise RuntimeError("this batch fails")
        return [[f"{text.upper()}/{beam}/{k}" for k in range(n_best)] for text in texts]


@contextlib.asynccontextmanager
async def working(translate, **limits):
    batcher = Batcher(translate, Limits(**limits))
    batcher.start()
    yield batcher
    await batcher.stop()


def expected(request):
    return [[f"{text.upper()}/{request.beam}/{k}" for k in range(request.n_best)]
            for text in request.text]  # fmt: skip


async def gone_in(batcher, count):
    """Waits until so many sentences are in the queue."""
    for _ in range(1000):
        if batcher.sentences == count:
            return
        await asyncio.sleep(0.002)
    raise AssertionError(f"{batcher.sentences} sentences came, not {count}")


def test_each_answer_is_of_its_own_request():
    rng = random.Random(4)
    requests = []
    for number in range(300):
        beam = rng.choice([1, 3, 5])
        texts = tuple(f"s{number}-{i}" for i in range(rng.randint(1, 5)))
        requests.append(TranslateRequest(texts, beam, rng.randint(1, beam)))
    translate = Upper(seconds=0.001)

    async def run():
        async def late(batcher, request):
            await asyncio.sleep(rng.random() * 0.2)
            return await batcher.ask(request)

        async with working(translate, queue=2000) as batcher:
            return await asyncio.gather(*(late(batcher, one) for one in requests))

    for request, answer in zip(requests, asyncio.run(run()), strict=True):
        assert answer == expected(request)
    # And they did share: fewer searches than requests, each within its size, none of two kinds.
    assert len(translate.calls) < 150
    assert max(len(texts) for texts, _, _ in translate.calls) <= Limits().batch
    assert {(beam, n) for _, beam, n in translate.calls} <= {(1, 1), (3, 1), (3, 3), (5, 1), (5, 5)}
    assert sorted(text for texts, _, _ in translate.calls for text in texts) == sorted(
        text for one in requests for text in one.text
    )


def test_what_comes_during_a_search_is_the_next_one():
    door = threading.Event()
    translate = Upper(door=door)

    async def run():
        async with working(translate) as batcher:
            first = asyncio.create_task(batcher.ask(TranslateRequest(("first",))))
            while not translate.calls:
                await asyncio.sleep(0.002)
            rest = [
                asyncio.create_task(batcher.ask(TranslateRequest((f"t{i}",)))) for i in range(20)
            ]
            await gone_in(batcher, 21)
            door.set()
            await asyncio.gather(first, *rest)

    asyncio.run(run())
    assert [len(texts) for texts, _, _ in translate.calls] == [1, 20]


def test_a_full_queue_turns_away_and_has_room_again():
    door = threading.Event()

    async def run():
        async with working(Upper(door=door), queue=4) as batcher:
            waiting = asyncio.create_task(batcher.ask(TranslateRequest(("a", "b", "c"))))
            await gone_in(batcher, 3)
            with pytest.raises(Refusal, match="3 sentences are waiting, the queue is full") as full:
                await batcher.ask(TranslateRequest(("d", "e")))
            door.set()
            await waiting
            assert await batcher.ask(TranslateRequest(("d", "e"))) == [["D/5/0"], ["E/5/0"]]
            assert batcher.sentences == 0
        return full.value

    refusal = asyncio.run(run())
    assert (refusal.status, refusal.retry) == (429, 1)


def test_who_waits_too_long_is_told_and_not_worked_for():
    door = threading.Event()
    translate = Upper(door=door)

    async def run():
        async with working(translate, seconds=0.05) as batcher:
            under_way = asyncio.create_task(batcher.ask(TranslateRequest(("a",))))
            while not translate.calls:
                await asyncio.sleep(0.002)
            with pytest.raises(Refusal, match=r"no translation within 0\.05 seconds") as late:
                await batcher.ask(TranslateRequest(("never",)))
            with pytest.raises(Refusal):
                await under_way
            door.set()
            assert await batcher.ask(TranslateRequest(("b",))) == [["B/5/0"]]
        return late.value

    assert asyncio.run(run()).status == 503
    assert [texts for texts, _, _ in translate.calls] == [["a"], ["b"]]


def test_one_failure_is_not_the_next_ones():
    async def run():
        async with working(Upper()) as batcher:
            with pytest.raises(RuntimeError, match="this batch fails"):
                await batcher.ask(TranslateRequest(("broken",)))
            assert await batcher.ask(TranslateRequest(("fine",))) == [["FINE/5/0"]]

    asyncio.run(run())


def test_the_end_finishes_what_was_accepted_and_refuses_the_rest():
    door = threading.Event()
    translate = Upper(door=door)

    async def run():
        batcher = Batcher(translate, Limits(batch=2))
        batcher.start()
        asked = [asyncio.create_task(batcher.ask(TranslateRequest((f"t{i}",)))) for i in range(7)]
        await gone_in(batcher, 7)
        ending = asyncio.create_task(batcher.stop())
        await asyncio.sleep(0)
        with pytest.raises(Refusal, match="shutting down") as refused:
            await batcher.ask(TranslateRequest(("late",)))
        door.set()
        await ending
        return refused.value, await asyncio.gather(*asked)

    refusal, answers = asyncio.run(run())
    assert refusal.status == 503
    assert answers == [[[f"T{i}/5/0"]] for i in range(7)]
    assert len(translate.calls) == 4


def test_a_batch_takes_the_oldest_first():
    async def run():
        translate = Upper()
        batcher = Batcher(translate, Limits(batch=3))
        sizes = [2, 2, 1, 3, 1]
        asked = [
            asyncio.create_task(batcher.ask(TranslateRequest(tuple(f"{i}{j}" for j in range(n)))))
            for i, n in enumerate(sizes)
        ]
        await gone_in(batcher, sum(sizes))
        batcher.start()
        await asyncio.gather(*asked)
        await batcher.stop()
        return [sorted({text[0] for text in texts}) for texts, _, _ in translate.calls]

    assert asyncio.run(run()) == [["0", "2"], ["1", "4"], ["3"]]
