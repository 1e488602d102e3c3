"""Load on `regard serve`, on this machine: is every reply its own, how fast, how much memory.

    python benchmarks/load.py                    200 clients for 60 s
    python benchmarks/load.py --mixed 20000      and then 20,000 mixed requests, watching the memory
    python benchmarks/load.py --record           write the numbers to results/playground

First every sentence is sent alone, one request at a time: for the speed, and for the replies that
the later ones are compared with. Then all clients send at once, as fast as they are answered, no
two of them the same sentence at the same time. The mixed requests are translations of every kind,
attention over points of random shapes, requests whose client hangs up, and hostile ones.
"""

import argparse
import asyncio
import collections
import dataclasses
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PATIENCE = 900  # seconds until the server must be ready; compiling takes most of them
NEAR_TIE = 0.02  # of a score: two translations that rounding may choose between
SETTLED = 5000  # mixed requests after which the memory must stay as it is
MOST_DRIFT = 5.0  # percent
EVERY = 500  # mixed requests between two readings of the memory
REGARD = "from regard.cli import main; main()"


@dataclasses.dataclass
class Crowd:
    """The results of many requests."""

    statuses: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    seconds: list[float] = dataclasses.field(default_factory=list)  # of those answered with 200
    taken: float = 0.0
    same: int = 0
    near_ties: int = 0  # the same sentence, another translation of nearly the same score
    wrong: list[str] = dataclasses.field(default_factory=list)  # sentences with another's reply
    lost: int = 0  # connections that ended without a reply

    def summary(self) -> dict[str, Any]:
        cuts = statistics.quantiles(self.seconds, n=100) if len(self.seconds) > 1 else [0.0] * 99
        return {
            "statuses": dict(self.statuses),
            "sentences_per_second": round(len(self.seconds) / self.taken, 2),
            "p50_ms": round(1000 * cuts[49], 1),
            "p95_ms": round(1000 * cuts[94], 1),
            "same_as_alone": self.same,
            "near_ties": self.near_ties,
            "mixed_up": len(self.wrong),
            "lost": self.lost,
        }


class Client:
    """One connection that is kept, HTTP/1.1: a library's client would cost more than the server."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        content = b"" if body is None else json.dumps(body).encode()
        return await self.send(head(method, path, len(content)) + content)

    async def send(self, request: bytes) -> tuple[int, Any]:
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.streams
        writer.write(request)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = re.search(r"content-length: (\d+)", answer)
        found = await reader.readexactly(int(length[1]) if length else 0)
        if "connection: close" in answer:
            self.close()
        is_json = "application/json" in answer
        return int(answer.split()[1]), json.loads(found) if is_json else found

    def close(self) -> None:
        if self.streams is not None:
            self.streams[1].close()
        self.streams = None


def head(method: str, path: str, length: int, **headers: str) -> bytes:
    headers = {"host": "127.0.0.1", "content-type": "application/json", **headers}
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    start = f"{method} {path} HTTP/1.1"
    return "\r\n".join([start, *lines, f"content-length: {length}", "", ""]).encode()


async def ask_alone(port: int, sentences: Sequence[str], beam: int) -> tuple[list[Any], Crowd]:
    """Every sentence by itself, one request at a time: replies, and how fast that was."""
    client, crowd, replies = Client(port), Crowd(), []
    began = time.perf_counter()
    for sentence in sentences:
        start = time.perf_counter()
        status, reply = await client.ask("POST", "/api/translate", {"text": sentence, "beam": beam})
        if status != 200:
            raise SystemExit(f"alone, {sentence!r} was answered {status}: {reply}")
        crowd.seconds.append(time.perf_counter() - start)
        crowd.statuses[status] += 1
        crowd.same += 1
        replies.append(reply["translations"][0][0])
    crowd.taken = time.perf_counter() - began
    client.close()
    return replies, crowd


async def ask_together(
    port: int, sentences: Sequence[str], alone: Sequence[Any], beam: int, clients: int, limit: float
) -> Crowd:
    """All clients at once until the time is up; each reply is compared with the one alone."""
    crowd = Crowd()
    numbers = itertools.cycle(range(len(sentences)))  # neighbors in time are never the same
    began = time.perf_counter()

    async def one() -> None:
        client = Client(port)
        while time.perf_counter() - began < limit:
            number = next(numbers)
            start = time.perf_counter()
            try:
                body = {"text": sentences[number], "beam": beam}
                status, reply = await client.ask("POST", "/api/translate", body)
            except (OSError, EOFError):
                crowd.lost += 1
                client.close()
                continue
            crowd.statuses[status] += 1
            if status == 200:
                crowd.seconds.append(time.perf_counter() - start)
                compare(crowd, reply["translations"][0][0], alone[number], sentences[number])
            else:
                await asyncio.sleep(1)
        client.close()

    await asyncio.gather(*(one() for _ in range(clients)))
    crowd.taken = time.perf_counter() - began
    return crowd


def compare(crowd: Crowd, reply: Any, alone: Any, sentence: str) -> None:
    """Sorts a reply: the same as alone, a near tie that rounding decided, or someone else's."""
    if reply["source_words"] != alone["source_words"]:
        crowd.wrong.append(sentence)
    elif reply["text"] == alone["text"]:
        crowd.same += 1
    elif abs(reply["score"] - alone["score"]) < NEAR_TIE:
        crowd.near_ties += 1
    else:
        crowd.wrong.append(sentence)


