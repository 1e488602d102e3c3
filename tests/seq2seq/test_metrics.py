"""Metrics: sacrebleu's own numbers, and alignment error rates that can be counted by hand."""

import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st

from regard.seq2seq.alignment import Links, parse_links
from regard.seq2seq.metrics import (
    LengthBin,
    alignment_error,
    bleu,
    bleu_by_length,
    chrf,
    exact_match,
)

HYPOTHESES = ["Le chat dort sur la table.", "Il ne mange pas de pain.", "Où est-elle allée ?"]
REFERENCES = ["Le chat dort sous la table.", "Il ne mange pas de pain.", "Où est-elle partie ?"]


def test_bleu_and_chrf_are_sacrebleus():
    ours, theirs = bleu(HYPOTHESES, REFERENCES), sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES])
    assert ours.value == theirs.score
    assert ours.signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    ours, theirs = chrf(HYPOTHESES, REFERENCES), sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES])
    assert ours.value == theirs.score
    assert "nc:6|nw:0" in ours.signature


def test_the_options_are_in_the_signature():
    loud = [text.upper() for text in HYPOTHESES]
    assert bleu(loud, HYPOTHESES, lowercase=True).value == pytest.approx(100.0)
    assert "case:lc" in bleu(loud, HYPOTHESES, lowercase=True).signature
    assert "tok:none" in bleu(loud, HYPOTHESES, tokenize="none").signature


def test_exact_match():
    assert exact_match(HYPOTHESES, REFERENCES) == pytest.approx(100 / 3)


def test_bleu_by_length_puts_every_sentence_into_one_bin():
    sources = ["a", "", "one two three", "one two three four five"]
    targets = ["x y z w", "x y z w", "x y z w", "wrong"]
    reference = ["x y z w"] * 4
    bins = bleu_by_length(sources, targets, reference, edges=(1, 3, 4))
    assert [(b.shortest, b.longest, b.sentences) for b in bins] == [
        (1, 1, 2),
        (2, 3, 1),
        (4, 4, 0),
        (5, None, 1),
    ]
    assert bins[0].bleu == pytest.approx(100.0)
    assert bins[2].bleu is None
    assert bins[3].bleu == pytest.approx(0.0)
    assert str(bins[2]) == "4-4: -"
    assert str(LengthBin(5, None, 1, 0.0)) == "5+: 0.0"


def test_alignment_error_by_hand():
    """A = 4 links, S = 3, A∩S = 2, A∩P = 3: AER = 1 − (2 + 3) / (4 + 3)."""
    gold = [parse_links("0-0 1-1 2p1"), parse_links("0-0")]
    score = alignment_error([{(0, 0), (2, 1), (3, 3)}, {(0, 0)}], gold)
    assert score.aer == pytest.approx(100 * (1 - 5 / 7))
    assert score.precision == pytest.approx(75.0)
    assert score.recall == pytest.approx(100 * 2 / 3)


LINKS = st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12)


@given(LINKS, LINKS, LINKS)
def test_alignment_error_is_a_percentage_and_gold_is_perfect(found, sure, possible):
    gold = Links(sure, possible)
    assert 0.0 <= alignment_error([found], [gold]).aer <= 100.0
    if sure:
        assert alignment_error([sure], [gold]).aer == pytest.approx(0.0)
        assert alignment_error([gold.possible], [gold]).aer == pytest.approx(0.0)
        assert alignment_error([set()], [gold]).aer == pytest.approx(100.0)


@pytest.mark.parametrize("metric", [bleu, chrf, exact_match])
@pytest.mark.parametrize(("hypotheses", "references"), [(["a"], []), ([], []), (["a"], ["a", "b"])])
def test_unequal_and_empty_are_refused(metric, hypotheses, references):
    message = (
        "hypotheses and references must be as many, and at least one. Got "
        f"{len(hypotheses)} hypotheses, {len(references)} references."
    )
    with pytest.raises(ValueError, match=message):
        metric(hypotheses, references)


def test_unequal_alignments_are_refused():
    with pytest.raises(ValueError, match="Got 1 predicted, 2 gold"):
        alignment_error([set()], [Links(set()), Links(set())])
