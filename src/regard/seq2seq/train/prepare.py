"""From files to the arguments of `train`: pairs, tokenizers, batches and validation."""

from dataclasses import dataclass

from regard.seq2seq.corpus import Pair
from regard.seq2seq.corpus.pair import Progress
from regard.seq2seq.decode.search import SearchOptions
from regard.seq2seq.metrics import bleu
from regard.seq2seq.model.config import ModelConfig
from regard.seq2seq.text.subword_dropout import SubwordDropout
from regard.seq2seq.text.tokenizer_pair import TokenizerPair
from regard.seq2seq.text.words import normalize
from regard.seq2seq.train.batches import Batches
from regard.seq2seq.train.corpus_size import fit
from regard.seq2seq.train.pairs import Say, read_pairs
from regard.seq2seq.train.settings import Settings
from regard.seq2seq.train.validation import Validation


@dataclass(frozen=True)
class Prepared:
    """The arguments of a run.

    Attributes:
        settings: those given, and every field that depends on the corpus chosen.
        tokenizers: the vocabularies.
        config: the model's.
        batches: the training data.
        validation: for early stopping.
        valid: the pairs of the validation, in its order.
    """

    settings: Settings
    tokenizers: TokenizerPair
    config: ModelConfig
    batches: Batches
    validation: Validation
    valid: list[Pair]


def prepare(
    settings: Settings,
    *,
    tokenizers: TokenizerPair | None = None,
    say: Say = lambda line: None,
    progress: Progress | None = None,
) -> Prepared:
    """Reads the corpus, learns the vocabulary, and makes the batches.

    Example:
        >>> import dataclasses
        >>> from regard.seq2seq.train.prepare import prepare
        >>> from regard.seq2seq.train.settings import DataSettings, Settings
        >>> settings = Settings.named("demo")
        >>> few = dataclasses.replace(settings.data, grammar=300, valid_sentences=20)
        >>> ready = prepare(dataclasses.replace(settings, data=few), say=print)
        train: 300 sentences of the embedded grammar
        validation: 20 sentences of the embedded grammar
        vocabulary: ... words of the source, ... of the target
        batches: ... of ... shapes an epoch, ... target tokens
        >>> ready.config.source_vocab == ready.tokenizers.source.size
        True

    Args:
        settings: the run's.
        tokenizers: those of a continued run; None: they are learned.
        say: called with lines on what was read, and what was dropped and why.
        progress: is called now and then while a file is read.

    Raises:
        CorpusError: a file cannot be read as pairs; the message has file and line.
        ValueError: the settings contradict each other or the corpus.
    """
    train, valid = read_pairs(settings.data, say=say, progress=progress)
    settings, lines = fit(settings, train)
    for line in lines:
        say(line)
    if tokenizers is None:
        tokenizers = TokenizerPair.train(train, **vars(settings.tokenizer))
    source, target = tokenizers.source, tokenizers.target
    unit = "words" if source.kind == "word" else "pieces"
    sizes = f"{source.size:,} {unit} of the source, {target.size:,} of the target"
    say(f"vocabulary: {f'{source.size:,} {unit} of both sides' if tokenizers.joint else sizes}")
    config = settings.config(source.size, target.size)
    batches = _batches(settings, tokenizers, train)
    dropout = settings.data.subword_dropout
    say(
        f"batches: {len(batches):,} of {len(batches.shapes)} shapes "
        f"{'in the first' if dropout else 'an'} epoch, {batches.target_tokens:,} target tokens"
        f"{_too_long(batches, settings)}"
        f"{f'; in other pieces each epoch, by subword dropout of {dropout:g}' if dropout else ''}"
    )
    validation, valid = _validation(settings, tokenizers, valid, say)
    return Prepared(settings, tokenizers, config, batches, validation, valid)


def encode(tokenizers: TokenizerPair, pairs: list[Pair]) -> list[tuple[list[int], list[int]]]:
    """(source ids, target ids) of every pair, as `Batches` takes them."""
    sources = tokenizers.source.encode_batch(pair.source for pair in pairs)
    targets = tokenizers.target.encode_batch(pair.target for pair in pairs)
    return [(list(s.ids), list(t.ids)) for s, t in zip(sources, targets, strict=True)]


def _batches(settings: Settings, tokenizers: TokenizerPair, pairs: list[Pair]) -> Batches:
    """The training data: the tokenizers' own pieces, or others in every epoch."""
    dropout, options = settings.data.subword_dropout, vars(settings.batches)
    if not dropout:
        return Batches(encode(tokenizers, pairs), **options)
    return Batches(SubwordDropout(tokenizers, pairs, dropout, seed=settings.recipe.seed), **options)


def _validation(
    settings: Settings, tokenizers: TokenizerPair, pairs: list[Pair], say: Say
) -> tuple[Validation, list[Pair]]:
    """The validation, and its pairs in the order of their translations."""
    options = {**vars(settings.batches), "shuffle": False}
    ids = encode(tokenizers, pairs)
    try:
        found = Batches(ids, **options)
    except ValueError as error:
        raise ValueError(f"validation: {error}") from None
    left_out = set(found.too_long)
    if left_out:
        longest = max(settings.batches.buckets)
        say(f"validation: {len(left_out):,} of them are longer than {longest} tokens: not scored")
    order = [i for i in range(len(pairs)) if i not in left_out]
    # A run shows the first sentence of the shortest bucket: put the longest of them first.
    width = found.shapes[0][1]
    sample = max((i for i in order if max(map(len, ids[i])) < width), key=lambda i: len(ids[i][0]))
    order.sort(key=lambda i: i != sample)
    target = tokenizers.target
    form = dict(lowercase=target.case == "lower", strip_accents=target.strip_accents)
    references = [normalize(pairs[i].target, **form) for i in order]

    def score(translations: list[list[int]]) -> float:
        return bleu([target.decode(ids).text for ids in translations], references).value

    batches = Batches([ids[i] for i in order], **options)
    search = SearchOptions(beam=settings.beam)
    return Validation(batches, score, search), [pairs[i] for i in order]


def _too_long(batches: Batches, settings: Settings) -> str:
    if not batches.too_long:
        return ""
    return f"; {len(batches.too_long):,} pairs longer than {max(settings.batches.buckets)} left out"
