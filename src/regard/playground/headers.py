"""Around every request: the body's limit, security headers, counting. Plain ASGI."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection
from typing import Any

from regard.playground.limits import Limits
from regard.playground.metrics import Metrics
from regard.playground.requests import Refusal

DRAINED = 16  # times the limit: so much of a body that is too large is read and thrown away

THIS_MACHINE = ("localhost", "127.0.0.1", "[::1]")
_PORT = re.compile(r":\d+$")
_ELSEWHERE = (
    "the server is for this machine, by the name of localhost. Fix: open it by that name, or start "
    "it with --host for other machines."
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


class Around:
    """The outermost layer: whatever is answered, refusals and failures too, comes through here.

    Args:
        app: what answers.
        limits: the body's.
        metrics: is told of each answer.
        paths: the addresses that are counted by name; others are counted as "other", so that
            nobody can fill the memory with names.
        hosts: the names it may be called by, without a port; None: any. A page elsewhere can have
            its own name lead to this machine, and then ask in a visitor's browser as if it came
            from here; the name that it asks for gives it away.
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
        began, status, read = time.perf_counter(), 500, 0
        too_large = Refusal(413, f"the body has at most {self.limits.body} bytes.")

        async def limited() -> Any:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.limits.body:
                await self._drain(receive, message)
                raise too_large  # out of whoever asked for the body
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
            if not self._meant(scope):
                await self._drain(receive)
                await self._refuse(secured, Refusal(421, _ELSEWHERE))
            elif self._declared(scope) > self.limits.body:
                await self._drain(receive)
                await self._refuse(secured, too_large)
            else:
                await self.app(scope, limited, secured)
        finally:
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.request(path, status, time.perf_counter() - began)

    def _meant(self, scope: Any) -> bool:
        """Whether the request asks for one of our names."""
        if self.hosts is None:
            return True
        name = dict(scope["headers"]).get(b"host", b"").decode("latin-1").lower()
        return _PORT.sub("", name) in self.hosts

    @staticmethod
    def _declared(scope: Any) -> int:
        value = dict(scope["headers"]).get(b"content-length", b"0")
        return int(value) if value.isdigit() else 0

    async def _drain(self, receive: Any, message: Any = None) -> None:
        """Reads on, within reason: who is cut off while sending may never see the answer."""
        message = message or await receive()
        read = 0
        while message.get("more_body") and read <= DRAINED * self.limits.body:
            message = await receive()
            read += len(message.get("body", b""))

    @staticmethod
    async def _refuse(send: Any, refusal: Refusal) -> None:
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        body = json.dumps({"error": refusal.message}).encode()
        await send({"type": "http.response.body", "body": body})
