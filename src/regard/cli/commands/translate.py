"""`regard translate`: text in, one translation per line out, in the order of the input.

Everything that is not a translation goes to stderr, so that stdout can be piped. From a file or
folder into another is corpus_translation.py: any size, on one machine or on a Ray cluster.
"""

import enum
import functools
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from regard.cli import options, text_lines
from regard.cli.compile_cache import load_translator
from regard.cli.corpus.corpus_translation import Engine, how_to_resume, translate_corpus
from regard.cli.corpus.run_translator import Request
from regard.cli.failures import one_line_errors
from regard.cli.line_translation import Form, Pieces, translate_lines
from regard.cli.sentence_pairs import is_pipe
from regard.cli.terminal.waiting import Waiting, waiting
from regard.cli.text_lines import output

if TYPE_CHECKING:
    from regard.seq2seq.translation import Translation

MAP_WIDTH = 100  # columns of a drawn alignment, at most
NOTES = 5  # at most so many notes about copied lines
CORPUS = "Large files, with --in and --out"


class EngineName(enum.StrEnum):
    """Where the parts of a large file are translated."""

    PROCESS = "process"
    RAY = "ray"


def command(
    text: Annotated[
        list[str] | None,
        typer.Argument(help="The sentences to translate, each in quotation marks."),
    ] = None,
    model: options.Model = None,
    in_file: Annotated[
        Path | None,
        typer.Option(
            "--in",
            help="File with a sentence per line, plain or gzip; a folder of such files, with --out "
            "as another folder; - for stdin.",
            show_default="stdin",
        ),
    ] = None,
    out: options.Out = None,
    beam: options.Beam = 5,
    n_best: Annotated[
        int,
        typer.Option(
            min=1,
            help="How many translations to write for each sentence, at most --beam; if more than "
            "one, as lines: index ||| text ||| score.",
        ),
    ] = 1,
    length_penalty: options.LengthPenalty = 1.0,
    longest: Annotated[
        int,
        typer.Option(
            min=1, help="Translate a text of more tokens than this in parts, cut at sentence ends."
        ),
    ] = 95,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Write a JSON object per sentence, with words and attention."),
    ] = False,
    alignment: Annotated[
        bool,
        typer.Option(
            "--alignment",
            help="Add the word alignment: drawn on a terminal, otherwise as links i-j after a tab.",
        ),
    ] = False,
    no_cache: options.NoCache = False,
    engine: Annotated[
        EngineName,
        typer.Option(
            help="Where to translate: in this process, or on all machines of a Ray cluster.",
            rich_help_panel=CORPUS,
        ),
    ] = EngineName.PROCESS,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Address of the Ray cluster, with --engine ray.",
            show_default="what RAY_ADDRESS says, otherwise this machine alone",
            rich_help_panel=CORPUS,
        ),
    ] = None,
    part_lines: Annotated[
        int,
        typer.Option(
            min=1,
            help="Lines of a part: what is translated again after a kill, at most.",
            rich_help_panel=CORPUS,
        ),
    ] = 5000,
) -> None:
    """Translate sentences from the command line, a file, or stdin.

    With --in and --out, the files may have any size: they are translated in parts, which are kept
    in the folder OUT.parts until all are done. If the command is stopped, the same command resumes.
    """
    if text and in_file is not None:
        raise typer.BadParameter("text or --in, not both.", param_hint="--in")
    if n_best > beam:
        raise typer.BadParameter(f"at most the beam, {beam}. Got {n_best}.", param_hint="--n-best")
    if in_file is not None and str(in_file) == "-":
        in_file = Path("/dev/stdin")
    if address is not None and engine is not EngineName.RAY:
        raise typer.BadParameter("only with --engine ray.", param_hint="--address")
    if in_file is not None and out is not None and not (is_pipe(in_file) or is_pipe(out)):
        form = Form(n_best, as_json, alignment)
        request = Request(model, beam, length_penalty, longest, form, part_lines, no_cache)
        _from_file_into_file(in_file, out, request, engine, address)
        return
    if engine is not EngineName.PROCESS:
        raise typer.BadParameter("on files only, with --in and --out.", param_hint="--engine")
    read = () if text else (in_file or Path("/dev/stdin"),)
    with one_line_errors(), output(out, *read) as file:
        lines, total = _lines(text, in_file)
        show = _Show(file, n_best, as_json, alignment)
        with waiting("loading the model") as wait:
            from regard.seq2seq.decode.hypotheses import SearchOptions

            translator = load_translator(model, no_cache, longest=longest)
            search = SearchOptions(beam=beam, length_penalty=length_penalty)
            typed = not text and in_file is None and sys.stdin.isatty()
            if typed:  # no bar while somebody types
                with wait.aside():
                    typer.echo("one sentence per line; end with Ctrl-D", err=True)
                    _translate(translator, lines, 1, Waiting(None), show, search, n_best)
                return
            wait.says("translating", total, compiles="the search")
            _translate(translator, lines, text_lines.LINES, wait, show, search, n_best)


