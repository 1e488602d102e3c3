"""Requests that share a search: each gets its own answer, and abandoned work is dropped."""

import asyncio
import contextlib
import random
import threading
import time

import pytest

from regard.playground.batcher import Batcher
from regard.playground.requests import Limits, Refusal, TranslateRequest


class Upper:
    """Shouts: the k-th best translation of "a" with beam 5 is "A/5/k"."""

    def __init__(self, seconds=0.0, door=None):
        self.seconds, self.door, self.calls = seconds, door, []

    def __call__(self, requests, check):
        texts = [text for one in requests for text in one.text]
        (beam, n_best), *others = {one.program for one in requests}
        assert not others, "all requests of a batch have one program"
        self.calls.append((texts, beam, n_best))
        time.sleep(self.seconds)
        if self.door is not None:
            assert self.door.wait(20)
        check()
        if "broken" in texts:
            raise RuntimeError("this batch fails")
        return [expected(one) for one in requests]


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
        beam = rng.choice([1, 3, 5, 8])
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
    assert len(translate.calls) < 220
    assert max(len(texts) for texts, _, _ in translate.calls) <= Limits().batch
    assert {(beam, n) for _, beam, n in translate.calls} <= {
        (1, 1), (3, 1), (3, 3), (5, 1), (5, 5), (8, 1), (8, 8)
    }  # fmt: skip
    assert sorted(text for texts, _, _ in translate.calls for text in texts) == sorted(
        text for one in requests for text in one.text
    )


def test_requests_that_arrive_during_a_search_are_the_next_batch():
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


def test_a_full_queue_refuses_and_has_room_again():
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


def test_a_request_that_waited_too_long_is_refused_and_dropped():
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


def test_the_request_after_a_failure_succeeds():
    async def run():
        async with working(Upper()) as batcher:
            with pytest.raises(RuntimeError, match="this batch fails"):
                await batcher.ask(TranslateRequest(("broken",)))
            assert await batcher.ask(TranslateRequest(("fine",))) == [["FINE/5/0"]]

    asyncio.run(run())


def test_a_request_that_fails_does_not_fail_the_others_in_its_batch():
    async def run():
        batcher = Batcher(Upper(), Limits())
        asked = [
            asyncio.create_task(batcher.ask(TranslateRequest((text,))))
            for text in ("a", "broken", "b")
        ]
        await gone_in(batcher, 3)
        batcher.start()
        results = await asyncio.gather(*asked, return_exceptions=True)
        await batcher.stop()
        return results, batcher.translate.calls

    (first, failed, last), calls = asyncio.run(run())
    assert (first, last) == ([["A/5/0"]], [["B/5/0"]])
    assert isinstance(failed, RuntimeError)
    assert [texts for texts, _, _ in calls] == [["a", "broken", "b"], ["a"], ["broken"], ["b"]]


def test_a_batch_that_no_caller_waits_for_is_abandoned():
    door, seen = threading.Event(), []
    translate = Upper(door=door)

    async def run():
        batcher = Batcher(translate, Limits(), lambda *told: seen.append(told))
        batcher.start()
        asked = [asyncio.create_task(batcher.ask(TranslateRequest((t,)))) for t in "abc"]
        while not translate.calls:
            await asyncio.sleep(0.002)
        for one in asked:
            one.cancel()
        await gone_in(batcher, 0)
        door.set()
        assert await batcher.ask(TranslateRequest(("d",))) == [["D/5/0"]]
        await batcher.stop()

    asyncio.run(run())
    assert [(sentences, abandoned) for sentences, _, abandoned in seen] == [(3, True), (1, False)]


def test_a_batch_goes_on_while_one_client_waits():
    door, seen = threading.Event(), []
    translate = Upper(door=door)

    async def run():
        batcher = Batcher(translate, Limits(), lambda *told: seen.append(told))
        batcher.start()
        asked = [asyncio.create_task(batcher.ask(TranslateRequest((t,)))) for t in "ab"]
        while not translate.calls:
            await asyncio.sleep(0.002)
        asked[0].cancel()
        door.set()
        assert await asked[1] == [["B/5/0"]]
        await batcher.stop()

    asyncio.run(run())
    assert [abandoned for _, _, abandoned in seen] == [False]


def test_a_cancelled_request_leaves_the_queue():
    door = threading.Event()
    translate = Upper(door=door)

    async def run():
        async with working(translate, queue=400) as batcher:
            running = asyncio.create_task(batcher.ask(TranslateRequest(("first",))))
            while not translate.calls:
                await asyncio.sleep(0.002)
            gone = [
                asyncio.create_task(batcher.ask(TranslateRequest((f"t{i}",)))) for i in range(308)
            ]
            await gone_in(batcher, 309)
            for one in gone:
                one.cancel()
            await gone_in(batcher, 1)
            door.set()
            await running

    asyncio.run(run())
    assert [texts for texts, _, _ in translate.calls] == [["first"]]


def test_a_batch_has_a_bound_on_its_tokens():
    async def run():
        translate = Upper()
        batcher = Batcher(translate, Limits(tokens=100))
        sizes = [60, 50, 40, 100, 1]
        asked = [
            asyncio.create_task(batcher.ask(TranslateRequest((str(i),)), tokens))
            for i, tokens in enumerate(sizes)
        ]
        await gone_in(batcher, len(sizes))
        batcher.start()
        await asyncio.gather(*asked)
        await batcher.stop()
        return [texts for texts, _, _ in translate.calls]

    assert asyncio.run(run()) == [["0", "2"], ["1", "4"], ["3"]]


def test_shutting_down_finishes_accepted_requests_and_refuses_others():
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
