"""A training run on the terminal, from settings to the model's folder and the curves.

Shared by `regard train` and `regard demo`. The options are in train.py, the bar in
train_progress.py, Ctrl-C in train_signals.py.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from regard.cli.failures import one_line_errors
from regard.cli.train_signals import StopRequest

if TYPE_CHECKING:
    from regard.seq2seq.distributed.hosts import Hosts
    from regard.seq2seq.train.batches import Batches
    from regard.seq2seq.train.prepare import Prepared
    from regard.seq2seq.train.settings import Settings
    from regard.seq2seq.train.training import Result


def run_training(
    settings: "Settings",
    folder: Path,
    console: Console,
    *,
    resume: bool = False,
    hosts: "Hosts | None" = None,
    model_axis: int = 1,
) -> tuple["Result", "Prepared"]:
    """Prepares and trains with a progress bar; saves tokenizers and settings in the run's folder.

    Args:
        settings: the run's.
        folder: where it is kept.
        console: where progress is shown.
        resume: whether there is a run already, to continue.
        hosts: the processes that train together, of which the first reports and writes; None: one.
        model_axis: how many devices share the parameters.
    """
    from regard.cli.terminal.train_progress import TrainingBar
    from regard.seq2seq.distributed.hosts import Hosts

    hosts = hosts or Hosts()
    with contextlib.ExitStack() as stack:
        stop = None
        if hosts.processes == 1:
            stop = stack.enter_context(StopRequest(lambda: stopped_line(folder)))
        from regard.seq2seq.model.export import add_checksums
        from regard.seq2seq.text import tokenizer_pair
        from regard.seq2seq.train import runtime_options
        from regard.seq2seq.train.run_folder import run_lock
        from regard.seq2seq.train.training import train

        runtime_options.keep_freed_memory()

        def lock() -> None:
            stack.enter_context(run_lock(folder))

        hosts.first(lock)
        ready = _prepared(settings, folder, console, resume, hosts)

        def save() -> None:
            # The settings come last: a folder that has them has all that --resume needs.
            ready.tokenizers.save(folder)
            ready.settings.save(folder)

        hosts.first(save)
        bar = TrainingBar(console, ready.tokenizers) if hosts.leads else None
        stack.enter_context(bar or contextlib.nullcontext())
        with stop.between_steps() if stop else contextlib.nullcontext():
            result = train(
                ready.config,
                ready.settings.recipe,
                ready.batches,
                folder,
                validation=ready.validation,
                resume=True,  # whether there is a run was checked before anything was written
                progress=bar,
                stop=stop.made if stop else lambda: False,
                model_axis=model_axis,
            )

        def complete() -> None:
            ready.tokenizers.save(folder / "model")
            add_checksums(folder / "model", tokenizer_pair.FILE)

        hosts.first(complete)
    return result, ready


def _prepared(
    settings: "Settings", folder: Path, console: Console, resume: bool, hosts: "Hosts"
) -> "Prepared":
    """Tokenizers, batches and validation, the same in every process."""
    from regard.cli import train_hosts
    from regard.seq2seq.text import tokenizer_pair
    from regard.seq2seq.train.prepare import prepare

    def known() -> tokenizer_pair.TokenizerPair | None:
        there = resume and (folder / tokenizer_pair.FILE).exists()
        return tokenizer_pair.TokenizerPair.load(folder) if there else None

    if hosts.processes == 1:
        with _reading(console) as progress:
            return prepare(settings, tokenizers=known(), say=_say(console), progress=progress)
    tokenizers = train_hosts.the_first_ones(hosts, known)
    with _reading(console) as progress:
        ready = prepare(settings, tokenizers=tokenizers, say=_say(console), progress=progress)
    if tokenizers is None:
        # Each process has learned them from the same text. Where they differ all the same, this
        # process encodes the text again with those of the first.
        tokenizers = train_hosts.the_first_ones(hosts, lambda: ready.tokenizers)
        if tokenizers != ready.tokenizers:
            ready = prepare(settings, tokenizers=tokenizers)
    train_hosts.must_be_the_same(hosts, "training pairs", ready.batches.state())
    held_out = cast("Batches", ready.validation.batches)
    train_hosts.must_be_the_same(hosts, "validation pairs", held_out.state())
    return ready


def stopped_line(folder: Path | None) -> str:
    """What is said when Ctrl-C has ended a run."""
    if folder is None or not (folder / "settings.json").exists():  # stopped while it prepared
        return "stopped."
    return f"stopped. Continue with: regard train {folder} --resume"


@contextlib.contextmanager
def plain_errors(folder: Path | None = None) -> Iterator[None]:
    """Reports errors of files, disks and numbers in one line, with exit code 1."""
    with one_line_errors():
        from regard.seq2seq.train.checkpoints import CheckpointError
        from regard.seq2seq.train.non_finite import NonFiniteError

        try:
            yield
        except (CheckpointError, NonFiniteError) as error:
            raise ValueError(str(error)) from error
        except KeyboardInterrupt:
            typer.echo(stopped_line(folder), err=True)
            raise typer.Exit(130) from None


def conclude(folder: Path, result: "Result") -> None:
    """Prints the result, its folder, and the next command."""
    from regard.seq2seq.train.curves import draw_curves

    steps = ", ".join(map(str, result.averaged))
    kept = f"the average of steps {steps}" if len(result.averaged) > 1 else f"step {steps}"
    scores = "" if result.loss is None else f", validation loss {result.loss:.3f}"
    scores += "" if result.bleu is None else f", BLEU {result.bleu:.1f}"
    typer.echo(f"model: {folder / 'model'} ({kept}{scores})")
    try:
        typer.echo(f"curves: {draw_curves(folder / 'log.csv', folder / 'curves.png')}")
    except (ImportError, ValueError) as error:  # a missing picture is no failure
        typer.echo(f"no curves: {error}", err=True)
    typer.echo(f'next: regard translate --model {folder / "model"} "..."')


def _say(console: Console) -> Callable[[str], None]:
    return lambda line: console.print(line, markup=False, soft_wrap=True)


@contextlib.contextmanager
def _reading(console: Console) -> Iterator[Callable[[int, float | None], None]]:
    """A bar while a corpus is read; it disappears at the end."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        TextColumn("{task.completed:,.0f} pairs"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("reading", total=None)

        def report(count: int, fraction: float | None) -> None:
            total = round(count / fraction) if fraction else None
            bar.update(task, completed=count, total=total)

        yield report
