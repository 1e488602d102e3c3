"""The playground's application: its addresses, and how it starts and stops."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from regard.playground import attend_api
from regard.playground.batcher import Batcher
from regard.playground.guard import Guard, Metrics
from regard.playground.openapi import describe
from regard.playground.requests import (
    BEAM,
    Limits,
    Refusal,
    TranslateRequest,
    parse,
    read_attend,
    read_layers,
    read_translate,
)

log = logging.getLogger("regard.playground")

GONE = 499  # in /metrics only: the client closed the connection before the answer (as in nginx)

JAVASCRIPT, CSS = "text/javascript; charset=utf-8", "text/css; charset=utf-8"
STATIC = {
    "/": ("playground/static/index.html", "text/html; charset=utf-8"),
    "/page.js": ("playground/static/page.js", JAVASCRIPT),
    "/translate.js": ("playground/static/translate.js", JAVASCRIPT),
    "/layers.js": ("playground/static/layers.js", JAVASCRIPT),
    "/scores.js": ("playground/static/scores.js", JAVASCRIPT),
    "/own.js": ("playground/static/own.js", JAVASCRIPT),
    "/playground.css": ("playground/static/playground.css", CSS),
    "/example.json": ("playground/static/example.json", "application/json"),
    "/icon.svg": ("playground/static/icon.svg", "image/svg+xml"),
    # Shared with the pages that AttentionMap writes.
    "/view.css": ("show/page/view.css", CSS),
    "/view.js": ("show/page/view.js", JAVASCRIPT),
}


class Playground:
    """The application's parts.

    Args:
        translator: a `regard.seq2seq.translator.Translator`, or an object with its `translate`
            and `tokenizers`; None: nothing is translated, and the rest works.
        limits: on requests and on the server's work.
        models: the answer of /api/models.
        warm: functions that compile programs before the server is ready; run one after another, so
            that a server can stop between two of them.
        later: functions that compile the same programs with all optimizations, run while the
            server answers. The optimized programs are used once all of them are compiled.
        missing: why there is no translator, as one sentence.
        hosts: the Host names that are accepted, see `Guard`; None: any.
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
        self.hurry: bool | None = None  # None: the translator decides
        self.attending = 0

    def app(self) -> Guard:
        """The ASGI application that a web server runs."""
        routes = [
            Route("/api/translate", self._answered(self.translate), methods=["POST"]),
            Route("/api/layers", self._answered(self.layers), methods=["POST"]),
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
        return Guard(starlette, self.limits, self.metrics, paths, self.hosts)

    # Addresses -------------------------------------------------------------------------------

    async def translate(self, request: Request) -> Response:
        asked = read_translate(parse(await request.body()), self.limits)
        self._require_model()
        return await _while_connected(request, self._translated(asked))

    def _require_model(self) -> None:
        if self.translator is None:
            raise Refusal(503, self.missing)
        if self.status == "starting":
            raise Refusal(503, "the model is being compiled.", retry=5)

    async def _translated(self, asked: TranslateRequest) -> Response:
        tokens = await asyncio.to_thread(self._count_tokens, asked.text)
        asked.check_size(tokens, self.limits)
        return JSONResponse({"translations": await self.batcher.ask(asked, sum(tokens))})

    def _count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [len(one.ids) for one in self.translator.tokenizers.source.encode_batch(texts)]

    async def attend(self, request: Request) -> Response:
        asked = read_attend(parse(await request.body()), self.limits)
        return await self._computed(request, functools.partial(attend_api.answer, asked))

    async def layers(self, request: Request) -> Response:
        asked = read_layers(parse(await request.body()), self.limits)
        self._require_model()
        from regard.playground.translations import layers

        return await self._computed(
            request, functools.partial(layers, self.translator, asked, self.limits)
        )

    async def _computed(self, request: Request, answer: Callable[[], dict[str, Any]]) -> Response:
        """The answer of a function that runs in the one thread for such requests."""
        if self.attending >= self.limits.attends:
            raise Refusal(429, f"{self.attending} requests like this one are waiting.", retry=1)
        self.attending += 1
        try:
            # One thread: a request that is cancelled while it waits for the thread is never run.
            work = asyncio.get_running_loop().run_in_executor(self._attending, answer)
            in_time = asyncio.wait_for(work, self.limits.seconds)
            return JSONResponse(await _while_connected(request, in_time))
        except TimeoutError:
            raise Refusal(
                503, f"no answer within {self.limits.seconds:g} seconds.", retry=5
            ) from None
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
        self._attending = ThreadPoolExecutor(1, thread_name_prefix="regard-attend")
        warming = asyncio.create_task(self._warm())
        await asyncio.sleep(0)  # with nothing to warm, it is ready before the first request
        yield
        self.status = "stopping"
        await warming  # the step under way; a thread cannot be interrupted
        await self.batcher.stop()  # accepted requests are answered
        self._attending.shutdown()

    async def _warm(self) -> None:
        await self._run_all(self.warm)
        self.batcher.start()
        if self.status == "starting":
            self.status = "ok"
        if self.later and await self._run_all(self.later):
            self.hurry = False
        self.compiling = False

    async def _run_all(self, steps: Iterable[Callable[[], None]]) -> bool:
        """Runs the steps until the server is to stop; returns whether all were run."""
        try:
            for step in steps:
                if self.status == "stopping":
                    return False
                await asyncio.to_thread(step)
        except Exception:  # without warming, requests compile what they need
            log.exception("warming failed")
            return False
        return True

    def _translate(
        self, requests: Sequence[TranslateRequest], check: Callable[[], None]
    ) -> list[Any]:
        from regard.playground.translations import answers

        # Only the default beam's programs are compiled ahead, with all optimizations in the end.
        hurry = self.hurry if requests[0].beam == BEAM else True
        return answers(self.translator, requests, check, hurry)

    def _answered(self, handler: Callable[[Request], Awaitable[Response]]) -> Any:
        """A handler whose refusals and failures become JSON answers."""

        async def endpoint(request: Request) -> Response:
            try:
                return await handler(request)
            except Refusal as refusal:
                headers = {"retry-after": str(refusal.retry)} if refusal.retry else {}
                if refusal.status in (408, 413):  # part of the body may still be on its way
                    headers["connection"] = "close"
                return JSONResponse({"error": refusal.message}, refusal.status, headers)
            except ClientDisconnect:
                return Response(status_code=GONE)
            except Exception:
                log.exception("%s %s failed", request.method, request.url.path)
                text = "the server failed; its log has the reason."
                return JSONResponse({"error": text}, 500)

        return endpoint


async def _while_connected(request: Request, work: Awaitable[Any]) -> Any:
    """The result of `work`, which is cancelled as soon as the client disconnects.

    Raises:
        ClientDisconnect: the client went away first.
    """
    working = asyncio.ensure_future(work)
    # The body has been read: the next message is the disconnect.
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _refused(request: Request, error: Exception) -> Response:
    """What Starlette itself refuses: an unknown address, a wrong method."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)
