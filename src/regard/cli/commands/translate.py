"""`regard translate`: text in, one translation per line out, in the order of the input.

Everything that is not a translation goes to stderr, so that it pipes. From a file into a file is
corpus_translation.py: any size, any number of processes.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from regard.cli import options, text_lines
from regard.cli.corpus.corpus_translation import Request, how_to_go_on, translate_corpus
from regard.cli.corpus.which_process import which_process
from regard.cli.failures import one_line_errors
from regard.cli.loading import load_translator
from regard.cli.output import output
from regard.cli.terminal.waiting import Waiting, waiting
from regard.cli.translation_form import Form

if TYPE_CHECKING:
    from regard.seq2seq.translation import Translation

MAP_WIDTH = 100  # columns of an alignment, at most
NOTES = 5  # lines of which a note is printed
CORPUS = "From --in into --out"


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
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            min=1,
            help="How many share the work on --in, each with the same command and --out; without "
            "it, what Slurm, MPI or torchrun says.",
            rich_help_panel=CORPUS,
        ),
    ] = None,
    process_id: Annotated[
        int | None,
        typer.Option(
            "--process-id", min=0, help="Which of them this is, from 0.", rich_help_panel=CORPUS
        ),
    ] = None,
    part_lines: Annotated[
        int,
        typer.Option(
            "--part-lines",
            min=1,
            help="Lines that are kept together: what a killed process has to do again.",
            rich_help_panel=CORPUS,
        ),
    ] = 5000,
) -> None:
    """Translate sentences from the command line, a file, or stdin.

    From --in into --out, a file may have any size: it is read as a stream and translated in parts,
    in --out.parts. Killed, the same command goes on from there.
    """
    if text and in_file is not None:
        raise typer.BadParameter("text or --in, not both.", param_hint="--in")
    if n_best > beam:
        raise typer.BadParameter(f"at most the beam, {beam}. Got {n_best}.", param_hint="--n-best")
    if in_file is not None and out is not None and _are_files(in_file, out):
        form = Form(n_best, as_json, alignment)
        request = Request(model, beam, length_penalty, longest, form, part_lines, no_cache)
        _from_file_into_file(in_file, out, request, processes, process_id)
        return
    if processes is not None or process_id is not None:
        raise typer.BadParameter(
            "processes share the work on files, with --in and --out.", param_hint="--processes"
        )
    with one_line_errors(), output(out) as file:
        lines, total = _lines(text, in_file)
        show = _Show(file, n_best, as_json, alignment)
        with waiting("loading the model") as wait:
            from regard.seq2seq.decode.hypotheses import SearchOptions

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


def _are_files(source: Path, out: Path) -> bool:
    """Whether neither is a pipe or a device: parts are read again, and moved."""
    return all(path.is_file() or path.is_dir() or not path.exists() for path in (source, out))


def _from_file_into_file(
    source: Path, out: Path, request: Request, processes: int | None, process_id: int | None
) -> None:
    with one_line_errors():
        process = which_process(processes, process_id)
        try:
            with waiting("reading") as wait:
                translate_corpus(source, out, request, process, wait)
        except KeyboardInterrupt:
            typer.echo(how_to_go_on(out), err=True)
            raise typer.Exit(130) from None


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
        self.file = file
        self.drawn = alignment and not as_json and file.isatty()
        self.form = Form(n_best, as_json, links=alignment and not self.drawn)
        self.count = self.noted = 0

    def __call__(self, source: str, translations: list["Translation"]) -> None:
        lines = self.form.lines(self.count, self.form.told(source, translations))
        self.count += 1
        if translations[0].note:
            self.noted += 1
            if self.noted <= NOTES:
                typer.echo(f"line {self.count}: {translations[0].note}", err=True)
            elif self.noted == NOTES + 1:
                typer.echo("more lines were copied for such a reason.", err=True)
        if not self.drawn:
            self.file.writelines(line + "\n" for line in lines)
            return
        for line, one in zip(lines, translations, strict=True):
            print(line, file=self.file)
            if one.weights.size:
                _draw(one)


def _draw(one: "Translation") -> None:
    """A row for each word that was written, a column for each that was read."""
    from rich.console import Console

    from regard.show import AttentionMap

    console = Console(highlight=False)
    seen = AttentionMap(one.weights, one.target_words, one.source_words)
    seen.print(width=min(console.width, MAP_WIDTH), console=console)
