"""One update of the parameters, jitted, on one device or shared by several.

Nothing here waits for the device: a step returns its measurements as arrays that may still be
computed. A step whose loss or gradient is not finite changes nothing, and neither does any later
one, so that the parameters before it can be examined.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

try:
    import optax  # type: ignore[import-untyped]
except ModuleNotFoundError as _error:
    raise ImportError(
        "Training needs optax, which is not installed.\n"
        'Install it with: pip install "regard[translate]"'
    ) from _error

from regard.seq2seq.distributed.devices import DataParallel
from regard.seq2seq.train.recipe import Recipe
from regard.seq2seq.train.runtime_options import optimized


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The arrays that a step updates.

    Attributes:
        params: the model's.
        optimizer: Adam's moments.
        healthy: bool, whether every step so far was finite.
    """

    params: Any
    optimizer: Any
    healthy: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Measured:
    """Measurements of one step: sums over target tokens, their number, and the gradient norm."""

    loss: Array
    nll: Array
    count: Array
    grad_norm: Array
    healthy: Array


Step = Callable[[TrainState, Any, Any, Any], tuple[TrainState, Measured]]


def optimizer_of(recipe: Recipe) -> optax.GradientTransformation:
    """Adam, then weight decay; the step applies clipping and the learning rate."""
    return optax.chain(
        optax.scale_by_adam(recipe.beta1, recipe.beta2, recipe.epsilon),
        *([optax.add_decayed_weights(recipe.weight_decay)] if recipe.weight_decay else []),
    )


def make_step(graph: Any, recipe: Recipe, parallel: DataParallel) -> Step:
    """The jitted step(state, batch, number, rate); the state is donated.

    Args:
        graph: the model's structure, of nnx.split.
        recipe: of which clipping, Adam, the weights of the loss and the seed are used here.
        parallel: the devices.
    """
    optimizer = optimizer_of(recipe)
    seed = jax.random.key(recipe.seed)

    def sums(params: Any, batch: Any, rng: Array) -> Any:
        def loss_of(params: Any) -> tuple[Array, tuple[Array, Array]]:
            model = nnx.merge(graph, params)
            weights = dict(smoothing=recipe.label_smoothing, consistency=recipe.consistency)
            loss, nll, count = model.loss(batch, rng=rng, **weights)
            return loss, (nll, count)

        (loss, (nll, count)), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        return loss, nll, count, grads

    everything = parallel.over_rows(sums)

    def step(
        state: TrainState, batch: Any, number: Array, rate: Array
    ) -> tuple[TrainState, Measured]:
        rng = jax.random.fold_in(seed, number)
        loss, nll, count, grads = everything(state.params, batch, rng)
        share = 1.0 / jnp.maximum(count, 1.0)
        squares = [jnp.sum(jnp.square(grad)) for grad in jax.tree.leaves(grads)]
        norm = share * jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))
        healthy = state.healthy & jnp.isfinite(loss) & jnp.isfinite(norm)
        # Mean and clipping are one factor, which XLA fuses into Adam's sums: no scaled copy.
        factor = share * jnp.minimum(1.0, recipe.clip_norm / jnp.maximum(norm, 1e-30))
        grads = jax.tree.map(lambda grad: jnp.where(healthy, grad * factor, 0.0), grads)
        with jax.numpy_dtype_promotion("standard"):  # as optax expects
            updates, moments = optimizer.update(grads, state.optimizer, state.params)
        # A rate of 0 leaves the parameters unchanged. Selecting between old and new ones would
        # keep both, and copy all of them.
        rate = jnp.where(healthy, rate, 0.0)
        params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
        measured = Measured(loss, nll, count, norm, healthy)
        return parallel.keep(TrainState(params, moments, healthy)), measured

    return jax.jit(step, donate_argnums=0, compiler_options=optimized())
