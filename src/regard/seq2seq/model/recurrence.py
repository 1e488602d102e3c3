"""Recurrent cells, and the loop that runs them: only what depends on the previous step is in it.

Products with the inputs are made for all steps at once, before the loop. Products with the state
have to be inside, but their kernels' gradients do not: `unroll` makes each of them in one product
over all steps, after the loop, where autodiff of lax.scan would add up one per step.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from regard.score.contract import accumulation_dtype

# times(name, left) is left @ kernels[name], in float32.
Times = Callable[[str, Array], Array]
# step(times, shared, carry, x) -> carry, y. Whatever arrays it needs come in through `shared`.
Step = Callable[[Times, Any, Any, Any], tuple[Any, Any]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def unroll(
    step: Step,
    kernels: dict[str, Array],
    shared: Any,
    carry: Any,
    xs: Any,
    count: Array | None = None,
) -> tuple[Any, Any]:
    """lax.scan of a step that multiplies by kernels through `times`.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard.seq2seq.model.recurrence import unroll
        >>> def step(times, shared, carry, x):
        ...     carry = times("w", carry) + x
        ...     return carry, carry
        >>> xs = jnp.ones((3, 1, 2))  # [steps, B, width]
        >>> _, ys = unroll(step, {"w": 2.0 * jnp.eye(2)}, None, jnp.zeros((1, 2)), xs)
        >>> ys[:, 0, 0].tolist()
        [1.0, 3.0, 7.0]

    Args:
        step: called as step(times, shared, carry, x); closes over no arrays.
        kernels: matrices [H, F] by name, each used at most once per step.
        shared: arrays that every step sees.
        carry: the state before the first step.
        xs: what each step is given, along the first axis.
        count: an integer: later steps leave the carry as it is, and what they return is not used;
            None: there are none. They are left out, except where derivatives are taken.

    Returns:
        The last carry, and what the steps returned, stacked.
    """
    times = functools.partial(multiply, kernels)

    def at(place: Any) -> Any:
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, place, keepdims=False), xs)

    def body(place: Array, state: tuple[Any, Any]) -> tuple[Any, Any]:
        carry, y = step(times, shared, state[0], at(place))
        write = functools.partial(jax.lax.dynamic_update_index_in_dim, index=place, axis=0)
        return carry, jax.tree.map(write, state[1], y)

    length = jax.tree.leaves(xs)[0].shape[0]
    one = jax.eval_shape(lambda: step(times, shared, carry, at(0))[1])
    ys = jax.tree.map(lambda y: jnp.zeros((length, *y.shape), y.dtype), one)
    return jax.lax.fori_loop(0, length if count is None else count, body, (carry, ys))


def multiply(kernels: dict[str, Array], name: str, left: Array) -> Array:
    """left @ kernels[name] in the kernel's dtype, accumulated and returned in float32 or wider."""
    kernel = kernels[name]
    wide = accumulation_dtype(kernel.dtype)
    return jnp.matmul(left.astype(kernel.dtype), kernel, preferred_element_type=wide)


class _Taps:
    """`times` that also notes its left sides, and adds a zero whose cotangent is the product's."""

    def __init__(self, kernels: dict[str, Array], taps: dict[str, Array] | None) -> None:
        self.kernels, self.taps = kernels, taps
        self.lefts: dict[str, Array] = {}
        self.products: dict[str, Array] = {}

    def __call__(self, name: str, left: Array) -> Array:
        if name in self.lefts:
            raise ValueError(f"a step may use each kernel once; {name!r} is used twice.")
        self.lefts[name] = left.astype(self.kernels[name].dtype)
        product = multiply(self.kernels, name, left)
        self.products[name] = product
        return product if self.taps is None else product + self.taps[name]


def _unroll_forward(
    step: Step,
    kernels: dict[str, Array],
    shared: Any,
    carry: Any,
    xs: Any,
    count: Array | None = None,
) -> tuple[Any, Any]:
    def one_step(carry: Any, x: Any) -> dict[str, Array]:
        taps = _Taps(kernels, None)
        step(taps, shared, carry, x)
        return taps.products

    length = jax.tree.leaves(xs)[0].shape[0]
    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), xs)
    zeros = {
        name: jnp.zeros((length, *product.shape), product.dtype)
        for name, product in jax.eval_shape(one_step, carry, first).items()
    }

    def run(shared: Any, carry: Any, xs: Any, zeros: dict[str, Array]) -> tuple[Any, Any]:
        def body(carry: Any, x: Any) -> tuple[Any, Any]:
            taps = _Taps(kernels, x[1])
            carry, y = step(taps, shared, carry, x[0])
            return carry, (y, taps.lefts)

        carry, (ys, lefts) = jax.lax.scan(body, carry, (xs, zeros))
        return (carry, ys), lefts

    out, back, lefts = jax.vjp(run, shared, carry, xs, zeros, has_aux=True)
    return out, (back, lefts, kernels)


