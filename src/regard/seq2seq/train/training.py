"""Training, from the first step to the averaged model, or from any checkpoint onward.

A run's numbers depend only on configuration, recipe and data: each step's random numbers come from
its index, and a checkpoint holds everything else that the next step needs, including the position
in the data. So a run that was killed and continued ends with the same parameters, bit for bit, as
one that was not (on a GPU with XLA_FLAGS=--xla_gpu_deterministic_ops=true; otherwise its sums
depend on the order in which threads finish). The files are run_folder.py's.

Several processes run this side by side, each with its own devices and with the same numbers, up
to the order of sums. Only the first of them uses the folder and reports progress.
"""

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from regard.seq2seq.distributed.devices import DataParallel
from regard.seq2seq.distributed.hosts import Hosts
from regard.seq2seq.model.config import ModelConfig
from regard.seq2seq.model.named_arrays import from_named, to_named
from regard.seq2seq.model.translation_model import Model
from regard.seq2seq.train.batches import TrainingData
from regard.seq2seq.train.non_finite import NonFiniteError, cause_of
from regard.seq2seq.train.progress import Plan, Progress, Sample, StepReport, ValidationReport
from regard.seq2seq.train.recipe import Recipe
from regard.seq2seq.train.run_folder import RunFolder
from regard.seq2seq.train.run_state import RunState
from regard.seq2seq.train.train_step import Measured, TrainState, make_step, optimizer_of
from regard.seq2seq.train.validation import Validation, Validator


