"""Learning a vocabulary: the commonest words, or byte-pair merges.

Merges are learned by the package `tokenizers`; words are only counted. `tokenizer.py` decides which
text is read, and how its words are marked.
"""

import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from regard.seq2seq.text.marks import CAPITAL, START

# The token ids that every vocabulary begins with.
PAD, UNK, BOS, EOS = range(4)
SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>")

Learned = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]


def learn_words(
    lines: Iterable[Sequence[str]], *, size: int, min_count: int, extra: Sequence[str] = ()
) -> Learned:
    """The commonest words; among equally common ones, in the order of the alphabet.

    `extra` are entries that the vocabulary always has.

    Example:
        >>> learn_words([["a", "cat"], ["a", "dog"]], size=6, min_count=1)
        (('<pad>', '<unk>', '<bos>', '<eos>', 'a', 'cat'), ())
    """
    counts = _counted(lines, size - len(extra))
    common = sorted(counts, key=lambda word: (-counts[word], word))
    first = (*SPECIAL, *extra)
    words = [word for word in common if counts[word] >= min_count and word not in first]
    return (*first, *words[: size - len(first)]), ()


def learn_merges(
    lines: Iterable[Sequence[str]], *, size: int, min_count: int, extra: Sequence[str] = ()
) -> Learned:
    """Byte-pair encoding (Sennrich et al. 2016): characters, then their most frequent merges.

    A word is written with `▁` in front. At most half of the vocabulary are single characters, the
    commonest; all others are <unk>.

    Raises:
        ImportError: tokenizers is not installed; the message has the pip command.
    """
    counts = _counted(lines, size - len(extra))
    tokenizers = tokenizers_package()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=SPECIAL[UNK]))
    alphabet = _alphabet(counts, max((size - len(SPECIAL) - len(extra)) // 2, 1))
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size - len(extra),
        min_frequency=max(min_count, 1),
        special_tokens=list(SPECIAL),
        # The trainer's own choice among equally rare characters differs from run to run.
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    # Each word as often as it occurs, so that the trainer counts what was counted here.
    words = (START + word for word in sorted(counts))
    repeated = (word for word in words for _ in range(counts[word[1:]]))
    tokenizer.train_from_iterator(repeated, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    pieces[len(SPECIAL) : len(SPECIAL)] = extra
    return tuple(pieces), tuple((left, right) for left, right in model["merges"])


def _alphabet(counts: Counter[str], size: int) -> list[str]:
    """The commonest characters, the one that begins words first."""
    characters: Counter[str] = Counter()
    for word, count in counts.items():
        for character in word:
            characters[character] += count
    common = sorted(characters, key=lambda character: (-characters[character], character))
    return [START, *common[: size - 1]]


def check(kind: str, case: str, pieces: Sequence[str], merges: Sequence[tuple[str, str]]) -> None:
    """Checks that a vocabulary is complete and consistent.

    Raises:
        ValueError: what is wrong with it.
    """
    known = set(pieces)
    if kind not in ("bpe", "word"):
        raise ValueError(f'the kind of a tokenizer is "bpe" or "word". Got {kind!r}.')
    if case not in ("keep", "mark", "lower"):
        raise ValueError(f'case is "keep", "mark" or "lower". Got {case!r}.')
    if case == "mark" and CAPITAL not in known:
        raise ValueError(f'with case="mark" a vocabulary has {CAPITAL}, and there is none.')
    if tuple(pieces[:4]) != SPECIAL:
        raise ValueError(
            f"a vocabulary begins with {', '.join(SPECIAL)}. Got {', '.join(pieces[:4]) or 'none'}."
        )
    if len(known) != len(pieces):
        twice = next(piece for piece, count in Counter(pieces).items() if count > 1)
        raise ValueError(f"a vocabulary has every piece once. Got {twice!r} more than once.")
    for piece in pieces:
        if not piece.isascii() or not piece.isprintable():
            bad = [c for c in piece if _controls(c)]
            if bad:
                raise ValueError(
                    "a vocabulary has no control characters, which could reach a terminal. Got "
                    f"{', '.join(ascii(c) for c in bad)} in {piece!a}."
                )
    for left, right in merges:
        if not {left, right, left + right} <= known:
            raise ValueError(
                "a merge is of two pieces of the vocabulary, and makes a third. Got "
                f"{left!r} + {right!r}, and not all three are there."
            )


def _controls(character: str) -> bool:
    """Whether it controls a terminal or the direction of text; `normalize` removes all of these."""
    return unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(
        character
    ) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


def tokenizers_package() -> Any:
    """The package tokenizers, imported where it is needed."""
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise ImportError(
            "Byte-pair encoding needs tokenizers, which is not installed.\n"
            'Install it with: pip install "regard[translate]"'
        ) from error
    return tokenizers


def _counted(lines: Iterable[Sequence[str]], size: int) -> Counter[str]:
    if size <= len(SPECIAL):
        raise ValueError(
            f"a vocabulary needs room for more than its {len(SPECIAL)} special entries. "
            f"Got size={size}."
        )
    counts = Counter(word for line in lines for word in line if word)
    if not counts:
        raise ValueError("a vocabulary is learned from text. Got none, or only empty lines.")
    return counts
