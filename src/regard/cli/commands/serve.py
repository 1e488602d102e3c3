"""`regard serve`: the playground in the browser, and its API, on this machine.

The application is in playground/; this file loads it, binds it to an address and shuts it down.
"""

import contextlib
import ipaddress
import socket
import sys
import webbrowser
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from regard.cli import options

if TYPE_CHECKING:
    from regard.playground.server import Playground

SHUTDOWN_SECONDS = 35  # for requests that still run: a little more than one may take
NO_MODEL = "Translate stays empty; Scores and Your own work."


def command(
    model: options.Model = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. The default is this machine only.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on (0 = any free port).")
    ] = 8000,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Serve the playground in the browser: translations, queries and keys, your own weights."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        _fail(
            f"regard serve needs {error.name}, which is not installed.\n"
            'Install it with: pip install "regard[serve]"'
        )
    from regard.playground.guard import THIS_MACHINE

    # The address comes first: if it is taken, say so before loading a model.
    with _bound(host, port) as listening:
        if not _only_here(host):
            _say(
                f"warning: {host} can be reached from other machines, and there is no "
                "authentication: anyone who reaches it can use it."
            )
        address = _address(host, listening.getsockname()[1])

        def announce() -> None:
            _say(f"the playground: {address}   (Ctrl+C ends it)")
            if open_page:
                webbrowser.open(address)

        _run(_playground(model, THIS_MACHINE if _only_here(host) else None), listening, announce)
    _say("stopped.")


def _playground(folder: Path | None, hosts: Collection[str] | None) -> "Playground":
    """The application with its translator, or without one where none can be loaded."""
    from regard.cli.compile_cache import keep_compiled_programs
    from regard.playground.attend_api import warm_up
    from regard.playground.server import Playground
    from regard.playground.translations import steps
    from regard.seq2seq.train.runtime_options import give_back_freed_memory

    give_back_freed_memory()  # a server runs for days
    keep_compiled_programs()  # so that the next start is quick
    try:
        from regard.seq2seq.translator import Translator

        translator = Translator.load(folder)
    except ModuleNotFoundError as error:
        missing = (
            f"translating needs {error.name}, which is not installed. "
            'Fix: pip install "regard[serve,translate]".'
        )
    except (OSError, ValueError) as error:
        missing = str(error)
    else:
        described: dict[str, Any] = {"name": "English → French", "languages": ["en", "fr"]}
        if folder is not None:
            described = {"name": _name(folder.resolve())}
        described["parameters"] = _parameters(translator)
        described["architecture"] = translator.model.config.architecture
        models = [described]
        warm = [*warm_up(), *steps(translator, _progress, hurry=True)]
        later = steps(translator, _optimized, hurry=False)
        return Playground(translator, models=models, warm=warm, later=later, hosts=hosts)
    if folder is not None:  # the user asked for this model
        _fail(missing)
    _say(f"no translator: {missing}\n{NO_MODEL}")
    return Playground(None, missing=missing, warm=warm_up(), hosts=hosts)


def _run(playground: "Playground", listening: socket.socket, announce: Callable[[], None]) -> None:
    """Serves until a signal comes, then answers the accepted requests and returns."""
    import uvicorn

    from regard.playground.guard import timed_protocol

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            announce()

    config = uvicorn.Config(
        playground.app(),
        http=timed_protocol(playground.limits),
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="on",
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    # uvicorn raises the signal again when everything is answered.
    with contextlib.suppress(KeyboardInterrupt):
        Server(config).run(sockets=[listening])


def _bound(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, place = found[0]
        return socket.create_server(place[:2], family=family, backlog=2048)
    except OSError as error:
        _fail(
            f"cannot listen on {host}, port {port}: {error.strerror or error}. "
            "Fix: another --port, or --port 0 for any that is free."
        )


def _only_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def _address(host: str, port: int) -> str:
    if host in ("0.0.0.0", "::"):  # every address of this machine, this one among them
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def _name(folder: Path) -> str:
    """A model's name; in the folder of a training run, it is called "model"."""
    return folder.parent.name if folder.name == "model" else folder.name


def _parameters(translator: Any) -> int:
    import jax
    from flax import nnx

    return sum(leaf.size for leaf in jax.tree.leaves(nnx.split(translator.model)[1]))


def _progress(done: int, of: int) -> None:
    """A line that counts on a terminal, a single line at the end in a file."""
    if sys.stderr.isatty():
        typer.echo(f"\rcompiling: {done} of {of} shapes", err=True, nl=False)
    if done == of:
        typer.echo("\r" if sys.stderr.isatty() else "", err=True, nl=False)
        _say(f"ready: {of} shapes are compiled.")


def _optimized(done: int, of: int) -> None:
    if done == of:
        _say("every shape is now compiled with all optimizations.")


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(1)