def _from_file_into_file(
    source: Path, out: Path, request: Request, engine: EngineName, address: str | None
) -> None:
    with one_line_errors():
        where: Engine | None = None
        if engine is EngineName.RAY:
            if importlib.util.find_spec("ray") is None:
                raise ImportError('ray is not installed. Fix: pip install "regard[ray]"')
            from regard.cli.corpus.ray_engine import translate_on_ray

            where = functools.partial(translate_on_ray, request=request, address=address)
        try:
            with waiting("reading") as wait:
                translate_corpus(source, out, request, wait, where)
        except KeyboardInterrupt:
            typer.echo(how_to_resume(out), err=True)
            raise typer.Exit(130) from None


def _lines(texts: list[str] | None, path: Path | None) -> tuple[Iterable[str], int | None]:
    """The input lines, and their number where it can be known in advance."""
    if texts:
        return text_lines.from_arguments(texts), len(texts)
    if path is None or str(path) == "/dev/stdin":
        return text_lines.from_stdin(), None
    if is_pipe(path):
        return text_lines.from_file(path), None
    # Read through first: an error in the last line should not come after half the output.
    return text_lines.from_file(path), sum(1 for _ in text_lines.from_file(path))


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
            found = list(
                translate_lines(
                    translator,
                    sources,
                    n_best=n_best,
                    weights=show.needs_weights,
                    progress=wait.done,
                    search=search,
                )
            )
        with wait.aside():
            for source, pieces in zip(sources, found, strict=True):
                show(source, pieces)
            show.file.flush()


class _Show:
    """Writes the translations of one line after the other, in the requested form."""

    def __init__(self, file: TextIO, n_best: int, as_json: bool, alignment: bool) -> None:
        self.file = file
        self.drawn = alignment and not as_json and file.isatty()
        self.form = Form(n_best, as_json, links=alignment and not self.drawn)
        self.needs_weights = self.drawn or self.form.needs_weights
        self.count = self.noted = 0

    def __call__(self, source: str, pieces: Pieces) -> None:
        lines = self.form.lines(self.count, self.form.render(source, pieces))
        self.count += 1
        note = next((piece[0].note for piece in pieces if piece[0].note), "")
        if note:
            self.noted += 1
            if self.noted <= NOTES:
                typer.echo(f"line {self.count}: {note}", err=True)
            elif self.noted == NOTES + 1:
                typer.echo("further lines were copied for the same kind of reason.", err=True)
        if not self.drawn:
            self.file.writelines(line + "\n" for line in lines)
            return
        for rank, line in enumerate(lines):
            print(line, file=self.file)
            for piece in pieces:
                one = piece[min(rank, len(piece) - 1)]
                if one.weights.size:
                    _draw(one)


def _draw(one: "Translation") -> None:
    """Draws the attention: a row for each target word, a column for each source word."""
    from rich.console import Console

    from regard.show import AttentionMap

    console = Console(highlight=False)
    seen = AttentionMap(one.weights, one.target_words, one.source_words, end="(end)")
    seen.print(width=min(console.width, MAP_WIDTH), console=console)
