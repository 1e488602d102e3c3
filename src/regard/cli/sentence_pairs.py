"""The sentence pairs that a command is given, checked before anything is written."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from regard.seq2seq.corpus import Pair, ParallelFiles, TabSeparated


def check_usage(tsv: Path | None, source: Path | None, target: Path | None, *others: bool) -> None:
    """That exactly one kind of pairs is named.

    Raises:
        typer.BadParameter: none, or more than one, or one file of two.
    """
    if (source is None) != (target is None):
        lacking = "--target" if target is None else "--source"
        raise typer.BadParameter("--source and --target go together.", param_hint=lacking)
    if sum((tsv is not None, source is not None, *others)) != 1:
        known = "--tsv, or --source and --target" + (", or --grammar" if others else "")
        raise typer.BadParameter(f"name one corpus: {known}.")


def read_corpus(
    tsv: Path | None, source: Path | None, target: Path | None, links: Path | None = None
) -> "ParallelFiles | TabSeparated":
    """The pairs of a file or two, every one of them; read through once to see that it can be.

    Its `report` says how many there are.

    Raises:
        ValueError: files of unequal length, an empty file, a line that is no pair or no UTF-8;
            with file and line.
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
        for _ in corpus:
            pass
    except UnicodeDecodeError as error:  # the texts' own would be a CorpusError
        raise CorpusError(f"{links}: not UTF-8: {error}.") from None
    if corpus.report.dropped:
        # What comes out has a line for every line that goes in.
        reason, count = corpus.report.dropped.most_common(1)[0]
        where = corpus.report.examples[reason][0]
        more = f", and {count - 1:,} more" if count > 1 else ""
        raise CorpusError(f"{where}: {reason}{more}. Fix: mend or remove the line.")
    return corpus


def in_chunks(pairs: Iterator["Pair"], size: int = 1024) -> Iterator[list["Pair"]]:
    """Pairs by the thousand."""
    while chunk := list(itertools.islice(pairs, size)):
        yield chunk
