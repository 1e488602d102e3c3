"""Pictures of attention. Matplotlib is needed when a picture is drawn, not when this is imported."""

from regard.show.heatmaps import show_heatmaps

__all__ = ["show_heatmaps"]
