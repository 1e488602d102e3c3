"""The short names the book's JAX pages call arrays by, its checks, and its random keys.

Everything here is JAX's or NumPy's own function under the book's name, or a few lines.
"""

import collections
import itertools
import math
from collections.abc import Callable, Sequence, Sized
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array

# fmt: off
__all__ = [
    "tensor", "ones", "ones_like", "zeros", "zeros_like", "arange", "linspace", "eye", "meshgrid",
    "rand", "randn", "normal", "abs", "exp", "log", "sin", "cos", "sinh", "cosh", "tanh",
    "sigmoid", "matmul", "batch_matmul", "reshape", "transpose", "swapaxes", "expand_dims",
    "concat", "stack", "repeat", "reduce_sum", "reduce_mean", "argmax", "astype", "size", "numpy",
    "to", "int32", "int64", "float32", "get_key", "check_shape", "check_len", "add_to_class",
    "nn_Module", "bleu", "cpu", "gpu", "num_gpus", "try_gpu",
]
# fmt: on

# jax.numpy's, some under another name.
ones, ones_like = jnp.ones, jnp.ones_like
zeros, zeros_like = jnp.zeros, jnp.zeros_like
tensor, arange, linspace, eye, meshgrid = jnp.array, jnp.arange, jnp.linspace, jnp.eye, jnp.meshgrid
sin, cos, tanh, sinh, cosh = jnp.sin, jnp.cos, jnp.tanh, jnp.sinh, jnp.cosh
exp, log, abs, sigmoid = jnp.exp, jnp.log, jnp.abs, jax.nn.sigmoid
matmul, batch_matmul = jnp.matmul, jnp.matmul
concat, stack, expand_dims = jnp.concatenate, jnp.stack, jnp.expand_dims
int32, int64, float32 = jnp.int32, jnp.int64, jnp.float32

to = jax.device_put
numpy = np.asarray
nn_Module = nn.Module


def _method(name: str) -> Callable[..., Any]:
    """The array's own method as a function: _method("sum")(a, axis=0) is a.sum(axis=0)."""

    def call(a: Array, *args: Any, **kwargs: Any) -> Any:
        return getattr(a, name)(*args, **kwargs)

    call.__name__, call.__doc__ = name, f"a.{name}(...)."
    return call


reshape, swapaxes, repeat = _method("reshape"), _method("swapaxes"), _method("repeat")
reduce_sum, reduce_mean = _method("sum"), _method("mean")
argmax, astype = _method("argmax"), _method("astype")


def transpose(a: Array) -> Array:
    """a.T: all axes reversed."""
    return a.T


def size(a: Array) -> int:
    """How many numbers the array holds."""
    return a.size


_draws = itertools.count()


def get_key() -> Array:
    """A new random key on every call, the same sequence of keys in every run.

    The book seeds each key with a float bound that Python refuses since 3.12; here the keys are
    one stream. Under `jax.jit` a call is made once, while tracing: pass keys in as arguments.

    Example:
        >>> from regard import d2l
        >>> first, second = d2l.get_key(), d2l.get_key()
        >>> bool((first == second).all())
        False
    """
    return jax.random.fold_in(jax.random.PRNGKey(0), next(_draws))


def cpu() -> jax.Device:
    """The CPU device."""
    return jax.devices("cpu")[0]


def gpu(i: int = 0) -> jax.Device:
    """A GPU device; a RuntimeError of JAX's where there is none."""
    return jax.devices("gpu")[i]


def num_gpus() -> int:
    """How many GPUs JAX sees; 0 where there is none."""
    try:
        return jax.device_count("gpu")
    except RuntimeError:
        return 0


def try_gpu(i: int = 0) -> jax.Device:
    """The GPU of this number, where there is one, else the CPU."""
    return gpu(i) if i < num_gpus() else cpu()


def rand(*shape: int | Sequence[int]) -> Array:
    """Uniform numbers in [0, 1), float32: rand(2, 3) or rand((2, 3))."""
    return jax.random.uniform(get_key(), _shape(shape), jnp.float32)


def randn(*shape: int | Sequence[int]) -> Array:
    """Standard normal numbers, float32: randn(2, 3) or randn((2, 3))."""
    return jax.random.normal(get_key(), _shape(shape), jnp.float32)


def normal(mean: float, std: float, size: int | Sequence[int]) -> Array:
    """Normal numbers of the given mean and standard deviation, float32."""
    return mean + std * randn(size)


def _shape(shape: Sequence[int | Sequence[int]]) -> tuple[int, ...]:
    sizes = shape[0] if len(shape) == 1 else shape
    return (sizes,) if isinstance(sizes, int) else tuple(sizes)  # type: ignore[arg-type]


def check_len(a: Sized, n: int) -> None:
    """Raises AssertionError unless a has n elements."""
    if len(a) != n:
        raise AssertionError(f"expected {n} elements, got {len(a)}")


def check_shape(a: Array, shape: Sequence[int]) -> None:
    """Raises AssertionError unless a has this shape.

    Example:
        >>> from regard import d2l
        >>> d2l.check_shape(d2l.ones((2, 3)), (2, 4))
        Traceback (most recent call last):
        AssertionError: expected shape [2, 4], got [2, 3]
    """
    if tuple(a.shape) != tuple(shape):
        raise AssertionError(f"expected shape {list(shape)}, got {list(a.shape)}")


def add_to_class(Class: type) -> Callable[[Callable], Callable]:
    """Decorator: the function becomes a method of a class that exists already."""

    def add(function: Callable) -> Callable:
        setattr(Class, function.__name__, function)
        return function

    return add


def bleu(pred_seq: str, label_seq: str, k: int) -> float:
    """BLEU of one sentence, up to k-grams: exp(min(0, 1 − n_label/n_pred)) ∏ p_n^(1/2ⁿ).

    An empty prediction scores 0.

    Example:
        >>> from regard import d2l
        >>> d2l.bleu("va !", "va !", k=2)
        1.0

    Args:
        pred_seq, label_seq: words with spaces between them.
        k: the longest run of words that counts.
    """
    pred, label = pred_seq.split(), label_seq.split()
    if not pred:
        return 0.0
    score = math.exp(min(0.0, 1 - len(label) / len(pred)))
    for n in range(1, min(k, len(pred)) + 1):
        found, wanted = _ngrams(pred, n), _ngrams(label, n)
        score *= ((found & wanted).total() / found.total()) ** (0.5**n)
    return score


def _ngrams(words: list[str], n: int) -> collections.Counter:
    return collections.Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
