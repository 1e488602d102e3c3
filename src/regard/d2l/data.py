"""The book's sentence pairs and their vocabularies."""

import collections
import itertools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from regard.d2l.short_sentences import short_sentences
from regard.d2l.training import ArrayLoader, DataModule
from regard.seq2seq.corpus import Cleaning, Pair, TabSeparated

__all__ = ["Vocab", "MTFraEng"]


class Vocab:
    """Tokens and their numbers, in the order of the alphabet.

    Example:
        >>> from regard import d2l
        >>> vocab = d2l.Vocab([["the", "cat"], ["the", "hat"]], reserved_tokens=["<pad>"])
        >>> len(vocab), vocab["the"], vocab[["the", "dog"]]
        (5, 4, [4, 1])
        >>> vocab.to_tokens([4, 1])
        ['the', '<unk>']

    Args:
        tokens: a list of tokens, or a list of such lists.
        min_freq: a token that occurs less often is unknown.
        reserved_tokens: have numbers in any case.

    Attributes:
        token_freqs: (token, count), the commonest first.
        unk: the number of "<unk>", which stands for every unknown token.
    """

    def __init__(
        self, tokens: Iterable[Any] = (), min_freq: int = 0, reserved_tokens: Sequence[str] = ()
    ) -> None:
        lines = ([token] if isinstance(token, str) else token for token in tokens)
        counts = collections.Counter(itertools.chain.from_iterable(lines))
        self.token_freqs = counts.most_common()
        common = (token for token, count in self.token_freqs if count >= min_freq)
        self.idx_to_token = sorted({"<unk>", *reserved_tokens, *common})
        self.token_to_idx = {token: index for index, token in enumerate(self.idx_to_token)}

    def __len__(self) -> int:
        return len(self.idx_to_token)

    def __getitem__(self, tokens: Any) -> Any:
        """A token's number; of lists of tokens, lists of numbers."""
        if isinstance(tokens, str):
            return self.token_to_idx.get(tokens, self.unk)
        return [self[token] for token in tokens]

    def to_tokens(self, indices: Any) -> Any:
        """A number's token; of an array or a list of numbers, lists of tokens."""
        if np.ndim(indices) == 0:
            return self.idx_to_token[int(indices)]
        return [self.to_tokens(index) for index in np.asarray(indices)]

    @property
    def unk(self) -> int:
        return self.token_to_idx["<unk>"]


