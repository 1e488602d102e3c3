"""Keys and values prepared once and attended to many times.

memory.py is what a `Memory` holds and how it grows, slots.py writes into its arrays, and unpack.py
turns one into the arguments of an ordinary call of `attend`.
"""

from regard.memory.memory import Memory
from regard.memory.slots import is_real
from regard.memory.unpack import unpack

__all__ = ["Memory", "is_real", "unpack"]
