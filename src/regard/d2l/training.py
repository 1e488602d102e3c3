"""The book's object-oriented frame: a Module, a DataModule, and the Trainer that joins them.

A model is a Flax module; its parameters live in `trainer.state`. The translator's own loop is not
used here: it drives one model from one file of settings, and in the book it is the model that says
what a step, a loss and an optimizer are.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from flax import linen as nn
from flax.training import train_state
from jax import Array

from regard.d2l import helpers
from regard.d2l.plots import ProgressBoard

__all__ = ["HyperParameters", "Module", "DataModule", "Trainer", "Classifier"]


class HyperParameters:
    """Keeps a constructor's arguments as attributes, and all of them as `hparams`.

    Example:
        >>> from regard import d2l
        >>> class Net(d2l.HyperParameters):
        ...     def __init__(self, width, depth=2):
        ...         self.save_hyperparameters(ignore=["depth"])
        >>> Net(8).width, Net(8).hparams
        (8, {'width': 8})
    """

    hparams: dict[str, Any]

    if TYPE_CHECKING:  # the attributes are known when it runs

        def __getattr__(self, name: str) -> Any: ...

    def save_hyperparameters(self, ignore: Sequence[str] = ()) -> None:
        """Sets the arguments of the function that calls this as attributes, but for `ignore`."""
        caller: Any = inspect.currentframe().f_back  # type: ignore[union-attr]
        while caller.f_locals.get("self") is not self:  # a decorator's frame
            caller = caller.f_back
        names = caller.f_locals
        left_out = {"self", *ignore}
        self.hparams = {
            name: value
            for name, value in names.items()
            if name not in left_out and not name.startswith("_")
        }
        for name, value in self.hparams.items():
            setattr(self, name, value)


class TrainState(train_state.TrainState):
    """What a step changes: parameters, optimizer state, running statistics, the dropout key."""

    batch_stats: Any
    dropout_rng: Array


class Module(nn.Module, HyperParameters):
    """The base of the book's models: `loss`, steps, an optimizer, and a board to draw on.

    A subclass is a Flax dataclass with `__call__`, or with `setup` that makes `self.net`. A field
    `training: bool`, where there is one, is True in training steps and False in validation.

    Example:
        >>> from flax import linen as nn
        >>> from regard import d2l
        >>> class Line(d2l.Module):
        ...     lr: float
        ...
        ...     def setup(self):
        ...         self.net = nn.Dense(1)
        ...
        ...     def loss(self, params, X, y, state):
        ...         return ((state.apply_fn({"params": params}, *X) - y) ** 2).mean()
        >>> class Points(d2l.DataModule):
        ...     def get_dataloader(self, train):
        ...         X = d2l.linspace(-1.0, 1.0, 64)[:, None]
        ...         return self.get_tensorloader((X, 3 * X + 2), train)
        >>> model, trainer = Line(lr=0.3), d2l.Trainer(max_epochs=10)
        >>> model.board.display = False
        >>> trainer.fit(model, Points(batch_size=16))
        >>> [round(float(p.squeeze()), 2) for p in jax.tree.leaves(trainer.state.params)]
        [2.0, 3.0]
    """

    plot_train_per_epoch: ClassVar[int] = 2
    plot_valid_per_epoch: ClassVar[int] = 1

    def __post_init__(self) -> None:
        self.board = ProgressBoard()  # not a field: equal models are equal, whatever was drawn
        super().__post_init__()

    def loss(self, params: Any, X: Any, Y: Any, state: Any) -> Any:
        """The mean loss of a batch."""
        raise NotImplementedError(f"{type(self).__name__} has no loss(self, params, X, Y, state).")

    def forward(self, X: Any, *args: Any, **kwargs: Any) -> Any:
        return self.net(X, *args, **kwargs)

    def __call__(self, X: Any, *args: Any, **kwargs: Any) -> Any:
        return self.forward(X, *args, **kwargs)

    def plot(self, key: str, value: Any, train: bool) -> None:
        """A point on the board, over epochs."""
        trainer, self.board.xlabel = self.trainer, "epoch"
        if train:
            x = trainer.train_batch_idx / trainer.num_train_batches
            every_n = trainer.num_train_batches // self.plot_train_per_epoch
        else:
            x = trainer.epoch + 1
            every_n = trainer.num_val_batches // self.plot_valid_per_epoch
        self.board.draw(x, value, ("train_" if train else "val_") + key, every_n)

    def training_step(self, params: Any, batch: Any, state: Any) -> tuple[Any, Any]:
        """The loss of a batch, and its gradient with respect to params."""
        value, grads = _value_and_grad(self, False, params, tuple(batch), state)
        self.plot("loss", value, train=True)
        return value, grads

    def validation_step(self, params: Any, batch: Any, state: Any) -> None:
        self.plot("loss", self.loss(params, batch[:-1], batch[-1], state), train=False)

    def apply_init(self, dummy_input: Any, key: Any) -> Any:
        """The variables, drawn for a batch of this shape."""
        return jax.jit(self.init)(key, *dummy_input)

    def configure_optimizers(self) -> optax.GradientTransformation:
        """An optax optimizer: stochastic gradient descent with the field lr."""
        return optax.sgd(self.lr)


class DataModule(HyperParameters):
    """The base of the book's data sets: a loader for training and one for validation.

    Example:
        >>> from regard import d2l
        >>> data = d2l.DataModule(batch_size=4)
        >>> loader = data.get_tensorloader((d2l.arange(10), d2l.arange(10)), train=False)
        >>> len(loader), [batch[0].tolist() for batch in loader]
        (3, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]])

    Args:
        root: the folder that may hold local files.
        num_workers: kept for the book's signature; the arrays are in memory.
        batch_size: rows of a batch, for subclasses that do not set their own.
    """

    def __init__(self, root: str = "../data", num_workers: int = 4, batch_size: int = 32) -> None:
        self.save_hyperparameters()

    def get_dataloader(self, train: bool) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no get_dataloader(self, train).")

    def train_dataloader(self) -> Any:
        return self.get_dataloader(train=True)

    def val_dataloader(self) -> Any:
        return self.get_dataloader(train=False)

    def get_tensorloader(
        self, tensors: Sequence[Any], train: bool, indices: slice = slice(0, None)
    ) -> "ArrayLoader":
        """Batches of rows of these arrays, in a new order each epoch where `train`."""
        return ArrayLoader([np.asarray(a)[indices] for a in tensors], self.batch_size, train)


class ArrayLoader:
    """Batches of rows of arrays; the last may be smaller.

    Args:
        arrays: with one length.
        batch_size: rows of a batch.
        shuffle: a new order in each epoch, the same in every run.
        prepared: is applied to each batch.
    """

    def __init__(
        self,
        arrays: Sequence[np.ndarray],
        batch_size: int,
        shuffle: bool,
        prepared: Callable[..., tuple] = lambda *batch: batch,
    ) -> None:
        lengths = {len(a) for a in arrays}
        if len(lengths) != 1 or not min(lengths) or batch_size < 1:
            shapes = ", ".join(str(list(a.shape)) for a in arrays)
            raise ValueError(
                "a loader needs arrays of one length, at least 1, and a batch_size of at least 1. "
                f"Got arrays {shapes}, batch_size {batch_size}."
            )
        self.arrays, self.batch_size, self.prepared = list(arrays), batch_size, prepared
        (self.rows,) = lengths
        self._random = np.random.default_rng(0) if shuffle else None

    def __len__(self) -> int:
        return -(-self.rows // self.batch_size)

    def __iter__(self) -> Iterator[tuple]:
        order = np.arange(self.rows)
        if self._random is not None:
            self._random.shuffle(order)
        for first in range(0, self.rows, self.batch_size):
            rows = order[first : first + self.batch_size]
            yield self.prepared(*(a[rows] for a in self.arrays))


class Trainer(HyperParameters):
    """Trains a model on data: max_epochs times over the training batches, each with a validation.

    After `fit`, `state` has what was learned: `params`, `batch_stats` and `opt_state`.
    An example is at `Module`.

    Args:
        max_epochs: how many epochs.
        num_gpus: batches are put on the first GPU if this is above 0 and there is one; JAX
            computes on a GPU, where there is one, in any case.
        gradient_clip_val: the largest norm of the gradient; 0: any.
    """

    max_epochs: int
    gradient_clip_val: float
    state: Any

    def __getattr__(self, name: str) -> Any:
        before = " before fit(model, data)" if name == "state" else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{before}")

    def __init__(self, max_epochs: int, num_gpus: int = 0, gradient_clip_val: float = 0) -> None:
        self.save_hyperparameters()
        self.gpus = [helpers.gpu(i) for i in range(min(num_gpus, helpers.num_gpus()))]

    def prepare_data(self, data: Any) -> None:
        self.train_dataloader, self.val_dataloader = data.train_dataloader(), data.val_dataloader()
        self.num_train_batches = len(self.train_dataloader)
        self.num_val_batches = 0 if self.val_dataloader is None else len(self.val_dataloader)

    def prepare_model(self, model: Any) -> None:
        model.trainer = self
        model.board.clear()
        model.board.xlim = [0, self.max_epochs]
        self.model = model

    def prepare_batch(self, batch: Any) -> Any:
        return [helpers.to(a, self.gpus[0]) for a in batch] if self.gpus else batch

    def fit(self, model: Any, data: Any, key: Array | None = None) -> None:
        """Draws the parameters and trains them.

        Args:
            model: a `Module`.
            data: a `DataModule`.
            key: of the parameters and of dropout; None: `get_key()`.
        """
        self.prepare_data(data)
        self.prepare_model(model)
        params_key, dropout_key = jax.random.split(helpers.get_key() if key is None else key)
        batch = self.prepare_batch(next(iter(self.train_dataloader)))
        variables = model.apply_init(batch[:-1], {"params": params_key, "dropout": dropout_key})
        self.state = TrainState.create(
            apply_fn=model.apply,
            params=variables["params"],
            batch_stats=variables.get("batch_stats", {}),
            dropout_rng=dropout_key,
            tx=model.configure_optimizers(),
        )
        self._phases: dict[bool, Any] = {}
        self.train_batch_idx = self.val_batch_idx = 0
        try:
            for epoch in range(self.max_epochs):
                self.epoch = epoch
                self.fit_epoch()
        finally:
            model.board.save()

    def fit_epoch(self) -> None:
        """Once over the training batches, then once over the validation batches."""
        model = self._enter(training=True)
        for batch in self.train_dataloader:
            value, grads = model.training_step(
                self.state.params, self.prepare_batch(batch), self.state
            )
            changed = value[1]["batch_stats"] if self.state.batch_stats else {}
            self.state = self._updated(self.state, grads, changed, self.gradient_clip_val)
            self.train_batch_idx += 1
        model = self._enter(training=False)
        for batch in self.val_dataloader or ():
            model.validation_step(self.state.params, self.prepare_batch(batch), self.state)
            self.val_batch_idx += 1

    def clip_gradients(self, grad_clip_val: float, grads: Any) -> Any:
        """The gradients, scaled down to this norm where their norm is larger."""
        return optax.clip_by_global_norm(grad_clip_val).update(grads, optax.EmptyState())[0]

    def _enter(self, training: bool) -> Any:
        """The model of a phase, which `state` then applies.

        A copy, where the model has the flag: compiled programs are kept by model, and one that
        changes would be taken for what it was.
        """
        self.model.training = training
        if training not in self._phases:
            phase = self.model
            if "training" in (f.name for f in dataclasses.fields(phase)):
                phase = phase.clone(training=training)
                phase.trainer, phase.board = self, self.model.board
            self._phases[training] = phase
        phase = self._phases[training]
        self.state = self.state.replace(apply_fn=phase.apply)
        return phase

    @functools.partial(jax.jit, static_argnums=(0, 4))
    def _updated(self, state: Any, grads: Any, batch_stats: Any, clip_val: float) -> Any:
        if clip_val > 0:
            grads = self.clip_gradients(clip_val, grads)
        with jax.numpy_dtype_promotion("standard"):  # as optax expects
            return state.apply_gradients(
                grads=grads,
                batch_stats=batch_stats,
                dropout_rng=jax.random.split(state.dropout_rng)[0],
            )


class Classifier(Module):
    """A model whose output are logits: cross-entropy as its loss, and the accuracy.

    Layers with running statistics (`nn.BatchNorm`) and with dropout work: the loss hands their
    collection "batch_stats" on, and passes a new dropout key in every step.
    """

    def training_step(self, params: Any, batch: Any, state: Any) -> tuple[Any, Any]:
        """(loss, what changed), and the gradient of the loss with respect to params."""
        value, grads = _value_and_grad(self, True, params, tuple(batch), state)
        self.plot("loss", value[0], train=True)
        return value, grads

    def validation_step(self, params: Any, batch: Any, state: Any) -> None:
        inputs, Y = tuple(batch[:-1]), batch[-1]
        self.plot("loss", self.loss(params, inputs, Y, state)[0], train=False)
        self.plot("acc", self.accuracy(params, inputs, Y, state), train=False)

    @functools.partial(jax.jit, static_argnames=("self", "averaged"))
    def loss(self, params: Any, X: Any, Y: Any, state: Any, averaged: bool = True) -> Any:
        """Cross-entropy, the mean or each; and the collections that changed."""
        Y_hat, changed = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            *X,
            mutable=["batch_stats"],
            rngs={"dropout": state.dropout_rng},
        )
        each = cross_entropies(Y_hat, Y)
        return (each.mean() if averaged else each), changed

    @functools.partial(jax.jit, static_argnames=("self", "averaged"))
    def accuracy(self, params: Any, X: Any, Y: Any, state: Any, averaged: bool = True) -> Array:
        """How often the largest logit is the label: the mean, or 1 or 0 for each."""
        Y_hat = state.apply_fn({"params": params, "batch_stats": state.batch_stats}, *X)
        right = (Y_hat.argmax(-1).astype(Y.dtype) == Y).astype(jnp.float32).reshape(-1)
        return right.mean() if averaged else right


def cross_entropies(Y_hat: Array, Y: Array) -> Array:
    """−log softmax(Y_hat)[Y] of each label, flat: logits (…, classes), labels (…)."""
    if Y_hat.shape[:-1] != Y.shape:
        raise ValueError(
            "logits have the labels' shape and one axis more, the classes. "
            f"Got logits {list(Y_hat.shape)}, labels {list(Y.shape)}."
        )
    return optax.softmax_cross_entropy_with_integer_labels(Y_hat, Y).reshape(-1)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _value_and_grad(model: Any, has_aux: bool, params: Any, batch: tuple, state: Any) -> Any:
    return jax.value_and_grad(model.loss, has_aux=has_aux)(params, batch[:-1], batch[-1], state)
