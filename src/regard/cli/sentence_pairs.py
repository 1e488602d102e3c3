"""The sentence pairs of align and evaluate, checked before anything is written."""

import contextlib
import itertools
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

LONGEST = 16_384  # characters of a sentence that is aligned

if TYPE_CHECKING:
    from regard.seq2seq.corpus import Pair, ParallelFiles, TabSeparated


def check_usage(tsv: Path | None, source: Path | None, target: Path | None, *others: bool) -> None:
    """Checks that exactly one corpus is named.

    Raises:
        typer.BadParameter: none, or more than one, or one file of two.
    """
    if (source is None) != (target is None):
        lacking = "--target" if target is None else "--source"
        raise typer.BadParameter("--source and --target go together.", param_hint=lacking)
    if sum((tsv is not None, source is not None, *others)) != 1:
        known = "--tsv, or --source and --target" + (", or --grammar" if others else "")
        raise typer.BadParameter(f"name one corpus: {known}.")


@contextlib.contextmanager
def readable_twice(*paths: Path | None) -> Iterator[list[Path | None]]:
    """Files that can be read more than once: a pipe is copied into a temporary file.

    Args:
        paths: as given to the command; - is stdin, None is no file.

    Yields:
        The paths to read from, in the same order. Errors in the block name the given paths.

    Raises:
        ValueError: stdin is closed, or is wanted twice.
    """
    stdin = [path for path in paths if path is not None and str(path) in ("-", "/dev/stdin")]
    if len(stdin) > 1:
        raise ValueError("only one file can be read from stdin. Fix: name a file for the others.")
    if stdin and sys.stdin is None:
        raise ValueError("stdin is closed. Fix: name a file.")
    with tempfile.TemporaryDirectory(prefix="regard-") as folder:
        copies: dict[Path, Path] = {}
        for number, path in enumerate(paths):
            if path is not None and (path in stdin or is_pipe(path)):
                copies[path] = Path(folder) / str(number)
                with (
                    (
                        contextlib.nullcontext(sys.stdin.buffer)
                        if path in stdin
                        else open(path, "rb")
                    ) as given,
                    open(copies[path], "wb") as copy,
                ):
                    shutil.copyfileobj(given, copy, 1 << 20)
        try:
            yield [path and copies.get(path, path) for path in paths]
        except ValueError as error:
            message = str(error)
            for path, copy_of in copies.items():
                message = message.replace(str(copy_of), "stdin" if path in stdin else str(path))
            raise ValueError(message) from error


def is_pipe(path: Path) -> bool:
    """Whether a path is a pipe or a device, which can be read only once."""
    return path.exists() and not path.is_file() and not path.is_dir()


def read_corpus(
    tsv: Path | None,
    source: Path | None,
    target: Path | None,
    links: Path | None = None,
    *,
    to_align: bool = False,
) -> "ParallelFiles | TabSeparated":
    """All pairs of a file or two, which are read once here to find any error in them.

    Its `report` says how many there are.

    Args:
        tsv, source, target, links: the files.
        to_align: whether the model will be made to write the targets, which takes memory for each
            pair of words: then no sentence may be too long.

    Raises:
        ValueError: files of unequal length, an empty file, a line that is no pair or no UTF-8;
            with file and line;
            or a sentence is too long.
    """
    from regard.seq2seq.corpus import Cleaning, CorpusError, ParallelFiles, TabSeparated

    cleaning = Cleaning.nothing()
    corpus: ParallelFiles | TabSeparated
    if tsv is not None:
        corpus = TabSeparated(tsv, cleaning=cleaning)
    else:
        # Both are there: see check_usage.
        corpus = ParallelFiles(source or "", target or "", links, cleaning=cleaning)
    try:
        for number, pair in enumerate(corpus, 1):
            size = max(len(pair.source), len(pair.target))
            if to_align and size > LONGEST:
                raise CorpusError(
                    f"{tsv or source}:{number}: a sentence of more than {LONGEST:,} characters "
                    f"cannot be aligned. Got {size:,}. Fix: cut it into sentences."
                )
    except UnicodeDecodeError as error:  # the texts' own would be a CorpusError
        raise CorpusError(f"{links}: not UTF-8: {error}.") from None
    if corpus.report.dropped:
        # The output must have a line for every line of the input.
        reason, count = corpus.report.dropped.most_common(1)[0]
        where = corpus.report.examples[reason][0]
        more = f", and {count - 1:,} more" if count > 1 else ""
        raise CorpusError(f"{where}: {reason}{more}. Fix: correct or remove the line.")
    return corpus


def in_chunks(pairs: Iterator["Pair"], size: int = 1024) -> Iterator[list["Pair"]]:
    """Pairs in lists of bounded length."""
    while chunk := list(itertools.islice(pairs, size)):
        yield chunk
