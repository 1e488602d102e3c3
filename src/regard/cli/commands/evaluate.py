"""`regard evaluate`: the quality of a model's translations and alignments on given pairs.

BLEU and chrF come with sacrebleu's signature. How the numbers are computed is
regard.seq2seq.metrics; the picture is length_plot.py.
"""

import dataclasses
import enum
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli import options
from regard.cli.compile_cache import load_translator
from regard.cli.failures import one_line_errors
from regard.cli.line_translation import Form, translate_lines
from regard.cli.sentence_pairs import check_usage, read_corpus, readable_twice
from regard.cli.terminal.waiting import Waiting, waiting
from regard.cli.text_lines import check_not_read, output

if TYPE_CHECKING:
    from regard.seq2seq.corpus import Pair
    from regard.seq2seq.decode.hypotheses import SearchOptions
    from regard.seq2seq.metrics import AlignmentScore
    from regard.seq2seq.translator import Translator


class Scope(enum.StrEnum):
    """Vocabulary sizes of the built-in grammar."""

    demo = "demo"
    full = "full"


class Tokenize(enum.StrEnum):
    """sacrebleu's tokenizers."""

    mteval = "13a"
    international = "intl"
    characters = "char"
    chinese = "zh"
    none = "none"


def command(
    source: options.Source = None,
    target: options.Target = None,
    tsv: options.Tsv = None,
    grammar: Annotated[
        Scope | None,
        typer.Option(
            metavar="SCOPE",
            help="Evaluate on held-out sentences of the built-in English-French grammar, which "
            "have gold links.",
        ),
    ] = None,
    count: Annotated[
        int,
        typer.Option(min=1, max=1_000_000, help="How many sentences of --grammar to evaluate on."),
    ] = 500,
    model: options.Model = None,
    gold_links: Annotated[
        Path | None,
        typer.Option(
            help="File of gold links for --source and --target, which are then split into words at "
            "spaces only."
        ),
    ] = None,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Ignore upper case.")] = False,
    tokenize: Annotated[
        Tokenize,
        typer.Option(
            metavar="NAME",
            help="Tokenizer of sacrebleu for BLEU; none for text that is already tokenized.",
        ),
    ] = Tokenize.mteval,
    beam: options.Beam = 5,
    length_penalty: options.LengthPenalty = 1.0,
    plot: Annotated[
        Path | None,
        typer.Option(help="PNG file for a plot of BLEU against source length."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write the numbers as JSON.")] = False,
    out: options.Out = None,
    no_cache: options.NoCache = False,
) -> None:
    """Evaluate a model: BLEU, chrF, exact match, alignment error rate, BLEU by length."""
    check_usage(tsv, source, target, grammar is not None)
    if gold_links is not None and source is None:
        raise typer.BadParameter("needs --source and --target.", param_hint="--gold-links")
    with (
        one_line_errors(),
        output(out, tsv, source, target, gold_links) as file,
        readable_twice(tsv, source, target, gold_links) as (tsv, source, target, gold_links),
        waiting("reading") as wait,
    ):
        pairs = _pairs(tsv, source, target, gold_links, grammar, count)
        if plot is not None:
            check_not_read(plot, tsv, source, target, gold_links)
            _check_plot(plot)
        wait.says("loading the model")
        from regard.seq2seq.decode.hypotheses import SearchOptions

        translator = load_translator(model, no_cache)
        search = SearchOptions(beam=beam, length_penalty=length_penalty)
        texts = _translated(translator, pairs, search, wait)
        aligned = _aligned(translator, pairs, grammar is None, wait)
        wait.says("counting")
        scores = _scores(pairs, texts, aligned, lowercase, tokenize.value)
        with wait.aside():
            if as_json:
                print(json.dumps(scores, indent=1, ensure_ascii=False), file=file)
            else:
                _print(scores, file)
        if plot is not None:
            from regard.cli.length_plot import draw_lengths

            drawn = draw_lengths({"": scores["bleu_by_length"]}, plot)
            typer.echo(f"picture: {drawn}", err=True)


def _pairs(
    tsv: Path | None,
    source: Path | None,
    target: Path | None,
    links: Path | None,
    grammar: Scope | None,
    count: int,
) -> list["Pair"]:
    if grammar is None:
        return list(read_corpus(tsv, source, target, links, to_align=links is not None))
    from regard.seq2seq.corpus import Grammar

    return list(Grammar(count, "test", scope=grammar.value))


def _translated(
    translator: "Translator", pairs: list["Pair"], search: "SearchOptions", wait: Waiting
) -> list[str]:
    wait.says("translating", len(pairs), compiles="the search")
    with wait.chunk(len(pairs)):
        sources = [pair.source for pair in pairs]
        found = translate_lines(translator, sources, progress=wait.done, search=search)
        return [
            Form().render(source, pieces)[0] for source, pieces in zip(sources, found, strict=True)
        ]


def _aligned(
    translator: "Translator", pairs: list["Pair"], tokenized: bool, wait: Waiting
) -> "dict[str, AlignmentScore]":
    """The alignment error of forced decoding by each of the looks that `regard align --look` has;
    empty unless every pair has gold links.
    """
    gold = [pair.links for pair in pairs if pair.links is not None]
    if len(gold) < len(pairs):
        return {}
    from regard.seq2seq.metrics import alignment_error

    wait.says("aligning", len(pairs), compiles="the forced decoding")
    given: list[tuple[Any, Any]] = [(pair.source, pair.target) for pair in pairs]
    if tokenized:
        given = [(source.split(), target.split()) for source, target in given]
    with wait.chunk(len(pairs)):
        found = translator.align_by(translator.looks, given, progress=wait.done)
    return {
        look: alignment_error([one.links() for one in of_look], gold)
        for look, of_look in found.items()
    }


def _scores(
    pairs: list["Pair"],
    texts: list[str],
    aligned: "dict[str, AlignmentScore]",
    lowercase: bool,
    tokenize: str,
) -> dict[str, Any]:
    """All numbers, in JSON types."""
    from regard.seq2seq.metrics import bleu, bleu_by_length, chrf, exact_match
    from regard.seq2seq.text.words import normalize

    references = [pair.target for pair in pairs]
    sources = [pair.source for pair in pairs]
    how: Any = dict(lowercase=lowercase, tokenize=tokenize)
    # For exact match, typographic apostrophes are normalized. BLEU and chrF take the references
    # unchanged, so that they can be compared with published ones.
    same = [[normalize(text, lowercase=lowercase) for text in side] for side in (texts, references)]
    bins = bleu_by_length(sources, texts, references, **how)
    looks = {look: dataclasses.asdict(score) for look, score in aligned.items()}
    return {
        "sentences": len(pairs),
        "bleu": dataclasses.asdict(bleu(texts, references, **how)),
        "chrf": dataclasses.asdict(chrf(texts, references, lowercase=lowercase)),
        "exact_match": exact_match(*same),
        # The first is Bahdanau's own: the weights with which each word was written.
        "alignment": looks.get("writing"),
        "alignment_by_look": looks or None,
        "bleu_by_length": [dataclasses.asdict(one) for one in bins],
    }


def _print(scores: dict[str, Any], file: Any) -> None:
    print(f"sentences    {scores['sentences']:,}", file=file)
    for name, key in (("BLEU", "bleu"), ("chrF", "chrf")):
        print(f"{name:<12} {scores[key]['value']:.2f}  {scores[key]['signature']}", file=file)
    print(f"exact match  {scores['exact_match']:.1f} %", file=file)
    for look, aligned in (scores["alignment_by_look"] or {}).items():
        numbers = f"precision {aligned['precision']:.1f}, recall {aligned['recall']:.1f}"
        print(f"AER          {aligned['aer']:.1f}  {numbers}  (--look {look})", file=file)
    print("\nsource words  sentences  BLEU", file=file)
    for one in scores["bleu_by_length"]:
        last = one["longest"]
        span = f"{one['shortest']}+" if last is None else f"{one['shortest']}-{last}"
        value = "-" if one["bleu"] is None else f"{one['bleu']:.1f}"
        print(f"{span:<13} {one['sentences']:>9,}  {value:>4}", file=file)


def _check_plot(path: Path) -> None:
    """Raises before the translation what would make the plot fail after it."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise ImportError('--plot needs matplotlib. Fix: pip install "regard[show]"') from None
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder of the plot does not exist: {path.parent}")
