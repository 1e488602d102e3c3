"""Settings that fit the size of a corpus, where the user has not chosen them.

A model with a large vocabulary learns nothing from few sentences: most of its pieces occur once.
Small corpora need few pieces, a small model and small batches, so that an epoch has enough steps
(Sennrich & Zhang 2019, "Revisiting Low-Resource Neural Machine Translation").
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from regard.seq2seq.corpus import Pair
from regard.seq2seq.train.settings import Settings

FULL = 1_000_000  # target words from which on the recipe's own sizes are right
SMALL = 50_000  # below, translations stay poor

# Of a small corpus; of one architecture or the other.
WIDTHS = {
    "model.embedding": 128,
    "model.encoder": 128,
    "model.decoder": 256,
    "model.feed_forward": 512,
}


def fit(settings: Settings, pairs: Sequence[Pair]) -> tuple[Settings, list[str]]:
    """The settings with every field that `settings.scaled` names chosen for the corpus.

    Example:
        >>> from regard.seq2seq.corpus import Pair
        >>> from regard.seq2seq.train.settings import Settings
        >>> pairs = [Pair("the cat sleeps", "le petit chat dort ici")] * 2000
        >>> fitted, lines = fit(Settings.named("default"), pairs)
        >>> fitted.tokenizer.size, fitted.model["encoder"], fitted.recipe.warmup_steps
        (800, 128, 117)
        >>> lines[0].split(":")[0]
        'sizes for 10,000 target words'

    Args:
        settings: the run's.
        pairs: to train on.

    Returns:
        Settings with the chosen values, and lines of text that report the choice.
    """
    if not settings.scaled:
        return settings, []
    words = sum(len(pair.target.split()) for pair in pairs)
    tokens = settings.batches.tokens
    if "batches.tokens" in settings.scaled:
        tokens = 512 if words < SMALL else 1024 if words < 6 * SMALL else tokens
    size = 100 * round(settings.tokenizer.size * math.sqrt(words / FULL) / 100)
    chosen: dict[str, Any] = {
        "batches.tokens": tokens,
        # Two epochs; a batch has about three positions for each target word, with padding.
        "recipe.warmup_steps": min(max(6 * words // tokens, 100), settings.recipe.warmup_steps),
    }
    if settings.tokenizer.kind == "bpe":  # fewer whole words would only leave more unknown ones
        chosen["tokenizer.size"] = min(max(size, 500), settings.tokenizer.size)
    if words < 3 * SMALL:
        chosen |= WIDTHS
    if words < SMALL:  # few validation sentences, and a noisy BLEU
        chosen |= {"recipe.epochs": 60, "recipe.patience": 8, "recipe.plateau_patience": 3}
    if words >= FULL:
        chosen = {}
    parts: dict[str, dict[str, Any]] = {}
    for name in settings.scaled:
        if name in chosen:
            part, key = name.split(".")
            parts.setdefault(part, {})[key] = chosen[name]
    fitted = dataclasses.replace(settings.with_model(**parts.pop("model", {})), scaled=())
    fitted = dataclasses.replace(
        fitted,
        **{part: dataclasses.replace(getattr(fitted, part), **v) for part, v in parts.items()},
    )
    lines = []
    if fitted != dataclasses.replace(settings, scaled=()):
        model = vars(fitted.config(100, 100))
        names = [name.removeprefix("model.") for name in WIDTHS]
        widths = "/".join(str(model[name]) for name in names if name in model)
        lines.append(
            f"sizes for {words:,} target words: at most {fitted.tokenizer.size:,} pieces, widths "
            f"{widths}, {fitted.batches.tokens:,} tokens "
            f"a batch, {fitted.recipe.warmup_steps} steps of warm-up"
        )
    if words < SMALL:
        lines.append(
            f"warning: {len(pairs):,} pairs are a small corpus. Many translations will be wrong; "
            "more pairs help most, and tens of thousands make a usable translator."
        )
    return fitted, lines