def _unroll_backward(step: Step, residuals: Any, d_out: Any) -> tuple[Any, Any, Any, Any, None]:
    back, lefts, kernels = residuals
    d_shared, d_carry, d_xs, d_products = back(d_out)
    d_kernels = {}
    for name, kernel in kernels.items():
        left = lefts[name].reshape(-1, kernel.shape[0])  # [steps · B, H]
        d_product = d_products[name].reshape(-1, kernel.shape[1]).astype(left.dtype)
        wide = accumulation_dtype(kernel.dtype)
        d_kernel = jnp.matmul(left.T, d_product, preferred_element_type=wide)  # [H, F]
        d_kernels[name] = d_kernel.astype(kernel.dtype)
    return d_kernels, d_shared, d_carry, d_xs, None


unroll.defvjp(_unroll_forward, _unroll_backward)


@dataclass(frozen=True)
class Gru:
    """A gated recurrent unit (Cho et al. 2014), the reset gate after the product, as cuDNN has it.

        r, z = σ(x_r + h_r), σ(x_z + h_z),   n = tanh(x_n + r h_n),   h' = (1 − z) n + z h

    x is the input's projection with its bias, and h_r, h_z, h_n the state's: one product.
    """

    gates: ClassVar[int] = 3

    def initial(self, hidden: Array) -> Array:
        """The state that starts from this output."""
        return hidden

    def output(self, state: Array) -> Array:
        return state

    def advance(self, inputs: Array, recurrent: Array, state: Array) -> Array:
        """inputs and recurrent [..., 3H], state [..., H] -> the next state."""
        return _gru(inputs, recurrent, state)


@jax.custom_vjp
def _gru(inputs: Array, recurrent: Array, state: Array) -> Array:
    return _gru_forward(inputs, recurrent, state)[0]


def _gru_forward(inputs: Array, recurrent: Array, state: Array) -> tuple[Array, tuple]:
    x_r, x_z, x_n = jnp.split(inputs, 3, axis=-1)
    h_r, h_z, h_n = jnp.split(recurrent, 3, axis=-1)
    reset, update = jax.nn.sigmoid(x_r + h_r), jax.nn.sigmoid(x_z + h_z)
    candidate = jnp.tanh(x_n + reset * h_n)
    return candidate + update * (state - candidate), (reset, update, candidate, h_n, state)


def _gru_backward(residuals: tuple, d_new: Array) -> tuple[Array, Array, Array]:
    """By hand, because autodiff keeps twice as many numbers of every step."""
    reset, update, candidate, h_n, state = residuals
    d_n = d_new * (1.0 - update) * (1.0 - candidate * candidate)
    d_z = d_new * (state - candidate) * update * (1.0 - update)
    d_r = d_n * h_n * reset * (1.0 - reset)
    d_inputs = jnp.concatenate([d_r, d_z, d_n], axis=-1)
    d_recurrent = jnp.concatenate([d_r, d_z, d_n * reset], axis=-1)
    return d_inputs, d_recurrent, d_new * update


_gru.defvjp(_gru_forward, _gru_backward)


@dataclass(frozen=True)
class Lstm:
    """Long short-term memory (Hochreiter & Schmidhuber 1997; forget gate of Gers et al. 2000).

        i, f, o = σ(..), σ(.. + 1), σ(..),   g = tanh(..),   c' = f c + i g,   h' = o tanh(c')

    The 1 makes it remember before it has learned what to forget (Jozefowicz et al. 2015).
    """

    gates: ClassVar[int] = 4

    def initial(self, hidden: Array) -> tuple[Array, Array]:
        return hidden, jnp.zeros_like(hidden)

    def output(self, state: tuple[Array, Array]) -> Array:
        return state[0]

    def advance(
        self, inputs: Array, recurrent: Array, state: tuple[Array, Array]
    ) -> tuple[Array, Array]:
        """inputs and recurrent [..., 4H], state (h, c) -> the next state."""
        i, f, o, g = jnp.split(inputs + recurrent, 4, axis=-1)
        cell = jax.nn.sigmoid(f + 1.0) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(cell), cell


class Cell(Protocol):
    """What `Gru` and `Lstm` have in common; a state is theirs alone."""

    gates: ClassVar[int]

    def initial(self, hidden: Array) -> Any: ...

    def output(self, state: Any) -> Array: ...

    def advance(self, inputs: Array, recurrent: Array, state: Any) -> Any: ...


def cell_named(name: str) -> Cell:
    """ "gru" or "lstm" -> the cell."""
    return Gru() if name == "gru" else Lstm()
