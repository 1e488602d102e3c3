"""Weights drawn in a terminal: bars by length, cells by shade, with or without color.

Numbers in, Rich text out. A weight that is exactly 0 is drawn as a dot, so that what was masked
can be distinguished from what is merely small.
"""

from rich.text import Text

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_SHADES = " ░▒▓█"
_SHADES_OF_LESS = " .-=#"

# Viridis at five stops (red, green, blue): dark to bright, and readable by the color-blind.
_STOPS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))

# For less than 0, in a difference: dark to bright.
_STOPS_OF_LESS = ((58, 5, 20), (122, 18, 40), (178, 54, 56), (226, 118, 90), (250, 200, 170))

BAR_STYLE = "rgb(94,201,98)"


def color(weight: float) -> tuple[int, int, int]:
    """The color of a weight in [-1, 1], between the stops of the scale."""
    stops = _STOPS if weight >= 0 else _STOPS_OF_LESS
    place = min(abs(weight), 1.0) * (len(stops) - 1)
    below = min(int(place), len(stops) - 2)
    part = place - below
    red, green, blue = (
        round(low + part * (high - low))
        for low, high in zip(stops[below], stops[below + 1], strict=True)
    )
    return red, green, blue


def style(weight: float) -> str:
    """Text on the color of a weight in [-1, 1]: dark on bright and bright on dark."""
    red, green, blue = color(weight)
    bright = 0.299 * red + 0.587 * green + 0.114 * blue > 120
    return f"{'#000000' if bright else '#ffffff'} on rgb({red},{green},{blue})"


def number(weight: float) -> str:
    """A weight in three characters: .31, 1.0, -.3, or a dot for exactly 0. From 10 on in more."""
    if weight == 0:
        return "·"
    if abs(weight) >= 9.5:
        return f"{weight:.3g}"
    if weight < 0:
        return f"{weight:.0f}." if weight <= -0.95 else f"{weight:.1f}".replace("-0.", "-.")
    return f"{weight:.1f}" if weight >= 0.995 else f"{weight:.2f}"[1:]


def shade(weight: float) -> str:
    """A weight in [-1, 1] as one character, the denser the further from 0, without color."""
    shades = _SHADES if weight >= 0 else _SHADES_OF_LESS
    return shades[round(min(abs(weight), 1.0) * (len(_SHADES) - 1))]


def bar(weight: float, width: int) -> Text:
    """A weight in [0, 1] as a bar `width` characters long, to the eighth of a character."""
    eighths = round(min(max(weight, 0.0), 1.0) * width * 8)
    whole, rest = divmod(eighths, 8)
    drawn = "█" * whole + (_EIGHTHS[rest] if rest else "")
    return Text(drawn.ljust(width), style=BAR_STYLE)


def heatmap(weights, *, in_color: bool) -> Text:
    """A matrix of weights, two characters a cell, shaded against its largest weight."""
    largest = max((float(weight) for row in weights for weight in row), default=0.0) or 1.0
    drawn = Text()
    for index, row in enumerate(weights):
        drawn.append("\n" if index else "")
        for weight in row:
            part = float(weight) / largest
            if part == 0:
                drawn.append("· ", style="dim")
            elif in_color:
                drawn.append("  ", style=style(part))
            else:
                drawn.append(2 * shade(part))
    return drawn