async def ask_mixed(
    port: int, pid: int, sentences: Sequence[str], alone: Sequence[Any], count: int, clients: int
) -> dict[str, Any]:
    """Mixed requests from several clients; the memory after every few hundred of them."""
    rng, numbers = random.Random(0), iter(range(count))
    kinds: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    memory, wrong, began = [resident(pid)], [], time.perf_counter()

    async def one() -> None:
        client = Client(port)
        for number in numbers:
            kind = rng.choices(list(MIX), [share for share, _ in MIX.values()])[0]
            try:
                outcome = await MIX[kind][1](client, rng, sentences, alone)
            except (OSError, EOFError, asyncio.LimitOverrunError):
                client.close()
                outcome = "closed"
            kinds[kind][outcome] += 1
            if outcome == "wrong" or outcome == 500:
                wrong.append(f"{kind}: {outcome}")
            if (number + 1) % EVERY == 0:
                memory.append(resident(pid))
                say(f"{number + 1} requests, {memory[-1]:.0f} MiB")
        client.close()

    await asyncio.gather(*(one() for _ in range(clients)))
    taken = time.perf_counter() - began
    return {
        "requests": count,
        "clients": clients,
        "seconds": round(taken, 1),
        "outcomes": {kind: {str(k): v for k, v in kinds[kind].items()} for kind in MIX},
        "wrong": wrong[:5],
        "memory_mib": [round(sample, 1) for sample in memory],
        "drift_percent": drift(memory),
    }


async def ask_translation(client: Client, rng: random.Random, sentences: Any, alone: Any) -> Any:
    """One to four sentences with any settings; each reply must be of its own sentence."""
    beam = rng.choice([1, 3, 5, 5, 5, 8])
    chosen = [rng.randrange(len(sentences)) for _ in range(rng.choice([1, 1, 1, 2, 4]))]
    body = {"text": [sentences[number] for number in chosen], "beam": beam}
    body |= {"n_best": rng.randint(1, beam), "weights": rng.random() < 0.3}
    if len(chosen) == 1:
        body["next_words"] = rng.choice([0, 0, 5])
    status, reply = await client.ask("POST", "/api/translate", body)
    if status in (429, 503):
        await asyncio.sleep(0.5)
    if status != 200:
        return status
    own = all(
        best[0]["source_words"] == alone[number]["source_words"]
        for number, best in zip(chosen, reply["translations"], strict=True)
    )
    return status if own else "wrong"


