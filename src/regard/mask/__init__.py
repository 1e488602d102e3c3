"""Step 2, mask: which keys each query may attend to.

mask.py is what callers write, canonical.py checks it, and allowed.py is what backends receive.
"""

from regard.mask.allowed import Allowed, Band, LengthsAndBand, MaskFacts
from regard.mask.canonical import resolve
from regard.mask.mask import Mask, as_lens

__all__ = ["Allowed", "Band", "LengthsAndBand", "Mask", "MaskFacts", "as_lens", "resolve"]
