"""A bar on stderr while a command works; nothing where stderr is not a terminal."""

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


class Waiting:
    """Shows what is being done, for how long already, and how much of it is done.

    Use `waiting()` to make one.

    Args:
        bar: to show it on; None: there is no terminal.
    """

    def __init__(self, bar: "Progress | None") -> None:
        self._bar = bar
        self._task = None if bar is None else bar.add_task("", total=None)
        self._what = ""
        self._total: int | None = None
        self._before = self._size = 0

    def says(self, what: str, total: int | None = None, *, compiles: str = "") -> None:
        """Begins a step.

        Args:
            what: the step in a few words.
            total: how much there is to do, where that is known.
            compiles: the program that is compiled before the first progress is reported.
        """
        self._what, self._total, self._before = what, total, 0
        if self._bar is not None and self._task is not None:
            self._bar.start()
            shown = f"{what}: compiling {compiles}" if compiles else what
            self._bar.reset(self._task, description=shown, total=total)

    @contextlib.contextmanager
    def chunk(self, size: int) -> Iterator[None]:
        """Around the work on `size` of the total."""
        self._size = size
        yield
        self._before += size

    def done(self, done: float, total: float) -> None:
        """How much of the chunk is done; a translator's `progress`.

        It is converted to the units of `says`: a chunk of lines may have more parts than lines.
        """
        self.at(self._before + self._size * done / total, self._what)

    def at(self, done: float, what: str) -> None:
        """How much of the total is done, in whatever process, and what to show beside it."""
        if self._bar is not None and self._task is not None:
            self._bar.start()
            self._bar.update(self._task, completed=done, total=self._total, description=what)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Around what is printed: on a terminal the bar would be in the middle of it.

        The bar is back when there is something new to show.
        """
        if self._bar is not None:
            self._bar.stop()
        yield


@contextlib.contextmanager
def waiting(what: str) -> Iterator[Waiting]:
    """Shows what is being waited for, until the end of the block.

    Example:
        >>> with waiting("reading") as wait:
        ...     wait.says("translating", total=10)
        ...     with wait.chunk(10):
        ...         wait.done(1, 2)
    """
    if not sys.stderr.isatty():
        yield Waiting(None)
        return
    bar = _make_bar()
    try:
        wait = Waiting(bar)
        wait.says(what)
        yield wait
    finally:
        bar.stop()


def _make_bar() -> "Progress":
    """Spinner, step and elapsed time; bar, counts and time left once there is a total.

    Rich is imported here, so that it is loaded only where a bar is seen.
    """
    from rich.console import Console, RenderableType
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    class Counted(ProgressColumn):
        """A column that is empty before the first progress."""

        def __init__(self, column: ProgressColumn) -> None:
            super().__init__(Column(no_wrap=True))
            self.column = column

        def render(self, task: Task) -> RenderableType:
            begun = task.total is not None and task.completed > 0
            return self.column.render(task) if begun else ""

    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        Counted(BarColumn(bar_width=8)),  # the whole line fits 80 columns
        Counted(MofNCompleteColumn()),
        TimeElapsedColumn(),
        Counted(TimeRemainingColumn()),
        console=Console(stderr=True),
        transient=True,
        refresh_per_second=5,  # it takes its time from the work that it shows
    )
