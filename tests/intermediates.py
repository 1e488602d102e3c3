"""The arrays a program makes: a walk over its jaxpr and every jaxpr inside it."""

import jax
import numpy as np


def intermediates(jaxpr):
    """(primitive, shape) of every array any equation makes, in every jaxpr inside this one."""
    for equation in jaxpr.eqns:
        for out in equation.outvars:
            yield equation.primitive.name, getattr(out.aval, "shape", ())
        for inner in insides(equation):
            yield from intermediates(inner)


def insides(equation):
    """The jaxprs inside an equation; for regard's tangents, of what they run when lowered."""
    if equation.params.get("jaxpr") is None and equation.primitive.name == "regard_linear_map":
        shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in equation.invars]
        yield jax.make_jaxpr(equation.params["map"].apply)(*shapes).jaxpr
    for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
        if _is_jaxpr(parameter):
            yield getattr(parameter, "jaxpr", parameter)


def kernels(jaxpr):
    """The names of all Pallas kernels that a program calls."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation.params["name"]
        for inner in insides(equation):
            yield from kernels(inner)


def largest(function, *args):
    """(primitive, shape) of the largest array that function(*args) makes on its way."""
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return max(intermediates(jaxpr), key=lambda found: np.prod(found[1]))


def _is_jaxpr(x):
    return hasattr(getattr(x, "jaxpr", x), "eqns")
