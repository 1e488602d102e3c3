"""`regard demo`: translate with the bundled model, then train one from scratch and judge it.

Everything runs here and now: the second model starts from random numbers and learns the embedded
grammar in about two minutes. What a training run shows is train_run.py.
"""

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

if TYPE_CHECKING:
    from regard.seq2seq.train.held_out import Judged
    from regard.show import AttentionMap

WIDTH = 80
MINUTES = 3  # on two cores, of which training has two

SENTENCES = (
    "Where is the library?",
    "She does not want to see the red car.",
    "I think that my brother is still sleeping.",
)

HELD_OUT = 500  # sentences that the small model is judged on
PROMISED_MATCH, PROMISED_AER = 95.0, 15.0  # percent: at least, at most
PICTURES = 3


def command(
    folder: Annotated[
        Path, typer.Option("--folder", help="Where the pictures and the trained model go.")
    ] = Path("runs/demo"),
    recipe: Annotated[str, typer.Option(hidden=True)] = "demo",
    held_out: Annotated[int, typer.Option(hidden=True, min=1)] = HELD_OUT,
) -> None:
    """Translate with the bundled model, then train a small one: under 4 minutes on two cores."""
    console = Console(width=min(WIDTH, Console().width), highlight=False)
    begun = time.monotonic()
    console.print()
    console.rule("[bold]regard[/] · a translator that shows where it looks")
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
    """A few sentences by the model that comes with the package."""
    _heading(console, "1  English to French, by the bundled model")
    try:
        from regard.seq2seq.translator import Translator
        from regard.show import AttentionMap

        begun = time.monotonic()
        translator = Translator.load(None)
        found = translator.translate(list(SENTENCES))
    except (ImportError, OSError) as error:
        _indented(
            console, Text(f"The bundled model is not here, so this part is left out: {error}")
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
        f"Each row is a French word: how much the model looked at each English one to write it.\n"
        f"Loading, compiling and translating: {taken:.1f} s.",
    )


def _train_and_judge(console: Console, folder: Path, recipe: str, held_out: int) -> bool:
    """Trains the small model, prints its figures beside the promises, and draws the pictures.

    Returns:
        Whether the promises are kept.
    """
    from regard.seq2seq.corpus import Grammar
    from regard.seq2seq.train.held_out import judge
    from regard.seq2seq.train.pairs import GRAMMAR_WORDS
    from regard.seq2seq.train.settings import Settings

    settings = Settings.named(recipe)
    _heading(console, "2  A small model, from scratch")
    _indented(
        console,
        "English–French sentences of the package's own grammar, which knows which word came from "
        "which. Held out are combinations of words that no training sentence has.",
    )
    run = _fresh(folder / "run")
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
        "Aligned is each French word with the English one that was looked at most by the step "
        "that writes it.\n"
        f"Training took {trained:.0f} seconds, judging {judged:.0f}.\n",
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
    return all(kept for *_, kept in _promises(found))


def _fresh(run: Path) -> Path:
    """The run's folder, without the run that an earlier demo left there."""
    from regard.seq2seq.text import tokenizer_pair
    from regard.seq2seq.train import settings

    if run.exists() and any(run.iterdir()):
        ours = (settings.FILE, tokenizer_pair.FILE)  # one of them, where it was cut short
        if not any((run / name).exists() for name in ours):
            raise FileExistsError(
                f"the demo trains in {run}, and there is something else in it. "
                "Fix: --folder names another place."
            )
        shutil.rmtree(run)
    return run


def _figures(found: "Judged") -> Table:
    """What was measured beside what was promised."""
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False)
    table.add_column(f"on {len(found.pairs)} held-out sentences")
    table.add_column("here", justify="right", style="bold")
    table.add_column("promised", justify="right")
    table.add_column("")
    for name, value, promise, kept in _promises(found):
        table.add_row(name, f"{value:.1f} %", promise, "kept" if kept else "NOT KEPT")
    table.add_row("BLEU", f"{found.bleu.value:.1f}", "", "")
    return table


def _promises(found: "Judged") -> list[tuple[str, float, str, bool]]:
    """What is promised: a name, what came of it, the promise in words, whether it is kept."""
    exact, aer = found.exact, found.alignment.aer
    return [
        ("exact match", exact, f"at least {PROMISED_MATCH:.0f} %", exact >= PROMISED_MATCH),
        ("alignment error rate", aer, f"at most {PROMISED_AER:.0f} %", aer <= PROMISED_AER),
    ]


def _worth_showing(found: "Judged") -> list[int]:
    """The sentences that were translated rightly and whose words change places most often."""

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
    """The curves, and a map for each of a few sentences."""
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
