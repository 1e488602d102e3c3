"""Pictures of attention. Matplotlib is imported when a figure is drawn."""

from regard.show.attention_map import AttentionMap
from regard.show.contributions import Contributions
from regard.show.difference import show_difference
from regard.show.heatmaps import show_heatmaps
from regard.show.patches import show_patches

__all__ = ["AttentionMap", "show_heatmaps", "show_patches", "show_difference", "Contributions"]
