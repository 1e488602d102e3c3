"""`regard demo`: translate with the bundled model, then train one from scratch and evaluate it.

The second model starts from random parameters and learns the built-in grammar in about two minutes.
The output of a training run is train_run.py.
"""

import contextlib
import itertools
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from regard.cli import train_run
from regard.cli.terminal.waiting import waiting

if TYPE_CHECKING:
    from regard.seq2seq.train.held_out import Judged
    from regard.seq2seq.train.settings import Settings
    from regard.show import AttentionMap

WIDTH = 80
MINUTES = 3  # on two cores, of which training has two

SENTENCES = (
    "Where is the library?",
    "She does not want to see the red car.",
    "I think that my brother is still sleeping.",
)

HELD_OUT = 500  # sentences that the small model is evaluated on
EXPECTED_MATCH, EXPECTED_AER = 95.0, 15.0  # percent: at least, at most
PICTURES = 3


def command(
    folder: Annotated[
        Path,
        typer.Option(metavar="FOLDER", help="Folder for the pictures and the trained model."),
    ] = Path("runs/demo"),
    recipe: Annotated[str, typer.Option(hidden=True)] = "demo",
    held_out: Annotated[int, typer.Option(hidden=True, min=1)] = HELD_OUT,
) -> None:
    """Translate with the bundled model, then train a small one (3 minutes on two cores)."""
    console = Console(width=min(WIDTH, Console().width), highlight=False)
    begun = time.monotonic()
    console.print()
    console.rule("[bold]regard[/] · a translator that shows what it attends to")
    console.print(
        f"\nThis takes about {MINUTES} minutes on two cores, most of it to train a model from "
        "scratch."
    )
    with train_run.plain_errors():
        _show_bundled(console)
        kept = _train_and_judge(console, folder, recipe, held_out)
        console.print(f"\nAll of it took {time.monotonic() - begun:.0f} seconds.")
    if not kept:
        raise typer.Exit(1)


def _show_bundled(console: Console) -> None:
    """Translates a few sentences with the model that comes with the package."""
    _heading(console, "1  English to French, by the bundled model")
    try:
        from regard.seq2seq.translator import Translator
        from regard.show import AttentionMap

        begun = time.monotonic()
        with waiting("loading the model") as wait:
            translator = Translator.load(None)
            wait.says("translating", len(SENTENCES), compiles="the search")
            found = translator.translate(list(SENTENCES))
    except (ImportError, OSError) as error:
        _indented(
            console,
            Text(f"This part is left out, because the bundled model cannot be loaded: {error}"),
        )
        return
    for sentence, (best, *_) in zip(SENTENCES, found, strict=True):
        _indented(console, Text(f"{sentence}\n→ {best.text}", style="bold"))
        drawn = AttentionMap(best.weights, best.target_words, best.source_words, end="(end)")
        drawn.print(width=WIDTH, console=console)
        console.print()
    taken = time.monotonic() - begun
    _indented(
        console,
        f"Each row is a French word: its attention over the English words when it was written.\n"
        f"Loading, compiling and translating: {taken:.1f} s.",
    )


def _train_and_judge(console: Console, folder: Path, recipe: str, held_out: int) -> bool:
    """Trains the small model, prints its figures beside the expected ones, and draws pictures.

    Returns:
        Whether the figures are as good as expected.
    """
    from regard.seq2seq.corpus import Grammar
    from regard.seq2seq.train.held_out import judge
    from regard.seq2seq.train.pairs import GRAMMAR_WORDS
    from regard.seq2seq.train.settings import Settings

    settings = Settings.named(recipe)
    _heading(console, "2  A small model, from scratch")
    _indented(
        console,
        "It learns English–French sentences of the built-in grammar, which knows their word "
        "alignments. The held-out sentences have combinations of words that are not in training.",
    )
    run = _fresh(folder / "run", settings)
    begun = time.monotonic()
    console.print()
    result, ready = train_run.run_training(settings, run, Console(stderr=True, highlight=False))
    trained = time.monotonic() - begun

    _heading(console, "3  How good it is")
    data = settings.data
    words = min(data.max_words, GRAMMAR_WORDS)
    test = list(Grammar(held_out, "test", scope=data.scope, max_words=words))
    found = judge(result.model, ready.tokenizers, test, settings.batches)
    judged = time.monotonic() - begun - trained
    _indented(console, _figures(found))
    _indented(
        console,
        "Each French word is aligned with the English word that has the largest weight in the step "
        "that writes it.\n"
        f"Training took {trained:.0f} seconds, evaluation {judged:.0f}.\n",
    )
    shown = _worth_showing(found)
    for place in shown[:1]:
        _indented(console, Text(f"{test[place].source}\n→ {found.texts[place]}", style="bold"))
        _map_of(found, place).print(width=WIDTH, console=console)
    console.print()
    try:
        for picture in _draw(folder, run, found, shown):
            console.print(f"picture: {picture}", markup=False, soft_wrap=True)
    except ImportError as error:  # all else has been shown
        console.print(f"no pictures: {error}", markup=False)
    model = run / "model"
    following = f'next: regard translate --model {model} "The small cat sleeps."'
    console.print(following, markup=False, soft_wrap=True)
    console.print("      regard tour, regard train --help")
    return all(kept for *_, kept in _expectations(found))


