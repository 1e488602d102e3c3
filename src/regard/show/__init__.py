"""Pictures of attention. Matplotlib is needed to draw one, not to import this."""

from regard.show.attention_map import AttentionMap
from regard.show.heatmaps import show_heatmaps

__all__ = ["AttentionMap", "show_heatmaps"]
