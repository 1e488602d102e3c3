"""`regard translate`: text in, one translation per line out, in the order of the input.

Everything that is not a translation goes to stderr, so that it pipes.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from regard.cli import options, text_lines
from regard.cli.failures import one_line_errors
from regard.cli.loading import load_translator
from regard.cli.output import output
from regard.cli.waiting import Waiting, waiting

if TYPE_CHECKING:
    from regard.seq2seq.translation import Translation

MAP_WIDTH = 100  # columns of an alignment, at most


def command(
    text: Annotated[
        list[str] | None, typer.Argument(help="Sentences, each in quotation marks.")
    ] = None,
    model: options.Model = None,
    in_file: Annotated[
        Path | None,
        typer.Option("--in", help="File with a sentence per line, plain or gzip; else stdin."),
    ] = None,
    out: options.Out = None,
    beam: options.Beam = 5,
    n_best: Annotated[
        int,
        typer.Option(
            "--n-best", min=1, help="So many of each sentence, as lines: index ||| text ||| score."
        ),
    ] = 1,
    length_penalty: options.LengthPenalty = 1.0,
    longest: Annotated[
        int,
        typer.Option(
            "--longest", min=1, help="A text of more tokens is translated sentence by sentence."
        ),
    ] = 95,
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON object per sentence, with words and weights.")
    ] = False,
    alignment: Annotated[
        bool,
        typer.Option(
            "--alignment",
            help="Where the model looked: drawn on a terminal, else a tab and links i-j.",
        ),
    ] = False,
    no_cache: options.NoCache = False,
) -> None:
    """Translate sentences from the command line, a file, or stdin."""
    if text and in_file is not None:
        raise typer.BadParameter("text or --in, not both.", param_hint="--in")
    if n_best > beam:
        raise typer.BadParameter(f"at most the beam, {beam}. Got {n_best}.", param_hint="--n-best")
    with one_line_errors(), output(out) as file:
        lines, total = _lines(text, in_file)
        show = _Show(file, n_best, as_json, alignment)
        with waiting("loading the model") as wait:
            from regard.seq2seq.hypotheses import SearchOptions

            translator = load_translator(model, no_cache, longest=longest)
            search = SearchOptions(beam=beam, length_penalty=length_penalty)
            typed = not text and in_file is None and sys.stdin.isatty()
            if typed:  # a bar would get in the way of the typing
                with wait.aside():
                    typer.echo("one sentence per line; end with Ctrl-D", err=True)
                    _translate(translator, lines, 1, Waiting(None), show, search, n_best)
                return
            wait.says("translating", total)
            _translate(translator, lines, text_lines.LINES, wait, show, search, n_best)


def _lines(texts: list[str] | None, path: Path | None) -> tuple[Iterable[str], int | None]:
    """The input, and how many lines it has, where that can be known."""
    if texts:
        return text_lines.from_arguments(texts), len(texts)
    if path is not None:
        # Read through first: an error in the last line should not come after half the output.
        return text_lines.from_file(path), sum(1 for _ in text_lines.from_file(path))
    return text_lines.from_stdin(), None


def _translate(
    translator: Any,
    lines: Iterable[str],
    chunk: int,
    wait: Waiting,
    show: "_Show",
    search: Any,
    n_best: int,
) -> None:
    for sources in text_lines.chunks(lines, chunk):
        with wait.chunk(len(sources)):
            found = translator.translate(sources, search=search, n_best=n_best, progress=wait.done)
        with wait.aside():
            for source, translations in zip(sources, found, strict=True):
                show(source, translations)
            show.file.flush()


class _Show:
    """Writes the translations of one sentence after the other, in the form that was asked for."""

    def __init__(self, file: TextIO, n_best: int, as_json: bool, alignment: bool) -> None:
        self.file, self.n_best, self.as_json, self.alignment = file, n_best, as_json, alignment
        self.drawn = alignment and file.isatty()
        self.count = 0

    def __call__(self, source: str, translations: list["Translation"]) -> None:
        index, self.count = self.count, self.count + 1
        if self.as_json:
            from regard.seq2seq.translation import to_json

            told = {"source": source, "translations": [to_json(one) for one in translations]}
            print(json.dumps(told, ensure_ascii=False), file=self.file)
            return
        for one in translations:
            parts = [one.text]
            if self.n_best > 1:
                parts = [str(index), one.text, f"{one.score:.4f}"]
            if self.alignment and not self.drawn:
                from regard.seq2seq.alignment import format_links

                parts.append(format_links(one.links()))
            print(("\t" if self.n_best == 1 else " ||| ").join(parts), file=self.file)
            if self.drawn and one.weights.size:
                _draw(one)


def _draw(one: "Translation") -> None:
    """A row for each word that was written, a column for each that was read."""
    from rich.console import Console

    from regard.show import AttentionMap

    console = Console(highlight=False)
    seen = AttentionMap(one.weights, one.target_words, one.source_words)
    seen.print(width=min(console.width, MAP_WIDTH), console=console)
