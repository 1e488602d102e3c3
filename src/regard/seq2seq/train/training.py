"""Training, from the first step to the averaged model, and from any checkpoint on.

A run's numbers depend on nothing but configuration, recipe and data: each step's random numbers
come from its number, and a checkpoint holds all else that the next step needs, the data's place
too. So a run that was killed and continued ends with the same parameters, to the bit, as one that
was not (on a GPU with XLA_FLAGS=--xla_gpu_deterministic_ops=true, whose sums otherwise depend on
the order in which threads finish). Where it is kept is run_folder.py.

Several processes run this side by side, each with its own devices and with the same numbers, up
to the order of sums. Only the first of them has the folder and the listener; what it finds there
reaches the others through shared_folder.py.
"""

import dataclasses
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from regard.seq2seq.decode import programs
from regard.seq2seq.decode.search import SearchOptions
from regard.seq2seq.distributed.devices import DataParallel
from regard.seq2seq.distributed.hosts import Hosts
from regard.seq2seq.distributed.shared_folder import SharedFolder
from regard.seq2seq.model.config import Config
from regard.seq2seq.model.named_arrays import from_named, to_named
from regard.seq2seq.model.translation_model import Model
from regard.seq2seq.train.checkpoints import Checkpoint
from regard.seq2seq.train.non_finite import NonFiniteError, cause_of
from regard.seq2seq.train.progress import Plan, Progress, Sample, StepReport, ValidationReport
from regard.seq2seq.train.recipe import Recipe
from regard.seq2seq.train.train_step import Measured, TrainState, make_step, optimizer_of
from regard.seq2seq.train.validation import Validation, Validator, ids_of


class TrainingData(Protocol):
    """What is trained on: `regard.seq2seq.train.batches.Batches`, or anything that does the same.

    Each iteration gives what is left of the epoch, and the one after it the next epoch.
    """

    def __iter__(self) -> Iterator[Any]: ...

    def state(self) -> dict[str, Any]:
        """Where the iteration stands, as what JSON can hold."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        ...


@dataclass(frozen=True)
class Result:
    """What came of a run.

    Attributes:
        model: the average of the best, or the single best, whichever validates better; without
            a validation, the last.
        params: the last parameters, by name.
        step, epoch: how far it came.
        loss, bleu: `model` on the validation set; None without one.
        averaged: the steps whose parameters `model` is the average of.
        reason: why it ended.
    """

    model: Model
    params: dict[str, np.ndarray]
    step: int
    epoch: int
    loss: float | None
    bleu: float | None
    averaged: list[int]
    reason: str


def train(
    config: Config,
    recipe: Recipe,
    data: TrainingData,
    folder: str | Path,
    *,
    validation: Validation | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    devices: Sequence[jax.Device] | None = None,
    model_axis: int = 1,
) -> Result:
    """Trains a model, or goes on training it.

    After `jax.distributed.initialize`, every process calls this with the same arguments; only
    process 0 uses the folder and tells how it goes. As many processes as there are, and another
    number when it goes on: the losses are the same.

    Args:
        config: the model.
        recipe: how.
        data: batches in an order that can be taken up again.
        folder: where the run is kept.
        validation: what early stopping and the choice of the best go by.
        resume: True goes on from the folder's last checkpoint, or from the beginning where there
            is none.
        progress: is told how it goes.
        devices: share each batch; None: all that there are, of every process.
        model_axis: so many devices share each matrix of the parameters; a divisor of the devices.

    Raises:
        FileExistsError: there is a run in the folder already, and resume is False.
        ValueError: the run in the folder is another one than is asked for.
        NonFiniteError: a loss or gradient is not finite; the message has the step and the cause.
        CheckpointError: a checkpoint cannot be written, or none can be read.
    """
    parallel = DataParallel(jax.devices() if devices is None else devices, model_axis)
    run = _Run(config, recipe, data, Path(folder), validation, progress or Progress(), parallel)
    run.begin(resume)
    if run.place.reason is None:
        run.place.reason = run.go()
        run.save(run.data.state())
    return run.end()


@dataclass
class _Place:
    """Where a run stands, besides its arrays: what a checkpoint's JSON holds."""

    step: int = 0
    epoch: int = 0
    plateau: float = 1.0  # the learning rate's factor
    stale: int = 0  # validations in a row that were no better
    stale_rate: int = 0  # the same, since the rate was lowered
    best: list[tuple[float, int]] = field(default_factory=list)  # (score, step), best first
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # loss, nll, count
    validated: int = -1  # the step of the last validation
    reason: str | None = None  # why it ended


