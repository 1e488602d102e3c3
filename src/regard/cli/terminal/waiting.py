"""A bar on stderr while something takes its time; nothing where stderr is no terminal."""

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


class Waiting:
    """What is being done, and how much of it is done.

    Use `waiting()` to make one.

    Args:
        bar: to show it on; None: nobody looks.
    """

    def __init__(self, bar: "Progress | None") -> None:
        self._bar = bar
        self._task = None if bar is None else bar.add_task("", total=None)
        self._total: int | None = None
        self._before = self._size = 0

    def says(self, what: str, total: int | None = None) -> None:
        """Begins something: `total` is how much there is to do, where that is known."""
        self._total, self._before = total, 0
        if self._bar is not None and self._task is not None:
            self._bar.start()
            self._bar.reset(self._task, description=what, total=total)

    @contextlib.contextmanager
    def chunk(self, size: int) -> Iterator[None]:
        """Around the work on `size` of the total."""
        self._size = size
        yield
        self._before += size

    def done(self, done: float, total: float) -> None:
        """How much of the chunk is done; a translator's `progress`.

        It is counted in what `says` counts: a chunk of lines may have more parts than lines.
        """
        if self._bar is not None and self._task is not None:
            self._bar.start()
            so_far = self._before + self._size * done / total
            self._bar.update(self._task, completed=so_far, total=self._total)

    def at(self, done: float, what: str) -> None:
        """So much of the total is done, whoever did it, and what to say of it now."""
        if self._bar is not None and self._task is not None:
            self._bar.start()
            self._bar.update(self._task, completed=done, total=self._total, description=what)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Around what is printed: on a terminal it would go through the bar.

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
    from regard.cli.terminal.bar import make_bar

    bar = make_bar()
    try:
        wait = Waiting(bar)
        wait.says(what)
        yield wait
    finally:
        bar.stop()
