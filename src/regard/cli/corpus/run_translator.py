"""Translates a run of lines as the text that is written for it; every engine does this alike."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from regard.cli.compile_cache import load_translator
from regard.cli.corpus.corpus_files import Run
from regard.cli.line_translation import Form, translate_lines

GREEDY_TOKENS = 2048  # of a batch: a fifth faster than 512 for greedy search, not for beams


@dataclass(frozen=True)
class Request:
    """The options that the translations depend on, and `no_cache`."""

    model: Path | None
    beam: int
    length_penalty: float
    longest: int
    form: Form
    part_lines: int
    no_cache: bool


class RunTranslator:
    """Translates runs of lines; each call is independent of the calls before.

    Args:
        request: model and options.
        lines: how many there are in all: for few, compiling fast programs would take longest.
    """

    def __init__(self, request: Request, lines: int) -> None:
        import jax

        from regard.seq2seq.decode.hypotheses import SearchOptions
        from regard.seq2seq.translator import HURRY

        self.form = request.form
        self.translator = load_translator(request.model, request.no_cache, longest=request.longest)
        self.search = SearchOptions(beam=request.beam, length_penalty=request.length_penalty)
        self.whole_batches = lines > HURRY
        greedy = request.beam == 1 and jax.default_backend() == "cpu"
        self.batch_tokens = GREEDY_TOKENS if greedy and self.whole_batches else None

    def __call__(self, run: Run, progress: Callable[[float], None] = lambda done: None) -> str:
        # Each line once, however often it is there, and lines of about one length together.
        distinct = sorted(dict.fromkeys(run.lines), key=len)
        found = translate_lines(
            self.translator,
            distinct,
            n_best=self.form.n_best,
            weights=self.form.needs_weights,
            progress=lambda done, total: progress(done / total),
            search=self.search,
            batch_tokens=self.batch_tokens,
            hurry=not self.whole_batches,
            whole_batches=self.whole_batches,
        )
        rendered = {
            line: self.form.render(line, pieces)
            for line, pieces in zip(distinct, found, strict=True)
        }
        return "".join(
            text + "\n"
            for index, line in enumerate(run.lines, run.first)
            for text in self.form.lines(index, rendered[line])
        )
