"""Load on `regard serve`, on this machine: is every reply its own, how fast, how much memory.

    python benchmarks/load.py                    200 clients for 60 s
    python benchmarks/load.py --soak 10          and then ten minutes, watching the memory
    python benchmarks/load.py --record           the numbers, to keep, in results/playground

First every sentence is asked for alone, one request at a time: that is the speed to compare with,
and the replies that the crowd's are compared with. Then all clients ask at once, as fast as they
are answered, no two of them for the same sentence at the same time.
"""

import argparse
import asyncio
import collections
import dataclasses
import itertools
import json
import os
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
EVERY = 10  # seconds between two looks at the memory
REGARD = "from regard.cli import main; main()"


@dataclasses.dataclass
class Crowd:
    """What came of many requests."""

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
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.streams
        content = b"" if body is None else json.dumps(body).encode()
        writer.write(
            f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\n\r\n".encode()
            + content
        )
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = re.search(r"content-length: (\d+)", head)
        found = await reader.readexactly(int(length[1]) if length else 0)
        if "connection: close" in head:
            self.close()
        return int(head.split()[1]), json.loads(found) if found else None

    def close(self) -> None:
        if self.streams is not None:
            self.streams[1].close()
        self.streams = None


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


async def watch_memory(pid: int, samples: list[float]) -> None:
    """The server's resident memory in MiB, every few seconds, until cancelled."""
    while True:
        await asyncio.sleep(EVERY)
        text = Path(f"/proc/{pid}/status").read_text()
        samples.append(int(re.search(r"VmRSS:\s+(\d+)", text)[1]) / 1024)  # type: ignore[index]


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
    if options.soak:
        say(f"soak: {options.soak:g} minutes ...")
        memory: list[float] = []
        watching = asyncio.create_task(watch_memory(pid, memory))
        soaked = await ask_together(*given, 60 * options.soak)
        watching.cancel()
        result["soak"] = soaked.summary() | drift(memory)
    return result


def drift(memory: Sequence[float]) -> dict[str, Any]:
    """How the memory changed from minute 1 to the end: percent, half a minute at either end."""
    half = 30 // EVERY
    first = memory[60 // EVERY - 1 :][:half] or memory[:1]
    start, end = statistics.mean(first), statistics.mean(memory[-half:])
    return {
        "memory_mib": [round(sample, 1) for sample in memory],
        "drift_percent": round(100 * (end / start - 1), 2),
    }


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
    kinds = [kind for kind in ("alone", "together", "soak") if kind in result]
    rows = [["", *kinds]]
    for name in result["alone"]:
        shown = [result[kind][name] for kind in kinds]
        rows.append([name.replace("_", " "), *(json.dumps(one).strip("{}") for one in shown)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    lines.append(f"\nready after {result['ready_s']} s; batching gains {result['gain']}×")
    if "soak" in result:
        lines.append(f"memory from minute 1 to the end: {result['soak']['drift_percent']:+} %")
    return "\n".join(lines)


def record(result: dict[str, Any], before: float) -> Path:
    """Writes the numbers with what they were measured on."""
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
    parser.add_argument("--soak", type=float, default=0, metavar="MINUTES")
    parser.add_argument("--record", action="store_true", help="leave results/playground/*.json")
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


if __name__ == "__main__":
    main()
