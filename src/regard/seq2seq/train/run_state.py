"""The state of a run apart from its arrays: what a checkpoint's JSON holds, and when it ends."""

import math
from dataclasses import dataclass, field
from typing import Any

from regard.seq2seq.train.recipe import Recipe


@dataclass
class RunState:
    """Where a run is, and its validations so far.

    Attributes:
        step: updates so far.
        epoch: completed passes over the data.
        plateau: the factor on the learning rate, by the "plateau" schedule.
        stale: consecutive validations without improvement.
        stale_rate: the same, since the learning rate was lowered.
        best: the best validations as (score, step), best first.
        sums: loss, −log p and token count since the last report.
        validated: the step of the last validation.
        reason: why the run ended; None while it has not.
    """

    step: int = 0
    epoch: int = 0
    plateau: float = 1.0
    stale: int = 0
    stale_rate: int = 0
    best: list[tuple[float, int]] = field(default_factory=list)
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    validated: int = -1
    reason: str | None = None

    @classmethod
    def from_json(cls, fields: dict[str, Any], recipe: Recipe) -> "RunState":
        """The state in a checkpoint. A finished run continues if the recipe now allows more."""
        best = [(float(score), int(step)) for score, step in fields["best"]]
        state = cls(**{**fields, "best": best})
        if state.reason and state.limit(recipe) is None:
            state.reason = None
        return state

    def limit(self, recipe: Recipe) -> str | None:
        """Which limit of the recipe has been reached, in words; None: the run goes on."""
        if recipe.max_steps is not None and self.step >= recipe.max_steps:
            return f"{self.step} steps are done"
        if self.epoch >= recipe.epochs:
            return f"{self.epoch} epochs are done"
        if recipe.patience and self.stale >= recipe.patience:
            return f"{self.stale} validations in a row were no better"
        return None

    def count(self, score: float, recipe: Recipe) -> tuple[bool, bool]:
        """Counts a validation, and lowers the learning rate where the schedule says so.

        Args:
            score: the higher the better; NaN is the worst.

        Returns:
            Whether it is the best so far, and whether it is among those to average.
        """
        score = -math.inf if math.isnan(score) else score
        is_best = not self.best or score > self.best[0][0]
        ranked = sorted([*self.best, (score, self.step)], key=lambda pair: (-pair[0], pair[1]))
        self.best = ranked[: recipe.average]
        # During warm-up the learning rate is still low: no validation counts against the run.
        counts = not is_best and self.step > recipe.warmup_steps
        self.stale = self.stale + 1 if counts else 0
        self.stale_rate = self.stale_rate + 1 if counts else 0
        if recipe.schedule == "plateau" and self.stale_rate >= recipe.plateau_patience:
            self.plateau, self.stale_rate = self.plateau * recipe.plateau_factor, 0
        return is_best, (score, self.step) in self.best
