"""`regard translate --in --out`: files of any size, in parts that survive a kill.

How parts are kept is resumable_output.py; here they are made, by an engine, and progress is shown.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

import regard
from regard.cli.corpus.corpus_files import CorpusFiles, Run, digest_of, pair_files
from regard.cli.corpus.resumable_output import Parts, check_place, folder_of, read_manifest
from regard.cli.corpus.run_translator import Request, RunTranslator
from regard.cli.terminal.waiting import Waiting

LOG_EVERY = 60.0  # seconds between progress lines, where stderr is not a terminal
FILES = "files"  # the entry of a job that has each file's name, lines and parts

# Runs of lines, and how many lines there are in all -> the index and translation of each run.
Engine = Callable[[Iterable[Run], int], Iterator[tuple[int, str]]]


def translate_corpus(
    source: Path, out: Path, request: Request, wait: Waiting, engine: Engine | None = None
) -> None:
    """Translates a file, or the files of a folder.

    Args:
        source: a sentence per line, plain or gzip; or a folder of such files.
        out: the translation, or the folder of the translations; compressed where a name ends in
            .gz.
        request: model and options.
        wait: where to show the progress.
        engine: where runs of lines are translated; None: in this process.

    Raises:
        ValueError: a source is not text, or was changed meanwhile; the folder for the parts is
            not ours; or its unfinished parts are of other files, another model or other options.
    """
    sources, outs = pair_files(source, out)
    if out.is_dir() and not source.is_dir():
        raise IsADirectoryError(f"--in is a file, so that --out must be one. Got the folder {out}.")
    check_place(out)
    wait.says(f"reading {source.name}")
    corpus = CorpusFiles(sources, request.part_lines)
    job = _job(corpus, out, request)
    lines = sum(count for _, count, _ in job[FILES])
    counts = [parts for *_, parts in job[FILES]]
    with Parts(out, job, list(zip(outs, counts, strict=True))) as parts:
        pace = _Pace(wait, parts, lines, out)
        translate = engine or _in_this_process(request, wait, pace)
        whole = False
        while not whole:  # a part that is found damaged at the end is made again
            if missing := set(parts.missing()):
                for index, text in translate(corpus.runs(missing), lines):
                    parts.write(index, text)
                    pace.finished()
            whole = parts.join()
        pace.end()


def _in_this_process(request: Request, wait: Waiting, pace: "_Pace") -> Engine:
    def translate(runs: Iterable[Run], lines: int) -> Iterator[tuple[int, str]]:
        wait.says("loading the model")
        run_translator = RunTranslator(request, lines)
        pace.begin()
        for run in runs:
            yield run.index, run_translator(run, pace.at)

    return translate


def _job(corpus: CorpusFiles, out: Path, request: Request) -> dict[str, Any]:
    """Everything that the translation depends on, for the manifest."""
    from regard.seq2seq.model import model_folder

    found = model_folder.model_folder(request.model)
    job: dict[str, Any] = {
        "regard": regard.__version__,
        "source": corpus.digest,
        "model": digest_of([found / name for name in model_folder.FILES]),
        "beam": request.beam,
        "length penalty": request.length_penalty,
        "longest": request.longest,
        "n-best": request.form.n_best,
        "json": request.form.as_json,
        "alignment": request.form.links,
        "lines of a part": request.part_lines,
    }
    # Resumed, nothing need be counted again.
    known = read_manifest(out) or {}
    if all(known.get(name) == value for name, value in job.items()):
        return known
    # Read through first: an error in the last line should not come after a day's work.
    names = [path.name for path in corpus.paths]
    counts = zip(names, corpus.count(), strict=True)
    return {**job, FILES: [[name, lines, parts] for name, (lines, parts) in counts]}


class _Pace:
    """Shows the progress: on a bar, or as a line per minute."""

    def __init__(self, wait: Waiting, parts: Parts, lines: int, out: Path) -> None:
        self.wait, self.lines, self.out, self.count = wait, lines, out, parts.count
        self._done = self._done_before = self.count - len(parts.missing())
        self._begun = self._looked = self._said = time.monotonic()

    def begin(self) -> None:
        self._begun = self._said = time.monotonic()
        self.wait.says("translating", self.lines, compiles="the search")

    def at(self, fraction: float) -> None:
        """Shows the progress, `fraction` of the current part being done."""
        now = time.monotonic()
        if now - self._looked < 1:
            return
        self._looked = now
        per_part = self.lines / self.count
        lines = min((self._done + fraction) * per_part, self.lines)
        speed = (self._done + fraction - self._done_before) * per_part / (now - self._begun)
        self.wait.at(lines, f"translating, {speed:,.0f} lines/s")
        if now - self._said >= LOG_EVERY and not sys.stderr.isatty():
            self._said = now
            self._says(f"{lines:,.0f} of {self.lines:,} lines, {speed:,.0f} lines/s")

    def finished(self) -> None:
        self._done += 1
        self.at(0.0)

    def end(self) -> None:
        if self.count > 1:
            seconds = max(time.monotonic() - self._begun, 1e-9)
            before = f"; {self._done_before} of {self.count} parts were there before"
            self._says(
                f"{self.out}: {self.lines:,} lines, complete, in {seconds:,.1f} s"
                f"{before if self._done_before else f', {self.lines / seconds:,.0f} lines/s'}."
            )

    def _says(self, what: str) -> None:
        with self.wait.aside():
            typer.echo(what, err=True)


def how_to_resume(out: Path) -> str:
    """The message after an interrupt."""
    return f"stopped. Finished parts are in {folder_of(out)}; the same command resumes."
