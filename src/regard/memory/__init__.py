"""Keys and values prepared once and attended to many times.

memory.py is what a `Memory` holds and how it grows, slots.py writes into its arrays, and recall.py
is what stands for it in a call of `attend`.
"""

from regard.memory.memory import Memory
from regard.memory.recall import recall
from regard.memory.slots import is_real

__all__ = ["Memory", "is_real", "recall"]
