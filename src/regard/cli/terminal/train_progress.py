"""A training run on the terminal: the bar, and after each validation a sample with its map."""

import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from regard.seq2seq.alignment import word_weights
from regard.seq2seq.train.progress import Plan, Sample, StepReport, ValidationReport
from regard.seq2seq.train.progress import Progress as Listener

if TYPE_CHECKING:
    from regard.seq2seq.text.tokenizer_pair import TokenizerPair

WIDTH = 80
LONGEST = 14  # words of a source whose map still fits beside them on 80 columns


class _Activity(ProgressColumn):
    """The latest figures; while something else than a step runs, what it is and for how long."""

    def render(self, task: Task) -> Text:
        since = task.fields["since"]
        if since is None:
            return Text(task.fields["figures"])
        return Text(f"{task.fields['activity']}, {clock(time.monotonic() - since)}")


class TrainingBar(Listener):
    """Draws a run while it runs; `with TrainingBar(...) as bar: train(..., progress=bar)`.

    Where there is no terminal it prints a line now and then instead, so that a log stays short.

    Args:
        console: where to draw: standard error, so that standard output stays clean.
        tokenizers: to write the sample in words.
        maps: draw the sample's attention, too.
    """

    def __init__(self, console: Console, tokenizers: "TokenizerPair", *, maps: bool = True) -> None:
        self.console, self.tokenizers, self.maps = console, tokenizers, maps
        self.best: float | None = None
        self.bar = Progress(
            TextColumn("step"),
            BarColumn(bar_width=8),  # the whole line fits 80 columns
            MofNCompleteColumn(),
            _Activity(table_column=Column(no_wrap=True)),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task(
            "", total=None, figures="", activity="building the model", since=time.monotonic()
        )

    def __enter__(self) -> "TrainingBar":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def started(self, plan: Plan) -> None:
        self.total, self.said = plan.total_steps, time.monotonic()
        self.first: tuple[int, float] | None = None
        devices = f" on {plan.devices} devices" if plan.devices > 1 else ""
        steps = "" if self.total is None else f", at most {self.total:,} steps"
        begins = f", continued from step {plan.step:,}" if plan.step else ""
        self._print(f"model: {plan.parameters:,} parameters{devices}{steps}{begins}")
        self.bar.update(self.task, total=self.total, completed=plan.step)

    def doing(self, what: str) -> None:
        steps = what == "training"
        self.bar.update(self.task, activity=what, since=None if steps else time.monotonic())
        if what.startswith("compiling batches") and not self.console.is_terminal:
            self._print(what)

    def stepped(self, report: StepReport) -> None:
        figures = f"loss {report.nll:.3f} {report.tokens_per_second:,.0f} tokens/s"
        if self.first is None:  # the steps before it were spent compiling
            self.first = report.step, time.monotonic()
        elif self.total is not None:
            step, begun = self.first
            ahead = (time.monotonic() - begun) / (report.step - step) * (self.total - report.step)
            figures += f" {clock(ahead)} left"
        if self.best is not None:
            figures += f" BLEU {self.best:.1f}"
        self.bar.update(self.task, completed=report.step, figures=figures, since=None)
        if not self.console.is_terminal and time.monotonic() - self.said >= 10:
            self.said = time.monotonic()
            self._print(f"step {report.step:,}: {figures}")

    def validated(self, report: ValidationReport) -> None:
        line = f"step {report.step:,}, epoch {report.epoch}: validation loss {report.loss:.3f}"
        if report.bleu is not None:
            self.best = report.bleu if self.best is None else max(self.best, report.bleu)
            line += f", BLEU {report.bleu:.1f}"
        self._print(line + (" (best so far)" if report.is_best else ""))

    def sampled(self, sample: Sample) -> None:
        source = self.tokenizers.source.decode(sample.source)
        written = self.tokenizers.target.decode(sample.hypothesis)
        wanted = self.tokenizers.target.decode(sample.target)
        right = " (as the reference)" if written.text == wanted.text else ""
        self._print(f"  {source.text}\n  → {written.text}{right}")
        places = source.word_of_token, written.word_of_token
        weights = word_weights(sample.attention, *places)
        # The weights of a model without attention are all zeros.
        if self.maps and len(source.words) <= LONGEST and weights.any():
            from regard.show import AttentionMap

            drawn = AttentionMap(weights, written.words, source.words, end="(end)")
            drawn.print(width=WIDTH, console=self.console)

    def warned(self, message: str) -> None:
        self._print(f"warning: {message}")

    def finished(self, reason: str) -> None:
        self._print(f"finished: {reason}")

    def _print(self, line: str) -> None:
        """Prints above the bar, without markup: a sentence may have square brackets in it."""
        self.console.print(Text(line))


def clock(seconds: float) -> str:
    """A duration as text.

    Example:
        >>> clock(8), clock(95), clock(7384)
        ('8 s', '1:35', '2:03:04')
    """
    whole = round(max(seconds, 0))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"