async def ask_attend(client: Client, rng: random.Random, *_: Any) -> Any:
    """Points of any number and width, any score and regime."""
    T, S, D = rng.randint(1, 64), rng.randint(1, 64), rng.choice([1, 2, 2, 2, 3, 17, 64])
    V = rng.randint(1, 4)

    def points(count: int, width: int) -> list[list[float]]:
        return [[round(rng.gauss(0, 1), 3) for _ in range(width)] for _ in range(count)]

    body = {"query": points(T, D), "key": points(S, D), "value": points(S, V)}
    body["score"] = rng.choice(["dot", "gaussian", "bilinear", "additive"])
    body["regime"] = rng.choice(["softmax", "sparsemax", "kernel", "cone", "hard", "uniform"])
    body |= {"causal": rng.random() < 0.3, "valid_len": rng.randint(0, S)}
    body["temperature"] = round(rng.uniform(0.1, 3), 2)
    status, reply = await client.ask("POST", "/api/attend", body)
    if status != 200:
        return status
    own = len(reply["weights"]) == T and all(len(row) == S for row in reply["weights"])
    return status if own and len(reply["output"][0]) == V else "wrong"


async def hang_up(client: Client, rng: random.Random, sentences: Any, _: Any) -> Any:
    """Sends a request and closes the connection before the answer can come."""
    body = {"text": rng.sample(sentences, rng.choice([1, 8])), "beam": rng.choice([5, 8])}
    content = json.dumps(body).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", client.port)
    writer.write(head("POST", "/api/translate", len(content)) + content)
    await asyncio.sleep(rng.random() * 0.05)
    writer.close()
    return "hung up"


async def attack(client: Client, rng: random.Random, *_: Any) -> Any:
    """What must be refused with a status below 500."""
    texts: list[Any] = [["a. " * 600] * 16, ["x" * 1999] * 64, "-le" * 600, "\ud800", "🦆" * 1500]
    bodies = [json.dumps({"text": text, "n_best": 5, "weights": True}) for text in texts]
    bodies += ['{"text": "a", "\\ud800": 1}', "[" * 100_000, "{", "null", "9" * 9999]
    bodies += ['{"query": [[1e400]], "key": [[0]]}', '{"query": [[NaN]], "key": [[1]]}']
    content = rng.choice(bodies).encode()
    path = rng.choice(["/api/translate", "/api/attend", "/nowhere", "/../etc/passwd"])
    given = rng.choice(
        [{}, {}, {"origin": "http://evil.example"}, {"content_type": "text/plain"}, {"host": "x"}]
    )
    return (await client.send(head("POST", path, len(content), **given) + content))[0]


MIX = {
    "translations": (0.5, ask_translation),
    "attention": (0.25, ask_attend),
    "hung up": (0.1, hang_up),
    "hostile": (0.15, attack),
}


