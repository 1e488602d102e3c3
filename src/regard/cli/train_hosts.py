"""`regard train` in several processes: connecting, agreeing on the vocabulary, and ending.

This file reports the loss of another process. Connecting and agreeing are regard.seq2seq's
launch.py and hosts.py.
"""

import contextlib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from regard.cli.train_run import plain_errors
from regard.cli.train_signals import AbortMessage

if TYPE_CHECKING:
    from regard.seq2seq.distributed.hosts import Hosts
    from regard.seq2seq.distributed.launch import Launch
    from regard.seq2seq.text.tokenizer_pair import TokenizerPair


def launch_of(
    coordinator: str | None, processes: int | None, process: int | None, distributed: bool
) -> "Launch | None":
    """The other processes, by options or environment; None: there are none."""
    from regard.seq2seq.distributed.launch import find_launch

    asked = dict(coordinator=coordinator, processes=processes, process=process)
    return find_launch(os.environ, **asked, distributed=distributed)  # type: ignore[arg-type]


@contextlib.contextmanager
def taking_part(launch: "Launch | None", folder: Path) -> Iterator["Hosts"]:
    """The processes that train together; an error is reported in one line and ends them all.

    Args:
        launch: how to find the others; None: there are none.
        folder: the run's, for the command that continues it.
    """
    from regard.seq2seq.distributed.hosts import JOIN_SECONDS, Hosts, is_gone, is_known_to_all, join

    if launch is None:
        with plain_errors(folder):
            yield Hosts()
        return

    import jax

    meeting = launch.coordinator or "where JAX looked for them"
    late = (
        f"error: not all processes connected to {meeting} within {JOIN_SECONDS} s (by what "
        f"{launch.found_in} said). Fix: start all of them, with the same coordinator."
    )
    gone = (
        "another process of this run is gone, so this one stops too. Continue from the last "
        f"checkpoint with: regard train {folder} --resume (in any number of processes)"
    )
    known = False
    with AbortMessage(late) as message:
        try:
            with plain_errors(folder):
                hosts = join(launch)
                message.change(f"error: {gone}")
                try:
                    yield hosts
                except Exception as error:
                    known = is_known_to_all(error)
                    if is_gone(error):
                        raise ValueError(gone) from error
                    raise
        except BaseException as error:
            if not known:
                _leave(error)
            raise
        finally:
            jax.distributed.shutdown()  # waits until the others are here, too


def _leave(error: BaseException) -> None:
    """Ends this process at once, so that the others, which have no error, notice it."""
    code = getattr(error, "exit_code", 1)
    if not isinstance(error, typer.Exit):
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by sys.exit: JAX would wait for the others in its teardown, and they for this one.
    os._exit(code)


def the_first_ones(
    hosts: "Hosts", tokenizers: Callable[[], "TokenizerPair | None"]
) -> "TokenizerPair | None":
    """The first process's tokenizers, in every process.

    Args:
        hosts: the processes.
        tokenizers: called in the first process; None: it has none.
    """
    from regard.seq2seq.text.tokenizer_pair import FILE, TokenizerPair

    mine: list[TokenizerPair | None] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / FILE

        def written() -> str | None:
            mine.append(tokenizers())
            if mine[0] is None:
                return None
            mine[0].save(folder)
            return path.read_text(encoding="utf-8")

        text = hosts.first(written)
        if hosts.leads or text is None:
            return mine[0] if mine else None
        path.write_text(text, encoding="utf-8")
        return TokenizerPair.load(folder)


def must_be_the_same(hosts: "Hosts", what: str, mine: Any) -> None:
    """Refuses to train on other data than the first process.

    Raises:
        ValueError: this process has other data.
    """
    theirs = hosts.first(lambda: mine)
    if theirs != mine:
        raise ValueError(
            f"every process must have the same {what}. Those of process {hosts.process} differ "
            "from those of process 0. Fix: the same files and options for each."
        )