def _fresh(run: Path, settings: "Settings") -> Path:
    """The run's folder, after removing the run of an earlier demo.

    Args:
        run: the folder.
        settings: the demo's, by which an earlier run of it is known.
    """
    from regard.seq2seq.text import tokenizer_pair
    from regard.seq2seq.train.settings import FILE

    if run.exists() and (names := {path.name for path in run.iterdir()}):
        # A demo that was interrupted early has no settings yet.
        ours = names <= {".lock", tokenizer_pair.FILE}
        if FILE in names:
            with contextlib.suppress(ValueError):  # of another version, or damaged: not ours
                ours = type(settings).load(run / FILE) == settings
        if not ours:
            raise FileExistsError(
                f"the demo trains in {run}, which has files of something else in it. "
                "Fix: another --folder, or remove it."
            )
        shutil.rmtree(run)
    return run


def _figures(found: "Judged") -> Table:
    """A table of the measured figures beside the expected ones."""
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False)
    table.add_column(f"on {len(found.pairs)} held-out sentences")
    table.add_column("here", justify="right", style="bold")
    table.add_column("expected", justify="right")
    table.add_column("")
    for name, value, promise, kept in _expectations(found):
        table.add_row(name, f"{value:.1f} %", promise, "reached" if kept else "NOT REACHED")
    table.add_row("BLEU", f"{found.bleu.value:.1f}", "", "")
    return table


def _expectations(found: "Judged") -> list[tuple[str, float, str, bool]]:
    """For each expected figure: name, measured value, expectation, and whether it is reached."""
    exact, aer = found.exact, found.alignment.aer
    return [
        ("exact match", exact, f"at least {EXPECTED_MATCH:.0f} %", exact >= EXPECTED_MATCH),
        ("alignment error rate", aer, f"at most {EXPECTED_AER:.0f} %", aer <= EXPECTED_AER),
    ]


def _worth_showing(found: "Judged") -> list[int]:
    """The correctly translated sentences with the most crossing links."""

    def crossings(place: int) -> int:
        links = found.pairs[place].links
        sure = sorted(links.sure) if links is not None else []
        return sum(j > k for (_, j), (_, k) in itertools.pairwise(sure))

    right = [i for i, pair in enumerate(found.pairs) if found.texts[i] == pair.target]
    return sorted(right or range(len(found.pairs)), key=crossings, reverse=True)[:PICTURES]


def _map_of(found: "Judged", place: int, title: str = "") -> "AttentionMap":
    from regard.seq2seq.text.words import split_words
    from regard.show import AttentionMap

    pair = found.pairs[place]
    labels = split_words(pair.target).words, split_words(pair.source).words
    return AttentionMap(found.weights[place], *labels, title=title, end="(end)")


def _draw(folder: Path, run: Path, found: "Judged", places: list[int]) -> list[Path]:
    """Draws the curves, and an attention map for each of a few sentences."""
    from regard.seq2seq.train.curves import draw_curves

    pictures = [draw_curves(run / "log.csv", folder / "curves.png")]
    for number, place in enumerate(places, 1):
        drawn = _map_of(found, place, found.pairs[place].target)
        pictures.append(drawn.save(folder / f"alignment-{number}.png"))
    return pictures


def _heading(console: Console, title: str) -> None:
    console.print(f"\n[bold cyan]{title}[/]")


def _indented(console: Console, what: RenderableType) -> None:
    console.print(Padding(what, (0, 0, 0, 3), expand=False))
