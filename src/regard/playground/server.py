"""The playground's application: which address does what, and how it starts and stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from regard.playground import attend_api
from regard.playground.batcher import Batcher
from regard.playground.headers import Around
from regard.playground.limits import Limits
from regard.playground.metrics import Metrics
from regard.playground.openapi import describe
from regard.playground.requests import Refusal, parse, read_attend, read_translate

log = logging.getLogger("regard.playground")

JAVASCRIPT, CSS = "text/javascript; charset=utf-8", "text/css; charset=utf-8"
STATIC = {
    "/": ("playground/static/index.html", "text/html; charset=utf-8"),
    "/playground.css": ("playground/static/playground.css", CSS),
    "/page.js": ("playground/static/page.js", JAVASCRIPT),
    "/translate.js": ("playground/static/translate.js", JAVASCRIPT),
    "/scores.js": ("playground/static/scores.js", JAVASCRIPT),
    "/own.js": ("playground/static/own.js", JAVASCRIPT),
    "/icon.svg": ("playground/static/icon.svg", "image/svg+xml"),
    # Drawn by the same code as the pages that AttentionMap writes.
    "/view.css": ("show/page/view.css", CSS),
    "/view.js": ("show/page/view.js", JAVASCRIPT),
}


class Playground:
    """The application's parts.

    Args:
        translator: a `regard.seq2seq.translator.Translator`, or anything with its `translate`.
        limits: what is allowed.
        models: what /api/models answers.
        warm: called once in the background before the server is ready, to compile.
    """

    def __init__(
        self,
        translator: Any,
        limits: Limits = Limits(),
        models: list[dict[str, Any]] | None = None,
        warm: Callable[[], None] | None = None,
    ) -> None:
        self.translator, self.limits, self.warm = translator, limits, warm
        self.models = models or []
        self.metrics = Metrics()
        self.status = "starting"

    def app(self) -> Starlette:
        """What a web server runs."""
        routes = [
            Route("/api/translate", self._answered(self.translate), methods=["POST"]),
            Route("/api/attend", self._answered(self.attend), methods=["POST"]),
            Route("/api/models", self._answered(self.list_models), methods=["GET"]),
            Route("/healthz", self._answered(self.health), methods=["GET"]),
            Route("/metrics", self._answered(self.counters), methods=["GET"]),
            Route("/openapi.json", self._answered(self.described), methods=["GET"]),
            *(Route(path, self._answered(self.static), methods=["GET"]) for path in STATIC),
        ]
        paths = frozenset(route.path for route in routes)
        around = Middleware(Around, limits=self.limits, metrics=self.metrics, paths=paths)
        return Starlette(
            routes=routes,
            middleware=[around],
            lifespan=self._life,
            exception_handlers={HTTPException: _refused, Exception: _failed},
        )

    # Addresses -------------------------------------------------------------------------------

    async def translate(self, request: Request) -> Response:
        asked = read_translate(parse(await request.body()), self.limits)
        if self.status == "starting":
            raise Refusal(503, "the model is being loaded.", retry=5)
        found = await self.batcher.ask(asked)
        return JSONResponse({"translations": [[_told(one) for one in best] for best in found]})

    async def attend(self, request: Request) -> Response:
        asked = read_attend(parse(await request.body()), self.limits)
        answer = await asyncio.get_running_loop().run_in_executor(None, attend_api.answer, asked)
        return JSONResponse(answer)

    async def list_models(self, request: Request) -> Response:
        return JSONResponse({"models": self.models})

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": self.status}, 200 if self.status == "ok" else 503)

    async def counters(self, request: Request) -> Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        waiting = self.batcher.sentences if self.status != "starting" else 0
        return PlainTextResponse(self.metrics.text(waiting), media_type=kind)

    async def described(self, request: Request) -> Response:
        return JSONResponse(describe(self.limits))

    async def static(self, request: Request) -> Response:
        name, kind = STATIC[request.url.path]
        content = files("regard").joinpath(name).read_bytes()
        return Response(content, headers={"content-type": kind})

    # Life ------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _life(self, app: Starlette) -> AsyncIterator[None]:
        self.batcher = Batcher(self._translate, self.limits, self.metrics.batch)
        warming = asyncio.create_task(self._warm())
        yield
        self.status = "stopping"
        warming.cancel()
        await self.batcher.stop()  # whoever was let in is answered

    async def _warm(self) -> None:
        if self.warm is not None:
            await asyncio.get_running_loop().run_in_executor(None, self.warm)
        self.batcher.start()
        self.status = "ok"

    def _translate(self, texts: list[str], beam: int, n_best: int) -> list[list[Any]]:
        from regard.seq2seq.hypotheses import SearchOptions

        return self.translator.translate(texts, search=SearchOptions(beam=beam), n_best=n_best)

    def _answered(self, handler: Any) -> Any:
        async def endpoint(request: Request) -> Response:
            try:
                return await handler(request)
            except Refusal as refusal:
                headers = {"retry-after": str(refusal.retry)} if refusal.retry else None
                return JSONResponse({"error": refusal.message}, refusal.status, headers)

        return endpoint


def _told(one: Any) -> dict[str, Any]:
    """A translation as JSON."""
    score = float(one.score)
    return {
        "text": one.text,
        "score": round(score, 4) if abs(score) < 1e30 else None,
        "source_words": list(one.source_words),
        "target_words": list(one.target_words),
        "weights": [[round(float(x), 4) for x in row] for row in one.weights],
    }


async def _refused(request: Request, error: Exception) -> Response:
    """What Starlette itself refuses: an unknown address, a wrong method."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    log.exception("%s %s failed", request.method, request.url.path, exc_info=error)
    return JSONResponse({"error": "something went wrong here; the server's log has it."}, 500)