def resident(pid: int) -> float:
    """A process's resident memory in MiB."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) / 1024  # type: ignore[index]


def drift(memory: Sequence[float]) -> float | None:
    """Percent by which the memory changed from request 5,000 to the end, over 1,000 requests each.

    None where there were too few requests to tell.
    """
    settled, few = SETTLED // EVERY, 1000 // EVERY
    if len(memory) <= settled + few:
        return None
    start, end = memory[settled : settled + few], memory[-few:]
    return round(100 * (statistics.mean(end) / statistics.mean(start) - 1), 2)


async def measure(options: argparse.Namespace, port: int, pid: int) -> dict[str, Any]:
    sentences = distinct_sentences(max(options.sentences, 2 * options.clients))
    say(f"alone: {len(sentences)} sentences, one request at a time ...")
    alone, one = await ask_alone(port, sentences, options.beam)
    say(f"together: {options.clients} clients for {options.seconds:g} s ...")
    given = (port, sentences, alone, options.beam, options.clients)
    many = await ask_together(*given, options.seconds)
    result: dict[str, Any] = {"alone": one.summary(), "together": many.summary()}
    speeds = [result[kind]["sentences_per_second"] for kind in ("together", "alone")]
    result["gain"] = round(speeds[0] / speeds[1], 2)
    result["mixed_up"] = many.wrong[:5]
    if options.mixed:
        say(f"mixed: {options.mixed} requests ...")
        clients = min(options.clients, 32)
        mixed = await ask_mixed(port, pid, sentences, alone, options.mixed, clients)
        result["mixed"] = mixed
    return result


def distinct_sentences(count: int) -> list[str]:
    from regard.seq2seq.corpus import Grammar

    found = list(dict.fromkeys(pair.source for pair in Grammar(3 * count, "test")))
    return found[:count]


async def ready(port: int) -> float:
    """Waits until the server has compiled; returns the seconds."""
    began = time.perf_counter()
    while time.perf_counter() - began < PATIENCE:
        client = Client(port)
        status, state = await client.ask("GET", "/healthz")
        client.close()
        if status == 200 and not state["compiling"]:
            return time.perf_counter() - began
        await asyncio.sleep(0.5)
    raise SystemExit(f"the server was not ready within {PATIENCE} seconds.")


def start(model: Path | None) -> tuple[subprocess.Popen, int]:
    """`regard serve` on a free port."""
    named = [] if model is None else ["--model", str(model)]
    server = subprocess.Popen(
        [sys.executable, "-c", REGARD, "serve", "--port", "0", *named],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    for line in server.stderr:
        say(f"server: {line.rstrip()}")
        if found := re.search(r"http://127\.0\.0\.1:(\d+)/", line):
            return server, int(found[1])
    raise SystemExit(f"regard serve ended with status {server.wait()}.")


def table(result: dict[str, Any]) -> str:
    kinds = ["alone", "together"]
    rows = [["", *kinds]]
    for name in result["alone"]:
        shown = [result[kind][name] for kind in kinds]
        rows.append([name.replace("_", " "), *(json.dumps(one).strip("{}") for one in shown)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    lines.append(f"\nready after {result['ready_s']} s; batching gains {result['gain']}×")
    if "mixed" in result:
        lines += [f"{kind}: {found}" for kind, found in result["mixed"]["outcomes"].items()]
        lines.append(f"memory after request {SETTLED}: {result['mixed']['drift_percent']} %")
    return "\n".join(lines)


def record(result: dict[str, Any], before: float) -> Path:
    """Writes the numbers, with the machine that they were measured on."""
    from regard.bench.results.record import write_script_record

    folder = Path(__file__).parent / "results" / "playground"
    return write_script_record("load", {"load_before": before, **result}, folder)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a model's folder; default: the bundled one")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--sentences", type=int, default=400, help="distinct ones")
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("--mixed", type=int, default=0, metavar="REQUESTS", help="20000: the soak")
    parser.add_argument("--record", action="store_true", help="write results/playground/*.json")
    options = parser.parse_args()
    before = os.getloadavg()[0]
    server, port = start(options.model)
    try:
        seconds = asyncio.run(ready(port))
        result = asyncio.run(measure(options, port, server.pid))
        result["ready_s"] = round(seconds, 1)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
    print(table(result))
    if options.record:
        say(f"wrote {record(result, before)}")
    if result["together"]["mixed_up"] or result["together"]["lost"]:
        raise SystemExit("a reply was lost or mixed up: see the table.")
    mixed = result.get("mixed", {"wrong": [], "drift_percent": None})
    if mixed["wrong"] or abs(mixed["drift_percent"] or 0) > MOST_DRIFT:
        raise SystemExit(f"mixed requests: wrong {mixed['wrong']}, or the memory drifts.")


if __name__ == "__main__":
    main()
