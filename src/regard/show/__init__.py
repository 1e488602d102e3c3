"""Pictures of attention. Matplotlib is needed to draw one, not to import this."""

from regard.show.heatmaps import show_heatmaps

__all__ = ["show_heatmaps"]
