"""Options of the compiler and of the C library's allocator, where the defaults are unsuitable.

Compiler options come and go with versions of XLA, so each set is first tried on a tiny program.
"""

import ctypes
import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax

Options = dict[str, Any]

# The first set that this jaxlib accepts is used. The old emitters compile three times as fast; XLA
# of JAX 0.12 does not have them any more.
_LEVEL_0: Options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
_UNOPTIMIZED = ({**_LEVEL_0, "xla_cpu_use_fusion_emitters": False}, _LEVEL_0)

# A training step has dozens of products of small matrices. Autotuning their kernels takes 20 s for
# every shape of batch on an H200, and 60 s on a shared one; with cuBLAS's own choice, compiling
# takes 7 s, and a step 5 ms.
_NO_AUTOTUNING = ({"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False},)

# mallopt's parameters, as in <malloc.h>.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -2, -3, -4, -8


def optimized() -> Options | None:
    """Compiler options for programs that run many times."""
    return _first_known(_NO_AUTOTUNING) if jax.default_backend() == "gpu" else None


def unoptimized() -> Options | None:
    """Compiler options for programs that run few times: optimization level 0 on a CPU."""
    return _first_known(_UNOPTIMIZED) if jax.default_backend() == "cpu" else optimized()


def _first_known(choices: Sequence[Options]) -> Options | None:
    return next((options for options in choices if _is_known(tuple(options.items()))), None)


@functools.cache
def _is_known(options: tuple[tuple[str, Any], ...]) -> bool:
    try:
        jax.jit(lambda x: x + x, compiler_options=dict(options))(0.0)
    except jax.errors.JaxRuntimeError:  # no such option in this version
        return False
    return True


def keep_freed_memory() -> bool:
    """Makes the C library keep freed memory, for a program that trains.

    XLA allocates each step's scratch memory anew. By default the C library returns so large a
    piece to the operating system, and every step then waits for its pages to be mapped: a tenth of
    the training time on two cores. The process stays as large as it ever was. Call this before JAX
    is used: it has no effect on threads that have allocated memory already.

    Returns:
        Whether it was possible: on Linux with glibc.
    """
    return _mallopt({_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 64 << 20, _ARENA_MAX: 1})


def give_back_freed_memory() -> bool:
    """Makes the C library return large pieces at once and share small ones among threads.

    For a program that runs for days: by default each thread keeps freed pieces for itself, and the
    process grows as different threads allocate. Call this before JAX is used.

    Returns:
        Whether it was possible: on Linux with glibc.
    """
    return _mallopt({_MMAP_THRESHOLD: 1 << 20, _ARENA_MAX: 1})


def _mallopt(settings: dict[int, int]) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    done = [mallopt(name, value) == 1 for name, value in settings.items()]
    return all(done)
