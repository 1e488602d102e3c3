"""The bar of waiting.py: in a file of its own, so that Rich is loaded only where a bar is seen."""

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)


def make_bar() -> Progress:
    """A spinner and what is being done; with a bar, once it is known how much that is."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        _Counted(BarColumn()),
        _Counted(MofNCompleteColumn()),
        _Counted(TimeRemainingColumn()),
        console=Console(stderr=True),
        transient=True,
        refresh_per_second=5,  # it takes its time from the work that it shows
    )


class _Counted(ProgressColumn):
    """A column that is empty where there is no total to count to."""

    def __init__(self, column: ProgressColumn) -> None:
        super().__init__()
        self.column = column

    def render(self, task: Task) -> RenderableType:
        return "" if task.total is None else self.column.render(task)
