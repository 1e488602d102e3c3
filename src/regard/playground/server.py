"""The playground's application: which address does what, and how it starts and stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from regard.playground import attend_api
from regard.playground.batcher import Batcher
from regard.playground.headers import Around
from regard.playground.limits import Limits
from regard.playground.metrics import Metrics
from regard.playground.openapi import describe
from regard.playground.requests import Refusal, parse, read_attend, read_translate
from regard.seq2seq.translation import to_json

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
        translator: a `regard.seq2seq.translator.Translator`, or anything with its `translate`;
            None: nothing is translated, and all else works.
        limits: what is allowed.
        models: what /api/models answers.
        warm: what is to be run before the server is ready, to compile; one step after another,
            so that a server which is told to stop need not wait for all of them.
        later: what is to be run once it is ready, while it answers: the same programs, compiled
            at leisure. They are taken when all of them are there.
        missing: why there is no translator, as one sentence.
        hosts: the names that requests may ask for, see `Around`; None: any.
    """

    def __init__(
        self,
        translator: Any,
        limits: Limits = Limits(),
        models: list[dict[str, Any]] | None = None,
        warm: Iterable[Callable[[], None]] = (),
        later: Iterable[Callable[[], None]] = (),
        missing: str = "there is no model here.",
        hosts: Collection[str] | None = None,
    ) -> None:
        self.translator, self.limits = translator, limits
        self.warm, self.later = warm, later
        self.models, self.missing, self.hosts = models or [], missing, hosts
        self.metrics = Metrics()
        self.status = "starting"
        self.compiling = True
        self.hurry: bool | None = None  # what a translator does by itself
        self.attending = 0

    def app(self) -> Around:
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
        starlette = Starlette(
            routes=routes,
            lifespan=self._life,
            exception_handlers={HTTPException: _refused},
        )
        # Around all of it, and not one of Starlette's middlewares: those do not see every error.
        paths = frozenset(route.path for route in routes)
        return Around(starlette, self.limits, self.metrics, paths, self.hosts)

    # Addresses -------------------------------------------------------------------------------

    async def translate(self, request: Request) -> Response:
        asked = read_translate(parse(await request.body()), self.limits)
        if self.translator is None:
            raise Refusal(503, self.missing)
        if self.status == "starting":
            raise Refusal(503, "the model is being made ready.", retry=5)
        return JSONResponse({"translations": await self.batcher.ask(asked)})

    async def attend(self, request: Request) -> Response:
        asked = read_attend(parse(await request.body()), self.limits)
        if self.attending >= self.limits.attends:
            raise Refusal(429, f"{self.attending} requests like this one are waiting.", retry=1)
        self.attending += 1
        try:
            return JSONResponse(await asyncio.to_thread(attend_api.answer, asked))
        finally:
            self.attending -= 1

    async def list_models(self, request: Request) -> Response:
        return JSONResponse({"models": self.models, "status": self.status})

    async def health(self, request: Request) -> Response:
        state = {"status": self.status, "compiling": self.compiling}
        return JSONResponse(state, 200 if self.status == "ok" else 503)

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
        self.status, self.compiling, self.hurry = "starting", True, None
        self.batcher = Batcher(self._translate, self.limits, self.metrics.batch)
        warming = asyncio.create_task(self._warm())
        await asyncio.sleep(0)  # with nothing to warm, it is ready before the first request
        yield
        self.status = "stopping"
        await warming  # the step under way; a thread cannot be interrupted
        await self.batcher.stop()  # whoever was let in is answered

    async def _warm(self) -> None:
        await self._run_all(self.warm)
        self.batcher.start()
        if self.status == "starting":
            self.status = "ok"
        if self.later and await self._run_all(self.later):
            self.hurry = False
        self.compiling = False

    async def _run_all(self, steps: Iterable[Callable[[], None]]) -> bool:
        """Runs one after another, until there is a reason not to; whether all were run."""
        try:
            for step in steps:
                if self.status == "stopping":
                    return False
                await asyncio.to_thread(step)
        except Exception:  # warming only saves time: without it, requests compile
            log.exception("warming failed")
            return False
        return True

    def _translate(self, texts: list[str], beam: int, n_best: int) -> list[list[Any]]:
        from regard.seq2seq.decode.hypotheses import SearchOptions

        options = SearchOptions(beam=beam)
        found = self.translator.translate(texts, search=options, n_best=n_best, hurry=self.hurry)
        return [[to_json(one) for one in best] for best in found]

    def _answered(self, handler: Any) -> Any:
        """A handler whose refusals and failures are answers too."""

        async def endpoint(request: Request) -> Response:
            try:
                return await handler(request)
            except Refusal as refusal:
                headers = {"retry-after": str(refusal.retry)} if refusal.retry else None
                return JSONResponse({"error": refusal.message}, refusal.status, headers)
            except ClientDisconnect:
                return Response(status_code=400)  # nobody is there to read it
            except Exception:
                log.exception("%s %s failed", request.method, request.url.path)
                text = "something went wrong here; the server's log has it."
                return JSONResponse({"error": text}, 500)

        return endpoint


async def _refused(request: Request, error: Exception) -> Response:
    """What Starlette itself refuses: an unknown address, a wrong method."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)
