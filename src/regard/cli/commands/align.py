"""`regard align`: word alignments of given pairs, from a model's attention in forced decoding.

By default (--look explaining), also from how likely each source word alone makes the target word.
The output is Pharaoh's format: links `i-j`, a line per pair, words counted from 0.
"""

import enum
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from regard.cli import options
from regard.cli.compile_cache import load_translator
from regard.cli.failures import one_line_errors
from regard.cli.sentence_pairs import check_usage, in_chunks, read_corpus, readable_twice
from regard.cli.terminal.waiting import Waiting, waiting
from regard.cli.text_lines import output

if TYPE_CHECKING:
    from regard.seq2seq.alignment import Link, Links
    from regard.seq2seq.corpus import Pair
    from regard.seq2seq.translator import Look, Translator


class LookOf(enum.StrEnum):
    """Which attention links a target word, see `Translator.align`."""

    explaining = "explaining"
    writing = "writing"
    reading = "reading"


class Symmetrize(enum.StrEnum):
    """How the links of both directions are combined."""

    none = "none"
    intersection = "intersection"
    union = "union"
    grow_diag = "grow-diag"
    grow_diag_final_and = "grow-diag-final-and"


def command(
    source: options.Source = None,
    target: options.Target = None,
    tsv: options.Tsv = None,
    model: options.Model = None,
    reverse_model: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Model that translates from target to source; its links are combined with those "
            "of --model.",
        ),
    ] = None,
    symmetrize: Annotated[
        Symmetrize | None,
        typer.Option(
            help="How to combine the links of both directions.",
            show_default="grow-diag-final-and with --reverse-model, otherwise none",
        ),
    ] = None,
    look: Annotated[
        LookOf | None,
        typer.Option(
            show_default="explaining",
            help="Which attention links a target word: writing, that of the step that writes it; "
            "reading, that of the next step, which reads it; explaining, that of writing and how "
            "likely each source word alone makes the target word.",
        ),
    ] = None,
    threshold: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Drop links whose weight is not above this."),
    ] = 0.0,
    tokenized: Annotated[
        bool,
        typer.Option(
            "--tokenized", help="The text is tokenized: split it into words at spaces only."
        ),
    ] = False,
    gold: Annotated[
        Path | None,
        typer.Option(
            help="File of gold links, a line per pair: also print the alignment error rate of "
            "every --look and --symmetrize to stderr."
        ),
    ] = None,
    out: options.Out = None,
    no_cache: options.NoCache = False,
) -> None:
    """Align the words of sentence pairs, and write a line of links i-j for each pair.

    The link i-j connects source word i and target word j, both counted from 0.
    """
    check_usage(tsv, source, target)
    if symmetrize not in (None, Symmetrize.none) and reverse_model is None:
        raise typer.BadParameter("needs a --reverse-model.", param_hint="--symmetrize")
    if symmetrize is None:
        both = Symmetrize.grow_diag_final_and
        symmetrize = Symmetrize.none if reverse_model is None else both
    with (
        one_line_errors(),
        output(out, tsv, source, target, gold) as file,
        readable_twice(tsv, source, target, gold) as (tsv, source, target, gold),
        waiting("reading") as wait,
    ):
        corpus = read_corpus(tsv, source, target, to_align=True)
        answers = None if gold is None else _read_gold(gold, corpus, tokenized)
        wait.says("loading the model")
        folders = [model] if reverse_model is None else [model, reverse_model]
        translators = [load_translator(folder, no_cache) for folder in folders]
        wait.says("aligning", corpus.report.kept, compiles="the forced decoding")
        of_all = [name for name in translators[-1].looks if name in translators[0].looks]
        chosen: Look = of_all[-1] if look is None else look.value
        looks = [chosen] if answers is None else list(dict.fromkeys((*of_all, chosen)))
        kept: dict[tuple[str, str], list[frozenset[Link]]] = {}
        for pairs in in_chunks(iter(corpus)):
            with wait.chunk(len(pairs)):
                found = _links(translators, pairs, looks, threshold, tokenized, wait)
            with wait.aside():
                _write(found[chosen, symmetrize.value], file)
            if answers is not None:
                for option, links in found.items():
                    kept.setdefault(option, []).extend(links)
    if answers is not None:
        _print_errors(kept, answers)


def _links(
    translators: Sequence["Translator"],
    pairs: Sequence["Pair"],
    looks: Sequence["Look"],
    threshold: float,
    tokenized: bool,
    wait: Waiting,
) -> dict[tuple[str, str], list["frozenset[Link]"]]:
    """For each look and symmetrization, the links of every pair."""
    from regard.seq2seq.alignment import Symmetrization, symmetrize

    def read(text: str) -> Any:
        return text.split() if tokenized else text

    given = [(read(pair.source), read(pair.target)) for pair in pairs]
    turned = [(target, source) for source, target in given]
    aligned = [
        translator.align_by(looks, one, progress=wait.done)
        for translator, one in zip(translators, (given, turned), strict=False)
    ]
    found: dict[tuple[str, str], list[frozenset[Link]]] = {}
    for look in looks:
        forward = [one.links(threshold) for one in aligned[0][look]]
        found[look, "none"] = forward
        if len(translators) == 1:
            continue
        backward = [frozenset((i, j) for j, i in one.links(threshold)) for one in aligned[1][look]]
        found[look, "reverse model alone"] = backward
        for way in get_args(Symmetrization):
            both = zip(forward, backward, strict=True)
            found[look, way] = [symmetrize(there, back, way) for there, back in both]
    return found


def _write(alignments: Iterable["frozenset[Link]"], file: Any) -> None:
    from regard.seq2seq.alignment import format_links

    for links in alignments:
        print(format_links(links), file=file)
    file.flush()


def _read_gold(path: Path, corpus: Any, tokenized: bool) -> list["Links"]:
    from regard.seq2seq.alignment import read_links
    from regard.seq2seq.text.words import split_words

    try:
        gold = read_links(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error}.") from None
    pairs = list(corpus)
    if len(gold) != len(pairs):
        raise ValueError(
            f"{path}: gold links must have a line for each pair. Got {len(gold):,} lines, "
            f"{len(pairs):,} pairs."
        )
    fix = "links of these words" if tokenized else "--tokenized, where words are split at spaces"
    for number, (links, pair) in enumerate(zip(gold, pairs, strict=True), 1):
        counts = [
            len(text.split() if tokenized else split_words(text).words)
            for text in (pair.source, pair.target)
        ]
        links.check_words(counts[0], counts[1], f"{path}:{number}", fix)
    return gold


def _print_errors(
    kept: dict[tuple[str, str], list["frozenset[Link]"]], answers: list["Links"]
) -> None:
    """Prints the alignment error rate of every look and symmetrization, the best in bold."""
    from rich.console import Console
    from rich.table import Table

    from regard.seq2seq.metrics import alignment_error

    scores = {option: alignment_error(links, answers) for option, links in kept.items()}
    best = min(score.aer for score in scores.values())
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("look", "symmetrized"):
        table.add_column(name)
    for name in ("AER", "precision", "recall"):
        table.add_column(name, justify="right")
    for (look, way), score in scores.items():
        numbers = (f"{number:.1f}" for number in (score.aer, score.precision, score.recall))
        table.add_row(look, way, *numbers, style="bold" if score.aer == best else "")
    Console(stderr=True, highlight=False).print(table)
