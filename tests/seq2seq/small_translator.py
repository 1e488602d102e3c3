"""A translator of eight words with random weights: it writes nonsense, and always the same."""

from pathlib import Path

from regard.seq2seq.corpus import Pair
from regard.seq2seq.model.config import Config
from regard.seq2seq.model.export import save_model
from regard.seq2seq.text.tokenizer_pair import TokenizerPair
from regard.seq2seq.translator import Translator
from seq2seq.tiny import random_model

ENGLISH = "one two three four five six . ,"
FRENCH = "un deux trois quatre cinq six . ,"


def tokenizers(turned: bool = False) -> TokenizerPair:
    sides = (FRENCH, ENGLISH) if turned else (ENGLISH, FRENCH)
    return TokenizerPair.train([Pair(*sides)], kind="word", joint=False)


def small_translator(seed: int = 0, turned: bool = False, **options) -> Translator:
    both = tokenizers(turned)
    config = Config(
        both.source.size,
        both.target.size,
        embedding=5,
        encoder=4,
        decoder=8,
        attention_width=6,
        dtype="float32",
    )
    # Weights this large make it look somewhere, not everywhere.
    return Translator(random_model(config, seed, scale=1.5), both, **options)


def save_small(folder: Path, seed: int = 0, turned: bool = False) -> Translator:
    """Writes the model into a folder, and gives it."""
    translator = small_translator(seed, turned)
    save_model(folder, translator.model)
    translator.tokenizers.save(folder)
    return translator
