"""What the compiler is told, where its own choice is the wrong one for small recurrent programs.

Options come and go with versions of XLA, so each set is tried out on next to nothing first.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax

Options = dict[str, Any]

# The first that this jaxlib knows is taken. The old emitters compile thrice as fast; XLA of JAX
# 0.12 has no longer got them.
_PLAIN: Options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
_HURRIES = ({**_PLAIN, "xla_cpu_use_fusion_emitters": False}, _PLAIN)

# A step of training has dozens of products of small matrices. To try out kernels for each takes
# 20 s for every shape of batch on an H200, 60 s with others beside it; with cuBLAS's own choice the
# compiler takes 7, and a step 5 ms.
_NO_TRIALS = ({"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False},)


def usual() -> Options | None:
    """For programs that run many times."""
    return _first_known(_NO_TRIALS) if jax.default_backend() == "gpu" else None


def hurried() -> Options | None:
    """For programs that should rather be ready soon than be fast."""
    return _first_known(_HURRIES) if jax.default_backend() == "cpu" else usual()


def _first_known(choices: Sequence[Options]) -> Options | None:
    return next((options for options in choices if _is_known(tuple(options.items()))), None)


@functools.cache
def _is_known(options: tuple[tuple[str, Any], ...]) -> bool:
    try:
        jax.jit(lambda x: x + x, compiler_options=dict(options))(0.0)
    except jax.errors.JaxRuntimeError:  # no such option in this version
        return False
    return True
