"""Finds the cause of a non-finite loss or gradient: the first array that is not finite."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from regard.seq2seq.model.named_arrays import to_named
from regard.seq2seq.model.translation_model import Model
from regard.seq2seq.train.recipe import Recipe
from regard.seq2seq.train.train_step import Measured


class NonFiniteError(FloatingPointError):
    """A loss or gradient that is not finite; the message has the step and the cause."""

    @classmethod
    def at(
        cls, where: str, measured: Measured, cause: str, kept: str, rate: float, recipe: Recipe
    ) -> "NonFiniteError":
        """The error of a step.

        Args:
            where: step and epoch.
            measured: of that step.
            cause: of `cause_of`.
            kept: which checkpoint is left.
            rate: the step's learning rate.
            recipe: the run's.
        """
        return cls(
            f"training stopped at {where}: loss per token "
            f"{float(measured.loss) / max(float(measured.count), 1.0):.4g}, gradient norm "
            f"{float(measured.grad_norm):.4g}. Cause: {cause}. Left is {kept}. Fix: a lower "
            f"learning_rate (it was {rate:.3g}), a longer warmup, or a lower clip_norm (it was "
            f"{recipe.clip_norm:g})."
        )


def cause_of(model: Model, batch: Any, smoothing: float) -> str:
    """Runs a step's parts one after the other, without dropout, until one is not finite.

    Args:
        model: with the parameters before the step.
        batch: the step's batch.
        smoothing: label smoothing ε.

    Returns:
        A clause: "the encoder's annotations are not finite, …".
    """
    graph, params = nnx.split(model)
    bad = _not_finite(to_named(params))
    if bad:
        return f"parameters are not finite: {bad}"

    for name, arrays in zip(_PARTS, _parts(graph, params, batch), strict=True):
        if not all(np.isfinite(np.asarray(a, np.float32)).all() for a in jax.tree.leaves(arrays)):
            return f"{name} are not finite; {_largest(params)}"
    value, grads = _loss_and_gradient(graph, smoothing, params, batch)
    if not np.isfinite(value):
        return f"the loss of finite logits is {float(value)}; {_largest(params)}"
    bad = _not_finite(to_named(grads))
    if bad:
        return f"the loss is finite, its gradient is not: {bad}"
    return (
        "without dropout, loss and gradient are finite: the sum of squares of the gradient, or "
        f"what dropout scaled up, is not; {_largest(params)}"
    )


# In the order of computation: the first that is not finite is the cause of the others.
_PARTS = ("the encoder's annotations", "the decoder's readouts", "the logits")


@functools.partial(jax.jit, static_argnums=0)
def _parts(graph: Any, params: Any, batch: Any) -> tuple:
    model = nnx.merge(graph, params)
    encoded = model.encode(batch.source, batch.source_lens)
    readout, _ = model.decode(encoded, batch.target_in)
    return encoded, readout, model.logits(readout)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _loss_and_gradient(graph: Any, smoothing: float, params: Any, batch: Any) -> tuple:
    def loss(params: Any) -> Any:
        return nnx.merge(graph, params).loss(batch, smoothing=smoothing)[0]

    return jax.value_and_grad(loss)(params)


def _not_finite(named: dict[str, np.ndarray]) -> str:
    bad = [name for name, array in named.items() if not np.isfinite(array).all()]
    return ", ".join(bad[:4]) + (f" and {len(bad) - 4} more" if bad[4:] else "")


def _largest(params: Any) -> str:
    named = to_named(jax.tree.map(lambda x: jnp.abs(x).max(), params))
    name = max(named, key=lambda name: float(named[name]))
    return f"the largest parameter is {float(named[name]):.3g}, in {name}"
