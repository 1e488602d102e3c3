"""The browser of the playground's tests, for the pages that maps write."""

from playground.conftest import browser

__all__ = ["browser"]
