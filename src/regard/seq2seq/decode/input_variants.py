"""Variants of an input text, of which the best translated one is used: for ordinary text.

A model trained on sentences fails on what its sentences did not have: capitals throughout, no
capitals at all, no full stop, an emoji, a tag, a name in another script, a long number. Such a text
is translated in several variants, and the translation with the best score is taken: the model's own
score decides, whatever its languages are. Spans that it cannot read are copied. A text with none of
this has one variant, the text as it is. restoring.py undoes the changes in the translation.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from regard.seq2seq.decode.spans import (
    SENTENCE_ENDS,
    Span,
    find_spans,
    foreign_script,
    rare_names,
    readable_words,
)
from regard.seq2seq.text.tokenizer import Encoded, Tokenizer
from regard.seq2seq.text.vocabulary import UNK
from regard.seq2seq.text.words import Words, split_words
from regard.seq2seq.translation import Translation

MOST = 8  # variants of a text
UNREADABLE = 2 / 3  # a text with a larger fraction of unreadable letters is not translated
_NUMERALS = tuple(str(number) for number in (20, 12, 50, 30, 15, 40, 60, 80, 70, 90))

# Gives names that the model copies unchanged, the commonest first.
StandIns = Callable[[], Sequence[str]]


@dataclass(frozen=True)
class Variant:
    """One form of a text.

    Attributes:
        words: the words of the form.
        glued: for each of them, whether there is no space before it.
        origin: for each of them its place in the text; -1 for a full stop that was added.
        copied: place of a word in the form -> the span of the text that it stands for.
        cut: spans that the form leaves out, to be inserted in the translation.
        lowered: places in the form of words that were in capitals.
        capitals: whether the whole text was.
        rescue: whether it is for a text that the model cannot make sense of in any other form.
    """

    words: tuple[str, ...]
    glued: tuple[bool, ...]
    origin: tuple[int, ...]
    copied: dict[int, Span]
    cut: tuple[Span, ...] = ()
    lowered: frozenset[int] = frozenset()
    capitals: bool = False
    rescue: bool = False

    @classmethod
    def of(cls, split: Words, stand_ins: dict[Span, str], cut: Sequence[Span]) -> "Variant":
        """A text with a name for some of its spans, and without some others."""
        if not stand_ins and not cut:
            return cls(split.words, split.glued, tuple(range(len(split))), {})
        words: list[str] = []
        glued: list[bool] = []
        origin: list[int] = []
        copied: dict[int, Span] = {}
        by_start = {span.start: span for span in (*stand_ins, *cut)}
        at, joins = 0, True
        while at < len(split):
            span, joins = by_start.get(at), joins and split.glued[at]
            if span is None:
                words.append(split.words[at])
                glued.append(joins and not (copied.get(len(words) - 2) and words[-1][0].isalnum()))
                origin.append(at)
                at, joins = at + 1, True
                continue
            if span in stand_ins:
                copied[len(words)] = span
                glued.append(joins and not (words and words[-1][-1:].isalnum()))
                words.append(stand_ins[span])
                origin.append(at)
            joins = span in stand_ins or (joins and all(split.glued[at + 1 : span.stop]))
            at = span.stop
        return cls(tuple(words), tuple(glued), tuple(origin), copied, tuple(cut))

    @property
    def split(self) -> Words:
        """The words of the form with their spaces."""
        return Words(self.words, self.glued)

    @property
    def ends(self) -> bool:
        """Whether a full stop, or the like, was added."""
        return self.origin[-1:] == (-1,)

    def followed_by(self, mark: str) -> "Variant":
        """The same with a mark at its end."""
        return replace(
            self,
            words=(*self.words, mark),
            glued=(*self.glued, True),
            origin=(*self.origin, -1),
        )

    def in_sentence_case(self, places: Sequence[int], letters: bool) -> "Variant":
        """The words at some places in small letters, but for the first word of each sentence.

        Args:
            places: which.
            letters: whether words of one letter are capitals.
        """
        words, begins = list(self.words), True
        for i, word in enumerate(words):
            small = word.lower() if i in places else word
            if begins or (letters and len(word) == 1):
                small = small[:1].upper() + small[1:]
            words[i] = small
            begins = (begins and not word[:1].isalnum()) or word[-1] in SENTENCE_ENDS
        lowered = frozenset(i for i in places if _in_capitals(self.words[i]))
        return replace(self, words=tuple(words), lowered=lowered)


@dataclass(frozen=True)
class Source:
    """A text and its variants, the most literal first; none where there is nothing to translate.

    Attributes:
        split: the words of the text.
        variants: its forms.
        encoded: the tokens of each.
        script: the script that the vocabulary lacks, if that is why there are no variants.
    """

    split: Words
    variants: tuple[Variant, ...] = ()
    encoded: tuple[Encoded, ...] = ()
    script: str = ""

    def copy(self) -> Translation:
        """The text as its own translation, each word aligned with itself."""
        words = self.split.words
        note = f"copied: the model knows no {self.script} letters" if self.script else ""
        return Translation(words, words, np.eye(len(words)), self.split.text, 0.0, 0.0, note)


def read_sources(
    texts: Sequence[str], tokenizer: Tokenizer, stand_ins: StandIns, adapt: bool
) -> list[Source]:
    """Each text with its variants.

    Args:
        texts: any.
        tokenizer: of the source.
        stand_ins: only called where a text needs them.
        adapt: False: every text has one variant, the text as it is.
    """
    splits = [split_words(text) for text in texts]
    pairs = zip(splits, tokenizer.encode_batch(splits), strict=True)
    if adapt:
        return [_source(split, encoded, tokenizer, stand_ins) for split, encoded in pairs]
    return [Source(split, (Variant.of(split, {}, ()),), (encoded,)) for split, encoded in pairs]


def _source(split: Words, encoded: Encoded, tokenizer: Tokenizer, stand_ins: StandIns) -> Source:
    words = split
    if UNK in encoded.ids:
        words = Words(tuple(readable_words(split, tokenizer)), split.glued)
        encoded = tokenizer.encode(words.text)
        if encoded.words != words.words:  # these words would be split in another way
            words, encoded = split, tokenizer.encode(split.text)
    spans = find_spans(words, encoded, tokenizer)
    unread = [i for span in spans if span.kind != "number" for i in range(span.start, span.stop)]
    letters = [sum(map(str.isalpha, word)) for word in split.words]
    if sum(letters) == 0 or sum(letters[i] for i in unread) > UNREADABLE * sum(letters):
        return Source(split, script=foreign_script(split.text, tokenizer))
    found: dict[object, tuple[Variant, Encoded]] = {}
    for form in _forms(words, spans, tokenizer, stand_ins):
        for cased in _cased(form, tokenizer):
            for variant in _ended(cased):
                same = variant.split == words  # of most texts, which should not be slowed
                tokens = encoded if same else tokenizer.encode(variant.split.text)
                if tokens.words == variant.words and tokens.ids:
                    found.setdefault((tokens.ids, *sorted(variant.copied)), (variant, tokens))
    least = min((tokens.ids.count(UNK) for _, tokens in found.values()), default=0)
    kept = [pair for pair in found.values() if pair[1].ids.count(UNK) == least][:MOST]
    if not kept:
        kept = [(Variant.of(split, {}, ()), encoded)]
    variants, tokens_of = zip(*kept, strict=True)
    return Source(split, variants, tokens_of)


def _forms(
    split: Words, spans: Sequence[Span], tokenizer: Tokenizer, stand_ins: StandIns
) -> Iterator[Variant]:
    """The text with its spans replaced or left out, in every way that is tried."""
    of_kind = {kind: [s for s in spans if s.kind == kind] for kind in ("symbol", "name", "number")}
    names, numbers, symbols = of_kind["name"], of_kind["number"], of_kind["symbol"]
    rare = [*names, *found] if (found := rare_names(split, spans, tokenizer)) else []
    there = {word.lower() for word in split.words}
    free: list[str] = []
    if names and tokenizer.kind == "word":
        free = ["\ue000"] * len(names)  # read as <unk>, which such a model has learned to copy
    elif names or rare:
        free = [name for name in stand_ins() if name.lower() not in there]
    numerals = [numeral for numeral in _NUMERALS if not any(numeral in word for word in there)]
    choices: list[tuple[dict[Span, str], list[Span]]] = [
        (dict(zip(names, free[turn:], strict=False)), symbols)
        for turn in range(0, min(len(free), 3 * len(names)) - len(names) + 1, max(len(names), 1))
        if names
    ]
    for copied, cut in choices or [({}, symbols)]:
        yield Variant.of(split, copied, cut)
    if 0 < len(rare) <= len(free):
        yield replace(Variant.of(split, dict(zip(rare, free, strict=False)), symbols), rescue=True)
    if names:
        yield Variant.of(split, {}, _in_order([*symbols, *names]))
    if 0 < len(numbers) <= len(numerals):
        swapped = dict(zip(numbers, numerals, strict=False))
        copied, cut = choices[0] if choices else ({}, symbols)
        yield Variant.of(split, copied | swapped, cut)
        yield Variant.of(split, copied, _in_order([*cut, *numbers]))


def _in_order(spans: list[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: span.start)


def _cased(form: Variant, tokenizer: Tokenizer) -> Iterator[Variant]:
    """The form as it is, and as an ordinary sentence where its capitals are not those of one."""
    yield form
    own = [i for i in range(len(form.words)) if i not in form.copied]
    text = "".join(form.words[i] for i in own)
    capitals = [i for i in own if _in_capitals(form.words[i])]
    if text == text.lower() != text.upper() or (text == text.upper() and capitals):
        form = replace(form, capitals=bool(capitals))
        yield form.in_sentence_case(own, False)
        if any(len(form.words[i]) == 1 and form.words[i].isalpha() for i in own):
            yield form.in_sentence_case(own, True)  # "I": whether a language has it, scores tell
    elif small := [i for i in own if _is_small_word(form.words[i], tokenizer)]:
        yield form.in_sentence_case(small, False)


def _ended(form: Variant) -> Iterator[Variant]:
    """The form as it is, and where it ends with a word, also with a full stop or question mark."""
    yield form
    last = form.words[-1] if form.words else ""
    if last[-1:].isalnum():
        yield from map(form.followed_by, "。？" if last[-1] > "\u2e80" else ".?")


def _in_capitals(word: str) -> bool:
    return word.isupper() and sum(map(str.isupper, word)) > 1


def _is_small_word(word: str, tokenizer: Tokenizer) -> bool:
    """Whether a word with capitals inside is one token in small letters, and several as it is."""
    if word[1:] == word[1:].lower():
        return False
    return len(tokenizer.encode(word.lower()).ids) == 1 < len(tokenizer.encode(word).ids)
