"""`regard translate --in FILE --out FILE`: a file of any size, in parts that survive a kill.

How parts are kept is resumable_output.py; here they are translated, and progress is shown.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import regard
from regard.cli.compile_cache import load_translator
from regard.cli.corpus.corpus_file import CorpusFile, Run, digest_of
from regard.cli.corpus.resumable_output import (
    PARTS,
    Parts,
    check_place,
    folder_of,
    read_manifest,
    run_corpus,
)
from regard.cli.line_translation import Form, translate_lines
from regard.cli.terminal.waiting import Waiting
from regard.seq2seq.distributed.launch import Process

if TYPE_CHECKING:
    from regard.seq2seq.translator import Translator

GREEDY_TOKENS = 2048  # of a batch: a fifth faster than 512 for greedy search, not for beams
LOG_EVERY = 60.0  # seconds between progress lines, where stderr is not a terminal


@dataclass(frozen=True)
class Request:
    """The options; all of them but `no_cache` are part of the job that the manifest records."""

    model: Path | None
    beam: int
    length_penalty: float
    longest: int
    form: Form
    part_lines: int
    no_cache: bool


def translate_corpus(
    source: Path, out: Path, request: Request, process: Process, wait: Waiting
) -> None:
    """Translates a file, and returns when all processes together have completed it.

    Args:
        source: a sentence per line, plain or gzip.
        out: the translation, compressed if its name ends in .gz.
        request: model and options.
        process: which one this is, of how many.
        wait: where to show the progress.

    Raises:
        ValueError: the source is not text, or was changed meanwhile; the folder for the parts is
            not ours; or its unfinished parts are of another file, model or options.
    """
    check_place(out)
    wait.says(f"reading {source.name}")
    file = CorpusFile(source, request.part_lines)
    job = _job(file, out, request)
    with Parts(out, job, stays=process.count > 1) as parts:
        pace = _Pace(wait, parts, job["lines"], out)
        if not parts.unfinished():
            pace.says(
                f"{out} is complete already, with the same lines, model and options. To translate "
                "again, remove it first."
            )
            return
        wait.says("loading the model")
        translator = load_translator(request.model, request.no_cache, longest=request.longest)
        work = _Work(translator, request, job["lines"], pace.at)
        pace.begin()
        run_corpus(file, parts, process, work, done=pace.done, waits=pace.waits)
        pace.end()


def _job(file: CorpusFile, out: Path, request: Request) -> dict[str, Any]:
    """Everything that the translation depends on, for the manifest."""
    from regard.seq2seq.model.model_folder import FILES, model_folder

    found = model_folder(request.model)
    job: dict[str, Any] = {
        "regard": regard.__version__,
        "source": file.digest,
        "model": digest_of([found / name for name in FILES]),
        "beam": request.beam,
        "length penalty": request.length_penalty,
        "longest": request.longest,
        "n-best": request.form.n_best,
        "json": request.form.as_json,
        "alignment": request.form.links,
        "lines of a part": request.part_lines,
    }
    # A later process need not count again.
    known = (read_manifest(out) or {"job": {}})["job"]
    if all(known.get(name) == value for name, value in job.items()):
        return known
    # Read through first: an error in the last line should not come after a day's work.
    lines, runs = file.count()
    return {**job, "lines": lines, PARTS: runs}


class _Work:
    """Translates runs of lines; each call is independent of the calls before."""

    def __init__(
        self,
        translator: "Translator",
        request: Request,
        lines: int,
        progress: Callable[[float], None],
    ) -> None:
        import jax

        from regard.seq2seq.decode.hypotheses import SearchOptions
        from regard.seq2seq.translator import HURRY

        self.translator, self.form, self.progress = translator, request.form, progress
        self.search = SearchOptions(beam=request.beam, length_penalty=request.length_penalty)
        self.whole_batches = lines > HURRY  # for fewer lines, compiling them would take longest
        greedy = request.beam == 1 and jax.default_backend() == "cpu"
        self.batch_tokens = GREEDY_TOKENS if greedy and self.whole_batches else None

    def __call__(self, run: Run) -> str:
        # Each line once, however often it is there, and lines of about one length together.
        distinct = sorted(dict.fromkeys(run.lines), key=len)
        found = translate_lines(
            self.translator,
            distinct,
            n_best=self.form.n_best,
            weights=self.form.needs_weights,
            progress=lambda done, total: self.progress(done / total),
            search=self.search,
            batch_tokens=self.batch_tokens,
            hurry=not self.whole_batches,
            whole_batches=self.whole_batches,
        )
        told = {
            line: self.form.told(line, pieces) for line, pieces in zip(distinct, found, strict=True)
        }
        return "".join(
            text + "\n"
            for index, line in enumerate(run.lines, run.first)
            for text in self.form.lines(index, told[line])
        )


class _Pace:
    """Shows the progress of all processes together: on a bar, or as a line per minute."""

    def __init__(self, wait: Waiting, parts: Parts, lines: int, out: Path) -> None:
        self.wait, self.parts, self.lines, self.out = wait, parts, lines, out
        self.own = 0
        self._begun = self._looked = self._said = time.monotonic()
        self._parts_before = 0

    def begin(self) -> None:
        self._parts_before = self.parts.count - len(self.parts.missing())
        self._begun = self._said = time.monotonic()
        self.wait.says("translating", self.lines, compiles="the search")

    def at(self, fraction: float) -> None:
        """Shows the progress, `fraction` of the current part being done."""
        now = time.monotonic()
        if now - self._looked < 1:
            return
        self._looked = now
        parts = self.parts.count - len(self.parts.missing())
        per_part = self.lines / self.parts.count
        lines = min((parts + fraction) * per_part, self.lines)
        speed = (parts + fraction - self._parts_before) * per_part / (now - self._begun)
        self.wait.at(lines, f"translating, {speed:,.0f} lines/s")
        self._log(f"{lines:,.0f} of {self.lines:,} lines, {speed:,.0f} lines/s")

    def done(self, run: Run) -> None:
        self.own += len(run.lines)
        self.at(0.0)

    def waits(self, count: int) -> None:
        what = f"waiting for {count} {'part' if count == 1 else 'parts'} of other processes"
        self.wait.at(self.lines * (1 - count / self.parts.count), what)
        self._log(what)

    def end(self) -> None:
        seconds = max(time.monotonic() - self._begun, 1e-9)
        if self.parts.count > 1 or self.parts.stays:
            self.says(
                f"{self.out}: {self.lines:,} lines, complete. This process translated {self.own:,} "
                f"of them in {seconds:,.1f} s, {self.own / seconds:,.0f} lines/s."
            )

    def _log(self, what: str) -> None:
        now = time.monotonic()
        if now - self._said >= LOG_EVERY and not sys.stderr.isatty():
            self._said = now
            self.says(what)

    def says(self, what: str) -> None:
        with self.wait.aside():
            typer.echo(what, err=True)


def how_to_resume(out: Path) -> str:
    """The message after an interrupt."""
    return f"stopped. Finished parts are in {folder_of(out)}; the same command resumes."
