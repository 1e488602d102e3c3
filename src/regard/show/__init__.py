"""Pictures of attention. Matplotlib is imported when a figure is drawn."""

from regard.show.attention_map import AttentionMap
from regard.show.heatmaps import show_heatmaps

__all__ = ["AttentionMap", "show_heatmaps"]
