"""How good translations and alignments are.

BLEU and chrF are sacrebleu's, with its signature, so that a number can be compared with other
people's. Everything here takes text and links, from any source.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from regard.seq2seq.alignment import Link, Links
from regard.seq2seq.text.words import split_words


@dataclass(frozen=True)
class Score:
    """A number, and sacrebleu's account of how it was computed.

    Attributes:
        value: in percent, 0 to 100.
        signature: the settings, as they are quoted beside the number.
    """

    value: float
    signature: str

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.signature})"


def bleu(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    lowercase: bool = False,
    tokenize: str = "13a",
) -> Score:
    """BLEU of a whole corpus (Papineni et al. 2002; Post 2018).

    Example:
        >>> score = bleu(["Le chat noir dort ici."], ["Le chat noir dort là."])
        >>> print(score)
        53.73 (nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:...)

    Args:
        hypotheses: what was translated, as text.
        references: what should have been.
        lowercase: case does not count.
        tokenize: sacrebleu's tokenizer; "none" for text that is tokenized already.

    Raises:
        ValueError: not as many references as hypotheses, or none at all.
        ImportError: sacrebleu is not installed; the message has the pip command.
    """
    metric = _sacrebleu("BLEU")(lowercase=lowercase, tokenize=tokenize)
    return _corpus_score(metric, hypotheses, references)


def chrf(hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False) -> Score:
    """chrF, the F2 score of character n-grams (Popović 2015), of a whole corpus.

    Example:
        >>> print(chrf(["Le chat noir dort ici."], ["Le chat noir dort là."]))
        78.90 (nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:...)

    Args:
        hypotheses, references, lowercase: as for `bleu`.
    """
    return _corpus_score(_sacrebleu("CHRF")(lowercase=lowercase), hypotheses, references)


def exact_match(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """How many translations are the reference, to the letter, in percent.

    Example:
        >>> exact_match(["Il dort.", "Il mange."], ["Il dort.", "Elle mange."])
        50.0
    """
    _check_lengths(hypotheses, references)
    equal = sum(h == r for h, r in zip(hypotheses, references, strict=True))
    return 100.0 * equal / len(references)


@dataclass(frozen=True)
class LengthBin:
    """The sentences of one range of lengths, and their BLEU.

    Attributes:
        shortest, longest: source words; `longest` is None for the last bin, which is open.
        sentences: how many there are.
        bleu: of them; None where there are none.
    """

    shortest: int
    longest: int | None
    sentences: int
    bleu: float | None

    def __str__(self) -> str:
        span = f"{self.shortest}+" if self.longest is None else f"{self.shortest}-{self.longest}"
        return f"{span}: {'-' if self.bleu is None else format(self.bleu, '.1f')}"


def bleu_by_length(
    sources: Sequence[str],
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    edges: Sequence[int] = (10, 20, 30, 40, 50),
    lowercase: bool = False,
    tokenize: str = "13a",
) -> list[LengthBin]:
    """BLEU against the length of the source: the curve that shows what attention buys.

    Bahdanau et al. 2015, figure 2.

    Example:
        >>> bins = bleu_by_length(
        ...     ["one two", "one two three four"],
        ...     ["a b", "a b c d"],
        ...     ["a b", "a b c d"],
        ...     edges=(3,),
        ... )
        >>> [(bin.sentences, str(bin)) for bin in bins]
        [(1, '1-3: 0.0'), (1, '4+: 100.0')]

    Args:
        sources: the source sentences; their words are counted.
        hypotheses, references, lowercase, tokenize: as for `bleu`.
        edges: the longest source of each bin but the last, which takes the rest.
    """
    _check_lengths(hypotheses, references)
    _check_lengths(sources, references, "sources")
    lengths = [len(split_words(source)) for source in sources]
    bins = []
    for shortest, longest in zip((1, *(edge + 1 for edge in edges)), (*edges, None), strict=True):
        low = 0 if shortest == 1 else shortest  # an empty source is with the shortest
        inside = [
            i for i, n in enumerate(lengths) if low <= n and (longest is None or n <= longest)
        ]
        value = None
        if inside:
            chosen = [hypotheses[i] for i in inside], [references[i] for i in inside]
            value = bleu(*chosen, lowercase=lowercase, tokenize=tokenize).value
        bins.append(LengthBin(shortest, longest, len(inside), value))
    return bins


@dataclass(frozen=True)
class AlignmentScore:
    """How links compare with gold links, in percent.

    Attributes:
        aer: the alignment error rate, 100 · (1 − (|A∩S| + |A∩P|) / (|A| + |S|)) for links A, sure
            links S and possible links P.
        precision: how many links are possible, |A∩P| / |A|.
        recall: how many sure links were found, |A∩S| / |S|.
    """

    aer: float
    precision: float
    recall: float

    def __str__(self) -> str:
        return f"AER {self.aer:.1f}, precision {self.precision:.1f}, recall {self.recall:.1f}"


def alignment_error(predicted: Sequence[Iterable[Link]], gold: Sequence[Links]) -> AlignmentScore:
    """The alignment error rate of a corpus (Och and Ney 2003, 4.1).

    Example:
        >>> from regard.seq2seq.alignment import parse_links
        >>> print(alignment_error([{(0, 0), (1, 1), (2, 1)}], [parse_links("0-0 1-1 1p2")]))
        AER 20.0, precision 66.7, recall 100.0

    Args:
        predicted: for each sentence pair, links (source word, target word).
        gold: for each sentence pair, its gold links.

    Raises:
        ValueError: not as many predictions as gold alignments, or none at all.
    """
    _check_lengths(predicted, gold, "predicted", "gold")
    links = [frozenset(found) for found in predicted]
    total = sum(map(len, links))
    sure = sum(len(answer.sure) for answer in gold)
    in_sure = sum(len(a & answer.sure) for a, answer in zip(links, gold, strict=True))
    in_possible = sum(len(a & answer.possible) for a, answer in zip(links, gold, strict=True))
    return AlignmentScore(
        aer=100.0 * (1.0 - (in_sure + in_possible) / max(total + sure, 1)),
        precision=100.0 * in_possible / max(total, 1),
        recall=100.0 * in_sure / max(sure, 1),
    )


def _corpus_score(metric: Any, hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    _check_lengths(hypotheses, references)
    score = metric.corpus_score(list(hypotheses), [list(references)])
    return Score(float(score.score), str(metric.get_signature()))


def _check_lengths(
    first: Sequence[Any],
    second: Sequence[Any],
    first_name: str = "hypotheses",
    second_name: str = "references",
) -> None:
    if len(first) != len(second) or not second:
        raise ValueError(
            f"{first_name} and {second_name} must be as many, and at least one. Got "
            f"{len(first)} {first_name}, {len(second)} {second_name}."
        )


def _sacrebleu(metric: str) -> Any:
    try:
        from sacrebleu import metrics
    except ModuleNotFoundError as error:
        raise ImportError(
            "BLEU and chrF need sacrebleu, which is not installed.\n"
            'Install it with: pip install "regard[translate]"'
        ) from error
    return getattr(metrics, metric)