class MTFraEng(DataModule):
    """English–French sentence pairs, as arrays of token numbers.

    Read from `path`, a tab-separated file (English, French, and whatever follows; plain or gzip);
    without one from root/fra-eng/fra.txt, where the book's download lies. Where that is not there
    either, sentences of regard's own grammar take its place, and a line on stderr says so: "I'm
    home.", "He's calm.", "She ate.", "Go now.", and, past 750 of them, longer ones.

    As in the book, text is in lower case with a space before marks, sides are cut or padded to
    num_steps tokens, "<eos>" included, words that occur once are "<unk>", and the first num_train
    pairs are for training, the num_val after them for validation.

    Example:
        >>> from regard import d2l
        >>> data = d2l.MTFraEng(batch_size=3)
        >>> src, tgt, src_valid_len, label = next(iter(data.train_dataloader()))
        >>> src.shape, tgt.shape, src_valid_len.shape, label.shape
        ((3, 9), (3, 9), (3,), (3, 9))
        >>> source, _, lens, target = data.build(["he's calm ."], ["il est calme ."])
        >>> data.src_vocab.to_tokens(source[0])[:5], lens.tolist()
        (["he's", 'calm', '.', '<eos>', '<pad>'], [4])

    Args:
        batch_size: pairs of a batch.
        num_steps: tokens of a sentence.
        num_train: pairs for training.
        num_val: pairs for validation.
        path: a tab-separated file, such as fra.txt of manythings.org/anki.
        root: the folder that may hold fra-eng/fra.txt.

    Attributes:
        arrays: source, target behind "<bos>", source lengths, target.
        src_vocab, tgt_vocab: of either side.

    Raises:
        FileNotFoundError: there is no file at `path`.
        ValueError: the file has fewer than num_train + num_val pairs.
    """

    def __init__(
        self,
        batch_size: int,
        num_steps: int = 9,
        num_train: int = 512,
        num_val: int = 128,
        path: str | Path | None = None,
        root: str = "../data",
    ) -> None:
        self.save_hyperparameters()
        arrays = self._arrays_of(self._pairs(num_train + num_val))
        self.arrays, self.src_vocab, self.tgt_vocab = arrays

    def get_dataloader(self, train: bool) -> ArrayLoader | None:
        if not train and not self.num_val:
            return None
        rows = slice(0, self.num_train) if train else slice(self.num_train, None)
        return self.get_tensorloader(self.arrays, train, rows)

    def build(self, src_sentences: Sequence[str], tgt_sentences: Sequence[str]) -> tuple:
        """Arrays like `arrays`, of other sentences, by the same vocabularies.

        Raises:
            ValueError: not two lists of sentences of one length.
        """
        one = isinstance(src_sentences, str) or isinstance(tgt_sentences, str)
        if one or len(src_sentences) != len(tgt_sentences):
            raise ValueError(
                "build takes two lists of sentences of one length, the targets of the sources. "
                f"Got {src_sentences!r} and {tgt_sentences!r}."
            )
        pairs = [Pair(*both) for both in zip(src_sentences, tgt_sentences, strict=True)]
        return self._arrays_of(pairs, self.src_vocab, self.tgt_vocab)[0]

    def _pairs(self, count: int) -> list[Pair]:
        book = Path(self.root) / "fra-eng" / "fra.txt"
        path = self.path or (book if book.exists() else None)
        if path is None:
            print(
                f"MTFraEng: no file is given and {book} is not there, so these are {count} "
                "sentences of regard's own English–French grammar. "
                'For others: MTFraEng(..., path="fra.txt"), English and French with a tab between.',
                file=sys.stderr,
            )
            return short_sentences(count)
        corpus = TabSeparated(path, cleaning=Cleaning(duplicates=False, max_words=None))
        pairs = list(itertools.islice(corpus, count))
        if len(pairs) < count:
            val = self.num_val if self.num_val < len(pairs) else -(-len(pairs) // 5)
            raise ValueError(
                "num_train + num_val are more pairs than the file has. Got num_train "
                f"{self.num_train}, num_val {self.num_val}, {len(pairs)} pairs in {path} "
                f"({corpus.report.dropped.total()} left out). "
                f"Fix: num_train={len(pairs) - val}, num_val={val}."
            )
        return pairs

    def _arrays_of(
        self, pairs: Sequence[Pair], src_vocab: Vocab | None = None, tgt_vocab: Vocab | None = None
    ) -> tuple:
        source, src_vocab = self._numbers([pair.source for pair in pairs], src_vocab)
        target, tgt_vocab = self._numbers([pair.target for pair in pairs], tgt_vocab, ["<bos>"])
        lens = (source != src_vocab["<pad>"]).sum(1)
        return (source, target[:, :-1], lens, target[:, 1:]), src_vocab, tgt_vocab

    def _numbers(
        self, sentences: Sequence[str], vocab: Vocab | None, begin: Sequence[str] = ()
    ) -> tuple[Array, Vocab]:
        rows = []
        for sentence in sentences:
            tokens = [*tokenized(sentence), "<eos>"][: self.num_steps]
            rows.append([*begin, *tokens, *["<pad>"] * (self.num_steps - len(tokens))])
        if vocab is None:
            vocab = Vocab(rows, min_freq=2, reserved_tokens=["<pad>", "<eos>", *begin])
        return jnp.array(vocab[rows], jnp.int32), vocab


def tokenized(sentence: str) -> list[str]:
    """Words in lower case, and the marks , . ! ? as words of their own.

    Example:
        >>> tokenized("Il est calme, non\\u202f?")
        ['il', 'est', 'calme', ',', 'non', '?']
    """
    text = sentence.lower()
    for mark in ",.!?":
        text = text.replace(mark, f" {mark}")
    return text.split()  # at no-break spaces too