class _Run:
    def __init__(
        self,
        config: Config,
        recipe: Recipe,
        data: TrainingData,
        folder: Path,
        validation: Validation | None,
        progress: Progress,
        parallel: DataParallel,
    ) -> None:
        if recipe.stop_on == "bleu" and (validation is None or validation.bleu is None):
            raise ValueError(
                "stop_on='bleu' needs a validation with a bleu function. Got "
                f"{'no validation' if validation is None else 'bleu=None'}. "
                "Fix: Validation(batches, bleu=...), or stop_on='loss'."
            )
        self.config, self.recipe, self.data, self.folder = config, recipe, data, folder
        self.validation, self.parallel = validation, parallel
        self.hosts = Hosts.of(parallel.devices)
        self.progress = progress if self.hosts.leads else Progress()
        self.place = _Place()
        self.pending: list[Measured] = []
        self.recent: deque[tuple[int, Any]] = deque(maxlen=recipe.log_every)
        self.started = self.told = time.perf_counter()
        self.counted, self.idle = 0.0, 0.0  # tokens and seconds not spent on them, since then

    # Beginning -------------------------------------------------------------------------------

    def begin(self, resume: bool) -> None:
        """Takes up the folder's run, or starts one."""
        self.shared = SharedFolder(self.hosts, self.folder, self.config, self.recipe, resume)
        self._build()
        found = self.shared.latest(self.progress.warned)
        if found is not None:
            self._restore(found)
        self.log = self.shared.log(self.place.step if found is not None else None)
        count = sum(leaf.size for leaf in jax.tree.leaves(self.state.params))
        steps = len(self.data) if isinstance(self.data, Sized) else None
        recipe, place = self.recipe, self.place
        devices = len(self.parallel.devices)
        self.progress.started(
            Plan(recipe.epochs, steps, recipe.max_steps, count, devices, place.step)
        )

    def _build(self) -> None:
        """The initial state, and the programs, which are compiled when they are first run."""
        recipe = self.recipe
        self.graph, params = nnx.split(Model(self.config, rngs=nnx.Rngs(recipe.seed)))
        if self.hosts.processes > 1:  # machines of two kinds may round a random number differently
            drawn = self.hosts.first_arrays(lambda: to_named(params))
            params = from_named(params, drawn, "process 0")
        moments = optimizer_of(recipe).init(params)
        self.state = self.parallel.place(TrainState(params, moments, jnp.array(True)))
        self.step = make_step(self.graph, recipe, self.parallel)
        self.validator = None
        if self.validation is not None:
            self.validator = Validator(self.graph, self.validation, self.parallel, self.hosts)

    def _restore(self, found: Checkpoint) -> None:
        like = (self.state.params, self.state.optimizer)
        origin = f"{self.folder / 'checkpoints' / str(found.step)}"
        params, moments = from_named(like, found.arrays, origin)
        self.state = self.parallel.place(TrainState(params, moments, jnp.array(True)))
        place = dict(found.meta["place"])
        place["best"] = [(float(score), int(step)) for score, step in place["best"]]
        self.place = _Place(**place)
        if self.place.reason and self._ended() is None:
            self.place.reason = None  # it is asked to go on after all: more epochs, say
        self.data.restore(found.meta["data"])

    # Going -----------------------------------------------------------------------------------

    def go(self) -> str:
        """Trains until something says to stop, and returns what."""
        recipe, place = self.recipe, self.place
        while (reason := self._ended()) is None:
            after = self.data.state()
            for batch in self.data:
                # At the top of the loop, where it is known that the epoch has not just ended.
                self._pause(after)
                if (reason := self._ended()) is not None:
                    self.data.restore(after)  # this batch was not used
                    return reason
                after = self.data.state()
                rate = recipe.learning_rate_at(place.step, place.plateau)
                self.recent.append((place.step, batch))
                shared = self.parallel.share(batch)
                numbers = np.int32(place.step), np.float32(rate)
                self.state, measured = self.step(self.state, shared, *numbers)
                self.pending.append(measured)
                place.step += 1
                if place.step % recipe.log_every == 0:
                    self._tell(rate)
            place.epoch += 1
            if recipe.validate_every is None or self._ended() is not None:
                self._validate()
            if self._ended() is None:
                self.save(self.data.state())
        return reason

    def _pause(self, data: dict[str, Any]) -> None:
        """Validates and saves where it is time to, in the middle of an epoch."""
        recipe, step = self.recipe, self.place.step
        over = recipe.max_steps is not None and step >= recipe.max_steps
        validates = recipe.validate_every is not None and step % recipe.validate_every == 0
        saves = recipe.checkpoint_every is not None and step % recipe.checkpoint_every == 0
        if step == 0 or step == self.place.validated:
            return
        if validates or over:
            self._validate()
        if validates or saves:
            self.save(data)

    def _ended(self) -> str | None:
        recipe, place = self.recipe, self.place
        if recipe.max_steps is not None and place.step >= recipe.max_steps:
            return f"{place.step} steps are done"
        if place.epoch >= recipe.epochs:
            return f"{place.epoch} epochs are done"
        if recipe.patience and place.stale >= recipe.patience:
            return f"{place.stale} validations in a row were no better"
        return None

    def _tell(self, rate: float) -> None:
        """Waits for the steps so far, adds up what they measured, and says it."""
        self._settle()
        latest = self.latest
        loss, nll, count = self.place.sums
        self.place.sums = [0.0, 0.0, 0.0]
        now = time.perf_counter()
        speed = self.counted / max(now - self.told - self.idle, 1e-9)
        self.told, self.counted, self.idle = now, 0.0, 0.0
        report = StepReport(
            self.place.step,
            self.place.epoch,
            loss / max(count, 1.0),
            nll / max(count, 1.0),
            float(latest.grad_norm),
            rate,
            speed,
        )
        self._write(
            step=report.step,
            epoch=report.epoch,
            learning_rate=rate,
            train_loss=report.loss,
            train_nll=report.nll,
            grad_norm=report.grad_norm,
            tokens_per_second=round(speed, 1),
            seconds=round(now - self.started, 2),
        )
        self.progress.stepped(report)

    def _write(self, **values: float | int | None) -> None:
        if self.log is not None:
            self.log.write(**values)

    def _settle(self) -> None:
        """Waits for every step so far; raises if one was not finite."""
        measured: list[Measured] = jax.device_get(self.pending)
        first = self.place.step - len(measured)
        self.pending = []
        for offset, one in enumerate(measured):
            if not one.healthy:
                self._stop(first + offset, one)
            parts = (one.loss, one.nll, one.count)
            sums = zip(self.place.sums, parts, strict=True)
            self.place.sums = [total + float(part) for total, part in sums]
            self.counted += float(one.count)
            self.latest = one

    def _stop(self, step: int, measured: Measured) -> None:
        """Raises, in every process, the error that says at which step it was and why."""
        params = self.parallel.here(self.state.params)  # as they were before that step

        def fail() -> None:
            raise self._sick(step, measured, nnx.merge(self.graph, params))

        self.hosts.first(fail)

    def _sick(self, step: int, measured: Measured, model: Model) -> NonFiniteError:
        batch = dict(self.recent)[step]
        cause = cause_of(model, batch, self.recipe.label_smoothing)
        checkpoints = self.shared.mine.checkpoints
        steps = checkpoints.steps()
        kept = f"the last good checkpoint is of step {steps[-1]}" if steps else "there is none yet"
        rate = self.recipe.learning_rate_at(step, self.place.plateau)
        return NonFiniteError(
            f"training stopped at step {step}, epoch {self.place.epoch}: loss per token "
            f"{float(measured.loss) / max(float(measured.count), 1.0):.4g}, gradient norm "
            f"{float(measured.grad_norm):.4g}. Cause: {cause}. In {checkpoints.folder} "
            f"{kept}. Fix: a lower learning_rate (it was {rate:.3g}), a longer warmup, or a lower "
            f"clip_norm (it was {self.recipe.clip_norm:g})."
        )

    # Validating ------------------------------------------------------------------------------

    def _validate(self) -> None:
        """Scores the parameters, and draws every consequence: best, plateau, patience."""
        place, recipe = self.place, self.recipe
        self._settle()
        place.validated = place.step
        if self.validator is None:
            return
        begun = time.perf_counter()
        loss, bleu = self.validator(self.state.params)
        score = self._score(loss, bleu)
        is_best = not place.best or score > place.best[0][0]
        ranked = sorted([*place.best, (score, place.step)], key=lambda pair: (-pair[0], pair[1]))
        place.best = ranked[: recipe.average]
        if (score, place.step) in place.best:
            self.shared.save_best(place.step, self.parallel.whole(self.state.params), score)
        place.stale = 0 if is_best else place.stale + 1
        place.stale_rate = 0 if is_best else place.stale_rate + 1
        if recipe.schedule == "plateau" and place.stale_rate >= recipe.plateau_patience:
            place.plateau, place.stale_rate = place.plateau * recipe.plateau_factor, 0
        seconds = time.perf_counter() - begun
        best = abs(place.best[0][0])
        self._write(
            step=place.step,
            epoch=place.epoch,
            learning_rate=recipe.learning_rate_at(place.step, place.plateau),
            valid_loss=loss,
            valid_bleu=bleu,
            seconds=round(time.perf_counter() - self.started, 2),
        )
        report = ValidationReport(place.step, place.epoch, loss, bleu, is_best, best, seconds)
        self.progress.validated(report)
        if self.hosts.first(lambda: type(self.progress).sampled is not Progress.sampled):
            params = self.parallel.here(self.state.params)
            if self.hosts.leads:
                self.progress.sampled(self._sample(params))
        self.idle += time.perf_counter() - begun

    def _score(self, loss: float, bleu: float | None) -> float:
        """What is compared: the higher the better, and NaN never."""
        score = -loss if self.recipe.stop_on == "loss" else cast(float, bleu)
        return score if score == score else -math.inf

    def _sample(self, params: Any) -> Sample:
        batch = cast(Validator, self.validator).first()
        model = nnx.merge(self.graph, params)
        one = slice(0, 1)
        found = programs.search(
            model, batch.source[one], batch.source_lens[one], SearchOptions(), 1, hurry=True
        )
        S, T = int(batch.source_lens[0]), int(batch.target_lens[0])
        hypothesis = ids_of(found)[0]
        return Sample(
            self.place.step,
            self.place.epoch,
            np.asarray(batch.source[0, :S]).tolist(),
            np.asarray(batch.target_out[0, :T]).tolist(),
            hypothesis,
            np.asarray(found.attention[0, 0, : len(hypothesis), :S]),
        )

    # Saving ----------------------------------------------------------------------------------

    def save(self, data: dict[str, Any]) -> None:
        """Writes a checkpoint of a run whose every step so far was finite."""
        self._settle()
        begun, place = time.perf_counter(), self.place
        whole = self.parallel.whole((self.state.params, self.state.optimizer))
        meta = {"place": dataclasses.asdict(place), "data": data}
        saved = partial(self.progress.saved, place.step)
        self.shared.save(place.step, whole, meta, self.recipe.keep, saved)
        self.idle += time.perf_counter() - begun

    # Ending ----------------------------------------------------------------------------------

    def end(self) -> Result:
        """The best parameters, averaged, if the average is better than the best alone."""
        place = self.place
        reason = cast(str, place.reason)
        self.progress.finished(reason)
        last = to_named(self.parallel.whole(self.state.params))
        params, averaged = self.state.params, [place.step]
        loss, bleu = None, None
        if self.validator is not None and place.best:
            steps = [step for _, step in place.best]
            choices = [steps[:1], steps] if len(steps) > 1 else [steps]
            scored = []
            for choice in choices:
                named = self.shared.average(choice)
                candidate = from_named(self.state.params, named, str(self.folder / "best"))
                candidate = self.parallel.place(candidate)
                loss, bleu = self.validator(candidate)
                score = self._score(loss, bleu)
                scored.append((score, choice, candidate, loss, bleu))
            _, averaged, params, loss, bleu = max(scored, key=lambda entry: entry[0])
        model = nnx.merge(self.graph, self.parallel.here(params))
        self.shared.save_model(model)
        return Result(model, last, place.step, place.epoch, loss, bleu, sorted(averaged), reason)
