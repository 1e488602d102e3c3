"""The arrays a program makes: a walk over its jaxpr and every jaxpr inside it."""

import jax
import numpy as np


def intermediates(jaxpr):
    """(primitive, shape) of every array any equation makes, in every jaxpr inside this one."""
    for equation in jaxpr.eqns:
        for out in equation.outvars:
            yield equation.primitive.name, getattr(out.aval, "shape", ())
        for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(parameter):
                yield from intermediates(getattr(parameter, "jaxpr", parameter))


def largest(function, *args):
    """(primitive, shape) of the largest array that function(*args) makes on its way."""
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return max(intermediates(jaxpr), key=lambda found: np.prod(found[1]))


def _is_jaxpr(x):
    return hasattr(getattr(x, "jaxpr", x), "eqns")
