"""The curves of a run, from its log: losses, BLEU and learning rate over steps, as a picture.

The log itself is log.py; Matplotlib is needed to draw, not to import this.
"""

from pathlib import Path
from typing import Any

from regard.atomic_file import write_atomically
from regard.seq2seq.train.log import read_log

Curve = tuple[list[int], list[float]]


def curve(rows: list[dict[str, str]], column: str) -> Curve:
    """The steps at which a column of a log has a value, and the values.

    Example:
        >>> rows = [{"step": "20", "train_nll": "3.5"}, {"step": "40", "train_nll": ""}]
        >>> curve(rows, "train_nll")
        ([20], [3.5])
    """
    found = [(int(row["step"]), float(row[column])) for row in rows if row.get(column)]
    return [step for step, _ in found], [value for _, value in found]


def draw_curves(log: str | Path, picture: str | Path) -> Path:
    """Draws a run's log.csv as a PNG: the loss and, if there is any, BLEU.

    Example:
        >>> import tempfile
        >>> from regard.seq2seq.train.curves import draw_curves
        >>> from regard.seq2seq.train.log import Log
        >>> folder = tempfile.mkdtemp()
        >>> log = Log(folder + "/log.csv")
        >>> for step in (20, 40, 60):
        ...     log.write(step=step, train_nll=100 / step, valid_loss=120 / step, valid_bleu=step)
        >>> draw_curves(log.path, folder + "/curves.png").name
        'curves.png'

    Args:
        log: the file.
        picture: the file to write.

    Returns:
        The picture's path.

    Raises:
        ImportError: Matplotlib is not installed; the message has the pip command.
        ValueError: the log has no numbers yet.
    """
    rows, picture = read_log(log), Path(picture)
    train, valid = curve(rows, "train_nll"), curve(rows, "valid_loss")
    if not train[0] and not valid[0]:
        raise ValueError(f"a log to draw must have a loss. Got {log} with {len(rows)} lines.")
    scores = curve(rows, "valid_bleu")
    figure = _figure(2 if scores[0] else 1)
    loss = figure.axes[0]
    loss.plot(*train, color="tab:blue", label="training, with dropout")
    if valid[0]:
        loss.plot(*valid, "o-", color="tab:orange", label="validation")
    loss.set(ylabel="−log p per token", yscale="log")
    loss.legend(frameon=False)
    if scores[0]:
        axes = figure.axes[1]
        axes.plot(*scores, "o-", color="tab:green", clip_on=False)
        best = max(scores[1])
        axes.set(ylabel="BLEU on the validation set", title=f"best {best:.1f}", ylim=(0, None))
    for axes in figure.axes:
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    write_atomically(picture, lambda file: figure.savefig(file, dpi=120, format="png"))
    return picture


def _figure(panels: int) -> Any:
    """A figure without pyplot, which would keep every figure open."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError(
            "Curves need Matplotlib, which is not installed.\n"
            'Install it with: pip install "regard[show]"'
        ) from error
    figure = Figure(figsize=(5.5 * panels, 3.6), layout="constrained")
    figure.subplots(1, panels)
    return figure
