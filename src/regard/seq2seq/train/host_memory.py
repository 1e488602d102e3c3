"""What the C library does with memory that a CPU program has freed: keep it, or give it back.

XLA allocates each step's scratch memory anew. The C library returns so large a piece to the
operating system when it is freed, and every step then waits for its pages to be made: a tenth of
the time of training on two cores. After a while it does keep some of them, for each thread by
itself, so that a server grows for as long as its threads take turns.
"""

import ctypes
import sys

# mallopt's parameters, as in <malloc.h>.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -2, -3, -4, -8


def keep_freed_memory() -> bool:
    """Tells the C library to keep what is freed; the process stays as large as it ever was.

    For a program that trains, as its first act: it has no effect on threads that have allocated
    memory before, so call it before JAX is used.

    Returns:
        Whether it could be done: on Linux with glibc.
    """
    return _told({_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 64 << 20, _ARENA_MAX: 1})


def give_back_freed_memory() -> bool:
    """Tells the C library to give large pieces back at once, and to share the small ones.

    For a program that runs for days: it stays as large as what it holds. Call it before JAX is
    used.

    Returns:
        Whether it could be done: on Linux with glibc.
    """
    return _told({_MMAP_THRESHOLD: 1 << 20, _ARENA_MAX: 1})


def _told(settings: dict[int, int]) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    done = [mallopt(name, value) == 1 for name, value in settings.items()]
    return all(done)
