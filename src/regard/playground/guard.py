"""What surrounds every request: security headers, limits in bytes and seconds, and counters.

`Guard` is an ASGI application around the application. `timed_protocol` is for uvicorn: it closes
connections that stay silent, which no ASGI application gets to see. `Metrics` counts what Guard
and the batcher report, in the text format that Prometheus reads.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections import defaultdict
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

from regard.playground.requests import Limits, Refusal

DRAINED = 16  # times the body's limit: how much of an oversized body is read and discarded

THIS_MACHINE = ("localhost", "127.0.0.1", "[::1]")
_PORT = re.compile(r":\d+$")
_WRONG_HOST = (
    "this server answers to the name localhost only. Fix: open it by that name, or start it with "
    "--host for other machines."
)

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-cache",
}


class Guard:
    """The outermost layer, through which every answer passes, errors included.

    Args:
        app: the application.
        limits: on a body's bytes, and on the seconds in which it must arrive.
        metrics: counts the answers.
        paths: the paths that are counted by name; all others count as "other", so that no client
            can fill the memory with names.
        hosts: the Host names that are accepted, without a port; None: any. A page elsewhere can
            let its own name resolve to this machine (DNS rebinding); its requests then come from
            the visitor's browser, but with that name in the Host header.
    """

    def __init__(
        self,
        app: Any,
        limits: Limits,
        metrics: Metrics,
        paths: frozenset[str],
        hosts: Collection[str] | None = None,
    ) -> None:
        self.app, self.limits, self.metrics = app, limits, metrics
        self.paths, self.hosts = paths, hosts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status, read, complete = time.perf_counter(), 500, 0, False
        deadline = asyncio.get_running_loop().time() + self.limits.upload

        async def limited() -> Any:
            nonlocal read, complete
            if complete:  # what comes now is the disconnect, and that may take its time
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise Refusal(
                    408, f"the body must arrive within {self.limits.upload:g} seconds."
                ) from None
            read += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if read > self.limits.body:
                await self._drain(receive, message)
                raise self._too_large()
            return message

        async def secured(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = {name for name, _ in message["headers"]}
                extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [
                    *message["headers"],
                    *(pair for pair in extra if pair[0] not in own),
                ]
            await send(message)

        try:
            if refusal := self._refusal(scope):
                await self._drain(receive)
                await self._refuse(secured, refusal)
            else:
                await self.app(scope, limited, secured)
        finally:
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.request(path, status, time.perf_counter() - began)

    def _refusal(self, scope: Any) -> Refusal | None:
        """Why the request's headers alone rule it out."""
        headers = {name: value.decode("latin-1").lower() for name, value in scope["headers"]}
        host = headers.get(b"host", "")
        if self.hosts is not None and _PORT.sub("", host) not in self.hosts:
            return Refusal(421, _WRONG_HOST)
        length = headers.get(b"content-length", "0")
        if length.isdigit() and int(length[:20]) > self.limits.body:
            return self._too_large()
        if scope["method"] != "POST":
            return None
        # A page of another origin may send a POST that the browser considers harmless, without
        # asking first, and the server would work for it. Browsers say where a request comes from.
        site, origin = headers.get(b"sec-fetch-site", "none"), headers.get(b"origin")
        if site not in ("same-origin", "none") or (origin is not None and not _same(origin, host)):
            return Refusal(403, "requests from pages of another origin are refused.")
        if headers.get(b"content-type", "").split(";")[0].strip() != "application/json":
            return Refusal(415, "the body must have the content type application/json.")
        return None

    def _too_large(self) -> Refusal:
        return Refusal(413, f"the body has at most {self.limits.body} bytes.")

    async def _drain(self, receive: Any, message: Any = None) -> None:
        """Discards the rest of a body, within bounds: a client that is cut off while it sends may
        never read the answer."""
        read = 0
        try:
            async with asyncio.timeout(self.limits.upload):
                message = message or await receive()
                while message.get("more_body") and read <= DRAINED * self.limits.body:
                    message = await receive()
                    read += len(message.get("body", b""))
        except TimeoutError:
            pass

    @staticmethod
    async def _refuse(send: Any, refusal: Refusal) -> None:
        body = json.dumps({"error": refusal.message}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _same(origin: str, host: str) -> bool:
    """Whether an Origin header names the host of the request."""
    try:
        return urlsplit(origin).netloc == host != ""
    except ValueError:
        return False


def timed_protocol(limits: Limits) -> type[asyncio.Protocol]:
    """uvicorn's HTTP/1.1 protocol, with bounds on what a connection may hold without asking.

    uvicorn waits without end for a request's head, and for a client to read its answer. Here a
    head must be complete `limits.upload` seconds after the connection opened, or after the answer
    before it; an answer must be taken within `limits.seconds`; and there are at most
    `limits.connections`. The body's time is Guard's to limit.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class TimedProtocol(H11Protocol):
        head_timer: asyncio.TimerHandle | None = None
        write_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                transport.abort()
            else:
                self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop("head_timer")
            self._stop("write_timer")
            super().connection_lost(exc)

        def handle_events(self) -> None:
            before = self.cycle
            super().handle_events()
            if self.cycle is not before:  # a head was complete
                self._stop("head_timer")

        def on_response_complete(self) -> None:
            current = self.cycle
            super().on_response_complete()  # may start a request that was pipelined
            if self.cycle is current:
                self._await_head()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._stop("write_timer")
            self.write_timer = self.loop.call_later(limits.seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop("write_timer")

        def _await_head(self) -> None:
            self._stop("head_timer")
            self.head_timer = self.loop.call_later(limits.upload, self.transport.abort)

        def _stop(self, name: str) -> None:
            if timer := getattr(self, name):
                timer.cancel()
            setattr(self, name, None)

    return TimedProtocol


BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    """Counts requests, sentences and seconds.

    Example:
        >>> metrics = Metrics()
        >>> metrics.request("/healthz", 200, 0.003)
        >>> print(metrics.text().splitlines()[2])
        regard_requests_total{path="/healthz",status="200"} 1
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[tuple[str, int], int] = defaultdict(int)
        self._seconds: dict[str, list[float]] = {}
        self._batches = self._abandoned = self._sentences = 0
        self._batch_seconds = 0.0

    def request(self, path: str, status: int, seconds: float) -> None:
        """One request was answered."""
        with self._lock:
            self._requests[path, status] += 1
            row = self._seconds.setdefault(path, [0.0] * (len(BOUNDS) + 2))
            for place, bound in enumerate(BOUNDS):
                row[place] += seconds <= bound
            row[-2] += 1
            row[-1] += seconds

    def batch(self, sentences: int, seconds: float, abandoned: bool = False) -> None:
        """One beam search ended, or was abandoned because all its clients had gone."""
        with self._lock:
            self._batch_seconds += seconds
            if abandoned:
                self._abandoned += 1
            else:
                self._batches += 1
                self._sentences += sentences

    def text(self, waiting: int = 0) -> str:
        """All counters, as /metrics answers them."""
        with self._lock:
            lines = [
                "# HELP regard_requests_total Requests answered.",
                "# TYPE regard_requests_total counter",
            ]
            for (path, status), count in sorted(self._requests.items()):
                lines.append(f'regard_requests_total{{path="{path}",status="{status}"}} {count}')
            lines += [
                "# HELP regard_request_seconds Time to answer.",
                "# TYPE regard_request_seconds histogram",
            ]
            for path, row in sorted(self._seconds.items()):
                bounds = [*map(str, BOUNDS), "+Inf"]
                lines += [
                    f'regard_request_seconds_bucket{{path="{path}",le="{bound}"}} {count:.0f}'
                    for bound, count in zip(bounds, row, strict=False)
                ]
                lines.append(f'regard_request_seconds_sum{{path="{path}"}} {row[-1]!r}')
                lines.append(f'regard_request_seconds_count{{path="{path}"}} {row[-2]:.0f}')
            single = [
                ("batches_total", "counter", "Beam searches run.", self._batches),
                ("abandoned_batches_total", "counter", "Given up by clients.", self._abandoned),
                ("sentences_total", "counter", "Sentences translated.", self._sentences),
                ("batch_seconds_total", "counter", "Time in beam searches.", self._batch_seconds),
                ("waiting_sentences", "gauge", "Sentences in the queue.", waiting),
            ]
        for name, kind, help_, value in single:
            name = f"regard_{name}"
            lines += [f"# HELP {name} {help_}", f"# TYPE {name} {kind}", f"{name} {value!r}"]
        return "\n".join(lines) + "\n"