@dataclass(frozen=True)
class Result:
    """The outcome of a run.

    Attributes:
        model: the average of the best parameters, or the single best, whichever validates better;
            without a validation, the last.
        params: the last parameters, by name.
        step, epoch: where the run ended.
        loss, bleu: of `model` on the validation set; None without one.
        averaged: the steps whose parameters `model` is the average of.
        reason: why the run ended.
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
    config: ModelConfig,
    recipe: Recipe,
    data: TrainingData,
    folder: str | Path,
    *,
    validation: Validation | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    stop: Callable[[], bool] = lambda: False,
    devices: Sequence[jax.Device] | None = None,
    model_axis: int = 1,
) -> Result:
    """Trains a model, or continues training it.

    After `jax.distributed.initialize`, every process calls this with the same arguments; only
    process 0 uses the folder and reports progress. A run may be continued by another number of
    processes: the losses are the same.

    Args:
        config: the model.
        recipe: how to train.
        data: batches in an order that can be continued.
        folder: where the run is kept.
        validation: decides early stopping and which parameters are best.
        resume: True continues from the folder's last checkpoint, or starts if there is none.
        progress: called as the run proceeds.
        stop: called between steps, and between the batches of a validation. When it returns True,
            training ends with KeyboardInterrupt, and between steps it first writes a checkpoint.
            For runs of one process.
        devices: share each batch; None: all devices of all processes.
        model_axis: how many devices share each matrix of the parameters; a divisor of the number
            of devices.

    Raises:
        FileExistsError: the folder has a run already, and resume is False; or another process
            trains in it.
        ValueError: the run in the folder has another configuration, recipe or data, or other
            validation pairs.
        NonFiniteError: a loss or gradient is not finite; the message has the step and the cause.
        CheckpointError: a checkpoint cannot be written, or none can be read.
        KeyboardInterrupt: `stop` returned True; the run can be continued.
    """
    parallel = DataParallel(jax.devices() if devices is None else devices, model_axis)
    run = _Run(config, recipe, data, validation, progress or Progress(), parallel, stop)
    run.shared = RunFolder(folder, config, recipe, resume, run.hosts)
    try:
        run.begin()
        if run.place.reason is None:
            run.place.reason = run.loop()
            run.save(run.data.state())
        return run.end()
    finally:
        run.close()


class _Run:
    shared: RunFolder
    state: TrainState

    def __init__(
        self,
        config: ModelConfig,
        recipe: Recipe,
        data: TrainingData,
        validation: Validation | None,
        progress: Progress,
        parallel: DataParallel,
        stop: Callable[[], bool],
    ) -> None:
        if recipe.stop_on == "bleu" and (validation is None or validation.bleu is None):
            raise ValueError(
                "stop_on='bleu' needs a validation with a bleu function. Got "
                f"{'no validation' if validation is None else 'bleu=None'}. "
                "Fix: Validation(batches, bleu=...), or stop_on='loss'."
            )
        self.config, self.recipe, self.data = config, recipe, data
        self.validation, self.parallel, self.stop = validation, parallel, stop
        self.hosts = Hosts.of(parallel.devices)
        self.progress = progress if self.hosts.leads else Progress()
        self.place, self.saved = RunState(), -1
        self.pending: list[Measured] = []
        self.compiled: set[tuple[int, ...]] = set()
        self.recent: deque[tuple[int, Any]] = deque(maxlen=recipe.log_every)
        self.started = self.reported = time.perf_counter()
        self.counted, self.idle = 0.0, 0.0  # since the last report: tokens, seconds not training

    # Beginning -------------------------------------------------------------------------------

    def begin(self) -> None:
        """Builds the model, and restores the folder's last checkpoint if there is one."""
        recipe = self.recipe
        self.graph, params = nnx.split(Model(self.config, rngs=nnx.Rngs(recipe.seed)))
        if self.hosts.processes > 1:  # different machines may round a random number differently
            drawn = self.hosts.first_arrays(lambda: to_named(params))
            params = from_named(params, drawn, "process 0")
        moments = optimizer_of(recipe).init(params)
        found = self.shared.latest(self.progress.warned)
        if found is not None:
            origin = f"{self.shared.folder}/checkpoints/{found.step}"
            params, moments = from_named((params, moments), found.arrays, origin)
            self.place, self.saved = RunState.from_json(found.meta["place"], recipe), found.step
            self.data.restore(found.meta["data"])
        self.state = self.parallel.place(TrainState(params, moments, jnp.array(True)))
        # Compiled when they first run, once for each shape of batch.
        self.step = make_step(self.graph, recipe, self.parallel)
        self.validator = None
        if self.validation is not None:
            self.validator = Validator(
                self.graph, self.validation, self.parallel, self.hosts, self._before_batch
            )
        if found is not None:
            self._must_validate_as_before(found.meta)
        self.log = self.shared.log(None if found is None else found.step)
        count = sum(leaf.size for leaf in jax.tree.leaves(params))
        steps = len(self.data) if isinstance(self.data, Sized) else None
        devices = len(self.parallel.devices)
        plan = Plan(recipe.epochs, steps, recipe.max_steps, count, devices, self.place.step)
        self.progress.started(plan)

    def _must_validate_as_before(self, meta: dict[str, Any]) -> None:
        """Raises where the best scores so far are of other validation pairs."""
        mine = None if self.validator is None else self.validator.checksum
        if meta.get("validation", mine) != mine:
            raise ValueError(
                f"the run in {self.shared.folder} was started with other validation pairs, and "
                "scores of both cannot be compared. Fix: the same pairs, or another folder."
            )

    # Steps -----------------------------------------------------------------------------------

    def loop(self) -> str:
        """Trains until a limit is reached, and returns which."""
        recipe, place = self.recipe, self.place
        while (reason := place.limit(recipe)) is None:
            after = self.data.state()
            for batch in self.data:
                # At the top of the loop it is known that the epoch has not just ended.
                self._pause(after)
                reason = place.limit(recipe)
                if reason is not None or self.stop():
                    self.data.restore(after)  # this batch was not used
                    if reason is not None:
                        return reason
                    if place.step != self.saved and place.step > 0:
                        self.save(after)
                    raise KeyboardInterrupt
                after = self.data.state()
                rate = recipe.learning_rate_at(place.step, place.plateau)
                self.recent.append((place.step, batch))
                numbers = np.int32(place.step), np.float32(rate)
                with self._compiling(batch):
                    shared = self.parallel.shard(batch)
                    self.state, measured = self.step(self.state, shared, *numbers)
                self.pending.append(measured)
                place.step += 1
                if place.step % recipe.log_every == 0:
                    self._report(rate)
            place.epoch += 1
            if recipe.validate_every is None or place.limit(recipe) is not None:
                self._validate()
            if place.limit(recipe) is None:
                self.save(self.data.state())
        return reason

    def _before_batch(self, what: str) -> None:
        """Before each batch of a validation."""
        if self.stop():
            raise KeyboardInterrupt
        self.progress.doing(what)

    @contextlib.contextmanager
    def _compiling(self, batch: Any) -> Iterator[None]:
        """Around the first step of each shape of batch, which XLA compiles."""
        shape = np.shape(batch.target_out)
        if shape in self.compiled:
            yield
            return
        self.compiled.add(shape)
        number, shapes = len(self.compiled), len(getattr(self.data, "shapes", ()))
        of = f" ({number} of {shapes})" if shapes >= number else ""
        self.progress.doing(f"compiling batches of {shape[0]} × {shape[1]}{of}")
        yield
        self.progress.doing("training")

    def _pause(self, data: dict[str, Any]) -> None:
        """Validates and saves when due, in the middle of an epoch."""
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

    def _report(self, rate: float) -> None:
        """Waits for the steps so far, adds up what they measured, and reports it."""
        self._settle()
        loss, nll, count = self.place.sums
        self.place.sums = [0.0, 0.0, 0.0]
        now = time.perf_counter()
        speed = self.counted / max(now - self.reported - self.idle, 1e-9)
        self.reported, self.counted, self.idle = now, 0.0, 0.0
        means, norm = (loss / max(count, 1.0), nll / max(count, 1.0)), float(self.latest.grad_norm)
        report = StepReport(self.place.step, self.place.epoch, *means, norm, rate, speed)
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
        """Raises, in every process, the error with the step and the cause."""
        params = self.parallel.here(self.state.params)  # as they were before that step

        def fail() -> None:
            checkpoints, batch = self.shared.checkpoints, dict(self.recent)[step]
            steps = checkpoints.steps()
            last = f"the last good checkpoint is of step {steps[-1]}" if steps else "no checkpoint"
            cause = cause_of(nnx.merge(self.graph, params), batch, self.recipe.label_smoothing)
            rate = self.recipe.learning_rate_at(step, self.place.plateau)
            where = f"step {step}, epoch {self.place.epoch}"
            raise NonFiniteError.at(
                where, measured, cause, f"{last} in {checkpoints.folder}", rate, self.recipe
            )

        self.hosts.first(fail)

    # Validation ------------------------------------------------------------------------------

    def _validate(self) -> None:
        """Scores the parameters, and updates best parameters, learning rate and patience."""
        place, recipe = self.place, self.recipe
        self._settle()
        if self.validator is None:
            place.validated = place.step
            return
        begun = time.perf_counter()
        loss, bleu = self.validator(self.state.params)
        place.validated = place.step
        score = self._score(loss, bleu)
        is_best, keeps = place.count(score, recipe)
        if keeps:
            self.shared.save_best(place.step, self.parallel.whole(self.state.params), score)
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
                parts = self.validator.sample(params)
                self.progress.sampled(Sample(place.step, place.epoch, *parts))
        self.progress.doing("training")
        self.idle += time.perf_counter() - begun

    def _score(self, loss: float, bleu: float | None) -> float:
        """The number that validations are compared by: the higher the better."""
        return -loss if self.recipe.stop_on == "loss" else cast(float, bleu)

    # Saving and ending -----------------------------------------------------------------------

    def save(self, data: dict[str, Any]) -> None:
        """Writes a checkpoint, after verifying that every step so far was finite."""
        self._settle()
        begun, place = time.perf_counter(), self.place
        whole = self.parallel.whole((self.state.params, self.state.optimizer))
        checksum = None if self.validator is None else self.validator.checksum
        meta = {"place": dataclasses.asdict(place), "data": data, "validation": checksum}
        saved = partial(self.progress.saved, place.step)
        self.shared.save(place.step, whole, meta, self.recipe.keep, saved)
        self.saved = place.step
        self.idle += time.perf_counter() - begun

    def end(self) -> Result:
        """The best parameters, averaged if the average is better than the single best."""
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
                candidate = from_named(params, named, str(self.shared.folder / "best"))
                candidate = self.parallel.place(candidate)
                loss, bleu = self.validator(candidate)
                scored.append((self._score(loss, bleu), choice, candidate, loss, bleu))
            _, averaged, params, loss, bleu = max(scored, key=lambda entry: entry[0])
        model = nnx.merge(self.graph, self.parallel.here(params))
        self.shared.save_model(model)
        return Result(model, last, place.step, place.epoch, loss, bleu, sorted(averaged), reason)

    def close(self) -> None:
        """Waits for the devices and the checkpoints' threads: none runs on after `train`."""
        with contextlib.suppress(RuntimeError):  # the step's arguments were given up to it
            jax.block_until_ready((getattr(self, "state", None), self.pending))
        self.shared.close()
