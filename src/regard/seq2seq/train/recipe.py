"""The recipe of a training run: everything besides model and data that determines its numbers."""

import math
from dataclasses import dataclass
from typing import cast

from regard.seq2seq.model.config import JsonFields

SCHEDULES = ("constant", "inverse_sqrt", "cosine", "plateau")

# What may change when a run is continued: how long it goes on, and what it reports.
FREE = ("epochs", "max_steps", "patience", "keep", "log_every")


@dataclass(frozen=True)
class Recipe(JsonFields):
    """How to train. Adam with clipping, a schedule, label smoothing and early stopping.

    Example:
        >>> from regard.seq2seq.train.recipe import Recipe
        >>> recipe = Recipe(learning_rate=1e-3, warmup_steps=100, schedule="inverse_sqrt")
        >>> [recipe.learning_rate_at(step) for step in (49, 99, 399)]
        [0.0005, 0.001, 0.0005]

    Attributes:
        epochs: the largest number of passes over the data.
        max_steps: the largest number of steps; None: only the epochs limit the run.
        learning_rate: the peak of the schedule.
        warmup_steps: the rate rises linearly over this many steps, before any schedule.
        schedule: "constant"; "inverse_sqrt", lr · √(warmup_steps / step); "cosine", down to
            learning_rate_floor at max_steps; "plateau": times `plateau_factor` whenever
            `plateau_patience` validations in a row bring no improvement.
        plateau_factor, plateau_patience: of the "plateau" schedule.
        learning_rate_floor: the rate never falls below it.
        beta1, beta2, epsilon: Adam's (Kingma & Ba 2015).
        weight_decay: decoupled, times the learning rate (Loshchilov & Hutter 2019).
        clip_norm: gradients with a larger norm are scaled down to it.
        label_smoothing: see `cross_entropy`.
        consistency: the weight of R-Drop, see `cross_entropy`; above 0, each step reads its batch
            twice, with different dropout.
        validate_every: steps between validations; None: one after each epoch.
        checkpoint_every: steps between checkpoints, in addition to one after each validation.
        stop_on: "loss" or "bleu", the figure that validations are compared by.
        patience: stop after this many validations without improvement, not counting those during
            warm-up (0 = never).
        average: how many of the best validations have their parameters averaged at the end.
        keep: how many checkpoints to keep, in case one is damaged.
        log_every: steps between lines of the log, and between checks of the loss.
        seed: of the initial parameters and of dropout, from 0 to 2³² − 1.
    """

    epochs: int = 30
    max_steps: int | None = None
    learning_rate: float = 1e-3
    warmup_steps: int = 0
    schedule: str = "constant"
    plateau_factor: float = 0.5
    plateau_patience: int = 2
    learning_rate_floor: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    label_smoothing: float = 0.1
    consistency: float = 0.0
    validate_every: int | None = None
    checkpoint_every: int | None = None
    stop_on: str = "loss"
    patience: int = 0
    average: int = 3
    keep: int = 2
    log_every: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        for name, known in (("schedule", SCHEDULES), ("stop_on", ("loss", "bleu"))):
            if getattr(self, name) not in known:
                listed = ", ".join(repr(choice) for choice in known)
                raise ValueError(f"{name} must be one of {listed}. Got {getattr(self, name)!r}.")
        for name in ("epochs", "average", "keep", "log_every", "plateau_patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1. Got {getattr(self, name)}.")
        for name in ("max_steps", "validate_every", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, or None. Got {value}.")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"label_smoothing must be in [0, 1). Got {self.label_smoothing}.")
        if not 0.0 <= self.consistency < math.inf:
            raise ValueError(f"consistency must be at least 0, and finite. Got {self.consistency}.")
        if not (0 < self.learning_rate < math.inf and 0 < self.clip_norm < math.inf):
            raise ValueError(
                "learning_rate and clip_norm must be positive and finite. Got learning_rate "
                f"{self.learning_rate}, clip_norm {self.clip_norm}."
            )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be between 0 and 2³² − 1. Got {self.seed}.")
        if self.schedule == "inverse_sqrt" and self.warmup_steps < 1:
            raise ValueError("schedule 'inverse_sqrt' needs warmup_steps of at least 1. Got 0.")
        if self.schedule == "cosine" and self.max_steps is None:
            raise ValueError("schedule 'cosine' needs max_steps, where it ends. Got None.")

    def learning_rate_at(self, step: int, plateau: float = 1.0) -> float:
        """The learning rate of the update after `step` updates.

        Args:
            step: from 0.
            plateau: the current factor of the "plateau" schedule.
        """
        count, warmup = step + 1, self.warmup_steps
        rate = self.learning_rate
        if count < warmup:
            return rate * count / warmup
        if self.schedule == "inverse_sqrt":
            rate *= math.sqrt(warmup / count)
        elif self.schedule == "cosine":
            length = cast(int, self.max_steps) - warmup
            done = min((count - warmup) / max(length, 1), 1.0)
            low = self.learning_rate_floor
            rate = low + (rate - low) * 0.5 * (1.0 + math.cos(math.pi * done))
        elif self.schedule == "plateau":
            rate *= plateau
        return max(rate, self.learning_rate_floor)
