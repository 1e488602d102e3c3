"""Translating and aligning text: from sentences to tokens, through the model, and back to words.

The command line, the playground and most programs use this. Batches are made in batch_shapes.py,
long texts are cut in sentences.py, ordinary text is put into the form of sentences in
input_variants.py, and the search is in search.py.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax import Array

from regard.seq2seq.alignment import word_weights
from regard.seq2seq.decode import programs
from regard.seq2seq.decode.batch_shapes import WIDTHS, Group, groups
from regard.seq2seq.decode.hypotheses import Hypotheses, SearchOptions
from regard.seq2seq.decode.input_variants import read_sources
from regard.seq2seq.decode.joining import Part, Written, join_parts, padded, read_out
from regard.seq2seq.decode.layers import LayerWeights, layer_weights
from regard.seq2seq.decode.next_words import NextWords, next_words
from regard.seq2seq.decode.restoring import restored
from regard.seq2seq.model.export import load_model
from regard.seq2seq.model.model_folder import model_folder
from regard.seq2seq.model.translation_model import Model
from regard.seq2seq.text.marks import START
from regard.seq2seq.text.sentences import token_ranges
from regard.seq2seq.text.tokenizer import Encoded
from regard.seq2seq.text.tokenizer_pair import TokenizerPair
from regard.seq2seq.text.vocabulary import UNK
from regard.seq2seq.text.words import Words
from regard.seq2seq.train.batches import Batch
from regard.seq2seq.translation import Alignment, Translation

# Called as progress(done, total).
Progress = Callable[[int, int], None]
Look = Literal["writing", "reading", "explaining"]
LOOKS: tuple[Look, ...] = get_args(Look)
Text = str | Sequence[str]

EXPLAINED = 2048  # tokens of a batch, at most: each sentence needs 32 softmaxes per step
STAND_INS = 1024  # words of the vocabulary that are tried as names to copy
HURRY = 128  # up to so many sentences, programs are compiled at optimization level 0


class Translator:
    """A model and its tokenizers: text in, text out.

    Example:
        >>> from flax import nnx
        >>> from regard.seq2seq.model.config import Config
        >>> from regard.seq2seq.corpus import Grammar
        >>> from regard.seq2seq.model.translation_model import Model
        >>> from regard.seq2seq.text.tokenizer_pair import TokenizerPair
        >>> from regard.seq2seq.translator import Translator
        >>> tokenizers = TokenizerPair.train(Grammar(50), kind="word")
        >>> sizes = tokenizers.source.size, tokenizers.target.size
        >>> model = Model(Config(*sizes, embedding=8, encoder=8, decoder=16), rngs=nnx.Rngs(0))
        >>> translator = Translator(model, tokenizers)  # or Translator.load()
        >>> found = translator.translate(["She sleeps here.", ""], n_best=2)
        >>> [len(translations) for translations in found]
        [2, 1]
        >>> best = found[0][0]
        >>> best.source_words, best.weights.shape == (len(best.target_words), 4)
        (('She', 'sleeps', 'here', '.'), True)

    Args:
        model: the translator's network.
        tokenizers: the ones that it was trained with.
        longest: a text with more tokens is translated in parts.

    Raises:
        ValueError: the vocabularies are not of the same sizes, or longest is too short.
    """

    def __init__(
        self, model: Model, tokenizers: TokenizerPair, *, longest: int = WIDTHS[-1] - 1
    ) -> None:
        config = model.config
        has = (config.source_vocab, config.target_vocab)
        wants = (tokenizers.source.size, tokenizers.target.size)
        if has != wants:
            raise ValueError(
                "a model and its tokenizers have vocabularies of the same sizes. Got a model of "
                f"{has[0]} and {has[1]} entries, tokenizers of {wants[0]} and {wants[1]}. "
                "Fix: the tokenizer.json that the model was trained with."
            )
        if longest < 1:
            raise ValueError(f"longest must be at least 1 token. Got {longest}.")
        self.model, self.tokenizers, self.longest = model, tokenizers, longest
        self._compiled: set[tuple[object, int, int]] = set()

    @classmethod
    def load(
        cls, folder: str | Path | None = None, *, longest: int = WIDTHS[-1] - 1
    ) -> "Translator":
        """Reads a model from a folder.

        Args:
            folder: one with config.json, model.safetensors and tokenizer.json, or that of a
                training run; None: the English-French model that comes with regard.
            longest: a text with more tokens is translated in parts.

        Raises:
            FileNotFoundError: the folder, or a file in it, is missing.
            ValueError: a file is damaged, or of another version of regard.
        """
        found = model_folder(folder)
        return cls(load_model(found), TokenizerPair.load(found), longest=longest)

    def translate(
        self,
        texts: Iterable[str],
        *,
        search: SearchOptions = SearchOptions(),
        n_best: int = 1,
        replace_unknown: bool = True,
        adapt: bool = True,
        batch_tokens: int | None = None,
        hurry: bool | None = None,
        whole_batches: bool = False,
        progress: Progress | None = None,
    ) -> list[list[Translation]]:
        """Translates texts.

        A text that is longer than the model can take is cut at sentence ends and translated in
        parts, which are put together again, alignment and all. A text without words has one
        translation, the empty one; no other is empty.

        What else is translated in the same call changes a score by rounding only: by less than 1e-4
        in float32, by less than 0.05 where `search.dtype` is "auto" and the machine multiplies in
        bfloat16 (few sentences are then translated in float32, many in bfloat16). A translation
        can change where two hypotheses are as close as that: none of 256 everyday sentences in
        float32, two of them with "auto" (more where the model is unsure: 4 of 96 of the grammar's).

        Args:
            texts: any strings, a sentence each.
            search: the beam, the length penalty, and the rest.
            n_best: how many translations of each text are wanted, at most the beam.
            replace_unknown: whether `<unk>` becomes the source word that the model attended to.
            adapt: whether a text that is no ordinary sentence (all capitals, no capitals, no full
                stop, markup, addresses, letters that the vocabulary lacks) is also read in the form
                of one, and the variant with the best score is taken; see `input_variants`. An
                ordinary sentence is not changed by it. False: the model reads the text as it is.
            batch_tokens: places of a batch, padding included; None: what suits the machine.
            hurry: whether to compile at optimization level 0, which takes a quarter of the time
                and makes programs half as fast; None: for up to 128 sentences.
            whole_batches: pad every batch with empty rows to its full size: for a corpus that is
                translated in many calls. There are fewer programs, and rounding does not depend on
                earlier calls.
            progress: called after each batch with how many parts are done, and of how many.

        Returns:
            For each text its translations, the best first, in the order of the texts.
        """
        texts = _as_list(texts)
        if not 1 <= n_best <= search.beam:
            raise ValueError(f"n_best must be from 1 to beam. Got {n_best}, beam {search.beam}.")
        tokenizer = self.tokenizers.source
        sources = read_sources(texts, tokenizer, lambda: self._stand_ins, adapt)
        variants = [pair for one in sources for pair in zip(one.variants, one.encoded, strict=True)]
        parts = [
            Part(number, start, stop)
            for number, (variant, encoded) in enumerate(variants)
            for start, stop in self._ranges(variant.split, encoded)
        ]
        ids = [variants[part.variant][1].ids[part.start : part.stop] for part in parts]
        found = self._search(ids, search, n_best, batch_tokens, hurry, whole_batches, progress)
        drafts = iter(
            join_parts(
                [encoded for _, encoded in variants],
                parts,
                found,
                self.tokenizers.target,
                search.length_penalty,
                replace_unknown,
            )
        )
        return [restored(one, [next(drafts) for _ in one.variants]) for one in sources]

    @functools.cached_property
    def _stand_ins(self) -> tuple[str, ...]:
        """Names that the model copies unchanged, the commonest first; see `input_variants`.

        They are common entries of both vocabularies. Translating each alone shows which are copied.
        """
        source, target = self.tokenizers.source, set(self.tokenizers.target.pieces)
        words = [
            piece[1:] if source.case != "mark" else piece[1:].capitalize()
            for piece in source.pieces
            if piece in target and len(piece) > 3 and piece[0] == START and piece[1:].isalpha()
        ]
        if source.case == "keep":
            words = [word for word in words if word[0].isupper()]
        words = words[:STAND_INS]
        stop = "" if UNK in source.encode("a.").ids[-1:] else "."
        texts = [word + stop for word in words]
        found = self.translate(texts, search=SearchOptions(beam=1), adapt=False)
        copied = {
            word: best.score
            for word, (best, *_) in zip(words, found, strict=True)
            if best.target_words[:1] == (word,) and len(best.target_words) <= 2
        }
        surest = sorted(copied, key=lambda word: -copied[word])[: max(len(copied) // 4, 4)]
        return tuple(word for word in words if word in surest)

    @property
    def looks(self) -> tuple[Look, ...]:
        """What `align` takes as `look` for this model, the one that aligns best last."""
        return tuple(look for look in LOOKS if look in self.model.looks)

    def align(
        self,
        pairs: Iterable[tuple[Text, Text]],
        *,
        look: Look = "writing",
        batch_tokens: int | None = None,
        progress: Progress | None = None,
    ) -> list[Alignment]:
        """Aligns words by the attention for given translations (forced decoding).

        Args:
            pairs: (source, target); each a text, or words that are split already.
            look: which weights align a target word: "writing", those of the step that writes it;
                "reading", those of the next step, which reads it; "explaining", the posterior of
                the first given the word (`explaining.py`). The first is Bahdanau's own; the second
                aligns better for some models (Chen et al. 2020); the third takes account of the
                word and aligns best. A Transformer's weights are the mean over the heads of its
                last decoder layer but one, or of the last of up to two; see `looks`.
            batch_tokens, progress: as for `translate`; explaining takes 2,048 tokens at most.

        Returns:
            An alignment for each pair, in their order. Pairs are never cut, whatever their length.
        """
        return self.align_by((look,), pairs, batch_tokens=batch_tokens, progress=progress)[look]

    def align_by(
        self,
        looks: Sequence[Look],
        pairs: Iterable[tuple[Text, Text]],
        *,
        batch_tokens: int | None = None,
        progress: Progress | None = None,
    ) -> dict[Look, list[Alignment]]:
        """`align` for several looks; "writing" and "reading" share one forced decoding.

        Args:
            looks: which. `progress` counts every pair once per forced decoding.
            pairs, batch_tokens, progress: as for `align`.

        Returns:
            For each look what `align` gives.
        """
        for look in looks:
            if look not in self.looks:
                kind = self.model.config.architecture
                raise ValueError(
                    f"look is one of {', '.join(self.looks)} for a model of the architecture "
                    f"{kind!r}. Got {look!r}."
                )
        pairs = _as_pairs(pairs)
        sources = self.tokenizers.source.encode_batch(source for source, _ in pairs)
        targets = self.tokenizers.target.encode_batch(target for _, target in pairs)
        both = list(zip(sources, targets, strict=True))
        found = {look: [_aligned(*pair, np.zeros((0, 0)), look) for pair in both] for look in looks}
        wanted = [i for i, (source, target) in enumerate(both) if source.ids and target.ids]
        lengths = [max(len(both[i][0].ids), len(both[i][1].ids)) + 1 for i in wanted]
        explaining = sorted({look == "explaining" for look in looks})
        done, hurry = 0, len(wanted) <= HURRY
        for explain in explaining:
            kind = ("align", explain, hurry)
            tokens = batch_tokens or _batch_tokens()
            if explain:
                tokens = min(tokens, EXPLAINED)
            for group in groups(lengths, tokens=tokens, known=self._known(kind)):
                members = [wanted[i] for i in group.members]
                examples = [(both[i][0].ids, both[i][1].ids) for i in members]
                batch = Batch.of(examples, rows=group.rows, width=group.width)
                weights = np.asarray(self._looks(batch, explain, hurry))  # [B, T, S]
                self._compiled.add((kind, group.rows, group.width))
                for look in looks:
                    if (look == "explaining") == explain:
                        for row, i in enumerate(members):
                            found[look][i] = _aligned(*both[i], weights[row], look)
                done += len(members)
                if progress is not None:
                    progress(done, len(explaining) * len(wanted))
        return found

    def layers(self, source: str, target: str) -> dict[str, LayerWeights]:
        """The attention of every layer and head for a given translation (forced decoding).

        Example:
            >>> from regard.seq2seq.translator import Translator
            >>> from regard.show import AttentionMap
            >>> seen = Translator.load().layers("She sleeps.", "Elle dort.")
            >>> {name: found.weights.shape for name, found in seen.items()}
            {'cross': (2, 4, 5, 6), 'decoder': (2, 4, 5, 5), 'encoder': (4, 4, 6, 6)}
            >>> seen["cross"].query_labels
            ('⇧', 'elle', 'dort', '.', '(end)')
            >>> AttentionMap(*seen["cross"]).weights.shape  # to step through, plot, or save
            (2, 4, 5, 6)

        Args:
            source: a text.
            target: its translation.

        Returns:
            By name, the weights between tokens as the model reads them: of a Transformer
            "encoder", the source to itself, "decoder", the target to itself, and "cross", the
            target to the source; of a recurrent model "cross", of one layer and head; of one
            without attention nothing.
        """
        return layer_weights(self.model, self.tokenizers, source, target)

    def next_words(
        self, text: str, translations: Sequence[Translation], count: int = 5
    ) -> list[NextWords]:
        """The most probable words at each step of given translations of a text.

        Args:
            text: the source.
            translations: up to 8 translations of it, by `translate`.
            count: how many words for each step, up to 10.

        Returns:
            For each translation, for each of its words and then for its end, (word, probability),
            the best first; "" stands for the end. A word of several pieces counts as its first
            piece. Empty where the text is too long to be read at once.
        """
        given = self.model, self.tokenizers, text, translations, count, self.longest
        return next_words(*given)

    def _looks(self, batch: Batch, explain: bool, hurry: bool) -> Array:
        source, lens, before, written = (
            _on_device(array)
            for array in (batch.source, batch.source_lens, batch.target_in, batch.target_out)
        )
        if explain:
            return programs.explained(self.model, source, lens, before, written, hurry=hurry)
        return programs.forced(self.model, source, lens, before, hurry=hurry)

    def _known(self, kind: object) -> set[tuple[int, int]]:
        """The shapes that a program is compiled for; another thread may be compiling more."""
        return {(rows, width) for of, rows, width in tuple(self._compiled) if of == kind}

    def _ranges(self, split: Words, encoded: Encoded) -> list[tuple[int, int]]:
        if 0 < len(encoded.ids) <= self.longest:
            return [(0, len(encoded.ids))]
        return token_ranges(split, encoded.word_of_token, self.longest)

    def _search(
        self,
        ids: Sequence[Sequence[int]],
        search: SearchOptions,
        n_best: int,
        batch_tokens: int | None,
        hurry: bool | None,
        whole_batches: bool,
        progress: Progress | None,
    ) -> Iterator[tuple[int, list[Written]]]:
        """The number of each part and its hypotheses, the best first, in any order.

        The device is given the next batch before the results of one are read.
        """
        hurry = len(ids) <= HURRY if hurry is None else hurry
        kind = (search, n_best, hurry)
        known = self._known(kind)
        lengths = [len(one) + 1 for one in ids]
        tokens = batch_tokens or _batch_tokens()
        done = 0
        running: list[tuple[Group, Hypotheses]] = []

        def read() -> Iterator[tuple[int, list[Written]]]:
            nonlocal done
            group, hypotheses = running.pop()
            # Rows of padding follow those of the members.
            yield from zip(group.members, read_out(hypotheses), strict=False)
            done += len(group.members)
            if progress is not None:
                progress(done, len(ids))

        for group in groups(lengths, tokens=tokens, known=known, whole=whole_batches):
            examples = [(ids[i], ()) for i in group.members]
            batch = Batch.of(examples, rows=group.rows, width=group.width)
            source, lens = (_on_device(array) for array in (batch.source, batch.source_lens))
            hypotheses = programs.search(self.model, source, lens, search, n_best, hurry=hurry)
            self._compiled.add((kind, group.rows, group.width))
            if running:
                yield from read()
            running.append((group, hypotheses))
        if running:
            yield from read()


def _on_device(array: Any) -> Array:
    """Not jnp.asarray, which compiles a program for each new shape."""
    return jax.device_put(array)


def _aligned(source: Encoded, target: Encoded, attention: np.ndarray, look: Look) -> Alignment:
    weights = np.zeros((0, 0))
    if source.ids and target.ids and attention.size:
        words = source.word_of_token, target.word_of_token
        weights = word_weights(attention, *words, shift=1 if look == "reading" else 0)
    weights = padded(weights, len(target.words), len(source.words))
    return Alignment(source.words, target.words, weights)


def _as_list(texts: Iterable[str]) -> list[str]:
    if isinstance(texts, str):
        raise TypeError(
            f"texts must be a list of texts. Got one text, {texts[:40]!r}. Fix: [text]."
        )
    listed = list(texts)
    for one in listed:
        if not isinstance(one, str):
            raise TypeError(f"texts must be strings. Got {one!r:.40} of type {type(one).__name__}.")
    return listed


def _as_pairs(pairs: Iterable[tuple[Text, Text]]) -> list[tuple[Text, Text]]:
    listed = list(pairs)
    for one in listed:
        # A string of two letters would otherwise be taken for two texts.
        if isinstance(one, str) or len(one) != 2:
            raise TypeError(f"pairs must be (source, target) each. Got {one!r:.40}.")
    return listed


def _batch_tokens() -> int:
    """On a CPU larger batches are not faster, and take longer to compile."""
    return 512 if jax.default_backend() == "cpu" else 16384
