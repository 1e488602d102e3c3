"""What a training run reports; a progress bar is a `Progress` that draws."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Plan:
    """What is ahead, reported at the start.

    Attributes:
        epochs: at most.
        steps_per_epoch: None where the batches do not say.
        max_steps: at most; None: only the epochs limit the run.
        parameters: how many numbers the model has.
        devices: how many share the work.
        step: 0, or the step that a continued run goes on from.
    """

    epochs: int
    steps_per_epoch: int | None
    max_steps: int | None
    parameters: int
    devices: int
    step: int

    @property
    def total_steps(self) -> int | None:
        """How many steps the run has if it is not stopped early; None: unknown."""
        if self.steps_per_epoch is None:
            return self.max_steps
        total = self.epochs * self.steps_per_epoch
        return total if self.max_steps is None else min(total, self.max_steps)


@dataclass(frozen=True)
class StepReport:
    """The latest step, and the mean over the steps since the last report.

    Attributes:
        step: updates so far.
        epoch: from 0.
        loss: per target token, label smoothing included.
        nll: −log p per target token.
        grad_norm: before clipping, of the latest step.
        learning_rate: of the latest step.
        tokens_per_second: target tokens, padding not counted.
    """

    step: int
    epoch: int
    loss: float
    nll: float
    grad_norm: float
    learning_rate: float
    tokens_per_second: float


@dataclass(frozen=True)
class ValidationReport:
    """One validation.

    Attributes:
        step, epoch: when.
        loss: −log p per target token.
        bleu: None where there is no `bleu` function.
        is_best: whether it is the best so far, by `Recipe.stop_on`.
        best: the best so far.
        seconds: how long it took.
    """

    step: int
    epoch: int
    loss: float
    bleu: float | None
    is_best: bool
    best: float
    seconds: float


@dataclass(frozen=True)
class Sample:
    """A translation of the first validation sentence, for people to read.

    Attributes:
        step, epoch: when.
        source: token ids, <eos> included.
        target: token ids of the reference.
        hypothesis: token ids of the translation.
        attention: [len(hypothesis), len(source)], each token's weights.
    """

    step: int
    epoch: int
    source: list[int]
    target: list[int]
    hypothesis: list[int]
    attention: np.ndarray


class Progress:
    """The listener of a run. Every method does nothing; override those you need."""

    def started(self, plan: Plan) -> None:
        """Called before the first step."""

    def doing(self, what: str) -> None:
        """Called before work that may take long: "compiling …", "translating 3/12", "training"."""

    def stepped(self, report: StepReport) -> None:
        """Called after every `Recipe.log_every` steps."""

    def validated(self, report: ValidationReport) -> None:
        """Called after each validation."""

    def sampled(self, sample: Sample) -> None:
        """Called after each validation, too."""

    def saved(self, step: int, path: Path) -> None:
        """Called after each checkpoint."""

    def warned(self, message: str) -> None:
        """Called when something is wrong and the run goes on: a damaged checkpoint, for example."""

    def finished(self, reason: str) -> None:
        """Called after the last step, before the best parameters are averaged."""
