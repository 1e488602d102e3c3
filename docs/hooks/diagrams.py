"""Diagrams as inline SVG, in the page's own text color, so that they suit light and dark pages."""

import html

WORDS = ("the", "red", "car", "(end)")
WEIGHTS = (0.08, 0.12, 0.72, 0.08)  # of the step that writes "voiture"
BLUE = "var(--md-accent-fg-color)"
ALTERNATIVE = (
    "One step of the Bahdanau model. The encoder has a state for each word of: the red car. The "
    "decoder's previous state is the query. Attention weighs the encoder's states by 0.08, 0.12, "
    "0.72 and 0.08, and their weighted sum is the context. Context, previous state and previous "
    "word, la, give the new state, which writes voiture."
)

DECODER = f"""
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"
  orient="auto"><path d="M0 0 L8 4 L0 8 z"/></marker></defs>
<rect x="230" y="124" width="150" height="52" rx="8" fill="{BLUE}" fill-opacity="0.25"
  stroke="currentColor" stroke-opacity="0.6"/>
<text x="305" y="155">attention</text>
<g fill="none" stroke="currentColor" stroke-width="1.5" marker-end="url(#tip)">
  <path d="M305 124 V84 Q305 72 317 72 H560 Q576 72 586 84 L614 120"/>
  <path d="M616 262 C590 200 500 150 384 150"/>
  <path d="M640 264 V180"/>
  <path d="M640 124 V64"/>
  <path d="M716 284 V176 Q716 152 686 152" stroke-dasharray="4 4"/>
</g>
<g fill="currentColor" fill-opacity="0.07" stroke="currentColor" stroke-opacity="0.6">
  <rect x="598" y="124" width="84" height="52" rx="8"/>
  <rect x="598" y="264" width="84" height="52" rx="8"/>
</g>
<text x="640" y="155">s<tspan font-size="11" dy="4">t</tspan></text>
<text x="640" y="295">s<tspan font-size="11" dy="4">t−1</tspan></text>
<text x="640" y="50">voiture</text>
<text x="716" y="304">la</text>
<g font-size="13">
  <text x="440" y="62">context c<tspan font-size="10" dy="3">t</tspan></text>
  <text x="480" y="146">query</text>
  <text x="150" y="204">keys and values</text>
</g>
<text x="298" y="388">encoder: one state for each word that is read</text>
<text x="650" y="388">decoder: one step for each word</text>
"""


def bahdanau() -> str:
    """One step of the Bahdanau model: query, weights, context, next word."""
    encoder = "".join(map(_state, range(len(WORDS))))
    return (
        '<figure class="drawn wide" data-search-exclude><svg role="img" viewBox="0 0 780 400" '
        f'width="780" height="400" aria-label="{html.escape(ALTERNATIVE, quote=True)}" '
        f'fill="currentColor" font-size="15" text-anchor="middle">{encoder}{DECODER}</svg></figure>'
    )


def _state(place: int) -> str:
    """An encoder state with its word, its neighbors, and its weight as a line to the attention."""
    x, weight = 110 + 130 * place, WEIGHTS[place]
    neighbors = ""
    if place + 1 < len(WORDS):
        neighbors = (
            '<g stroke="currentColor" stroke-width="1.5" marker-end="url(#tip)">'
            f'<path d="M{x + 37} 283 H{x + 91}"/><path d="M{x + 93} 297 H{x + 39}"/></g>'
        )
    return f"""
<path d="M{x} 268 L305 178" stroke="{BLUE}" stroke-width="{1 + 9 * weight:.1f}"
  stroke-opacity="{0.25 + 0.75 * weight:.2f}" stroke-linecap="round"/>
<text x="{x + 0.36 * (305 - x) + 24:.0f}" y="244" font-size="13">{weight:.2f}</text>
<rect x="{x - 37}" y="270" width="74" height="40" rx="8" fill-opacity="0.07"
  stroke="currentColor" stroke-opacity="0.6"/>
<text x="{x}" y="295">h<tspan font-size="11" dy="4">{place + 1}</tspan></text>
<path d="M{x} 336 V312" stroke="currentColor" stroke-width="1.5" marker-end="url(#tip)"/>
<text x="{x}" y="354">{WORDS[place]}</text>{neighbors}"""


BLOCKS = (
    "A Transformer. The encoder, on the left, is a stack of blocks: self-attention, then "
    "feed-forward, each with a second road around it. The decoder, on the right, has causal "
    "self-attention, then attention to the encoder's output, then feed-forward, and above its "
    "stack a linear layer that gives the next word. Positions are added to the words below."
)


def transformer() -> str:
    """Encoder and decoder as stacks of blocks, with the road around each step."""
    left, right = 190, 530
    parts = [
        '<defs><marker id="tip2" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z"/></marker></defs>',
        _stack(left, 190, 350, left - 146, ("feed-forward", "self-attention")),
        _stack(
            right,
            96,
            350,
            right + 176,
            ("feed-forward", "attention to the encoder", "causal self-attention"),
        ),
        _arrow(f"M{left} 420 V344"),
        _arrow(f"M{right} 420 V344"),
        # The encoder's output, to the decoder's second step.
        _arrow(
            f"M{left} 181 V138 Q{left} 126 {left + 12} 126 H344 Q356 126 356 138 V204 "
            f"Q356 216 368 216 H{right - 102}"
        ),
        _arrow(f"M{right} 87 V50"),
        f'<text x="{right}" y="40">the next word</text>',
        '<text x="274" y="118" font-size="13">keys and values</text>',
    ]
    for x, words, name in (
        (left, "words that are read + positions", "encoder: every word sees every word"),
        (right, "words written so far + positions", "decoder: a word sees those before it"),
    ):
        parts.append(f'<text x="{x}" y="438">{words}</text>')
        parts.append(f'<text x="{x}" y="472" font-size="13">{name}</text>')
    return (
        '<figure class="drawn wide" data-search-exclude><svg role="img" viewBox="0 0 740 486" '
        f'width="740" height="486" aria-label="{html.escape(BLOCKS, quote=True)}" '
        f'fill="currentColor" font-size="15" text-anchor="middle">{"".join(parts)}</svg></figure>'
    )


def _stack(x: int, top: int, bottom: int, sign: int, steps: tuple[str, ...]) -> str:
    """One block, from `top` to `bottom`: its steps from above; at `sign` that it is repeated."""
    drawn = [
        f'<rect x="{x - 132}" y="{top - 22}" width="264" height="{bottom - top + 56}" rx="12" '
        'fill-opacity="0.04" stroke="currentColor" stroke-opacity="0.5" stroke-dasharray="5 4"/>',
        f'<text x="{sign}" y="{(top + bottom) / 2 + 8:.0f}" text-anchor="end">N ×</text>',
    ]
    height = (bottom - top + 28) / len(steps)
    for place, words in enumerate(steps):
        y = round(top + height * place)
        fill = (
            f'fill="{BLUE}" fill-opacity="0.25"' if "attention" in words else 'fill-opacity="0.07"'
        )
        plus = y - 1
        drawn.append(
            f'<rect x="{x - 98}" y="{y + 18}" width="196" height="40" rx="8" {fill} '
            f'stroke="currentColor" stroke-opacity="0.6"/><text x="{x}" y="{y + 43}">{words}</text>'
            f'<path d="M{x} {y + 18} V{plus + 8}" stroke="currentColor" stroke-width="1.5"/>'
        )
        if place + 1 < len(steps):
            drawn.append(_arrow(f"M{x} {y + height - 9:.0f} V{y + 60}"))
        # The second road: from below the step, around it, to the sum above it.
        low = y + 72
        drawn.append(
            f'<path d="M{x} {low} H{x + 108} Q{x + 116} {low} {x + 116} {low - 8} V{plus + 8} '
            f'Q{x + 116} {plus} {x + 108} {plus} H{x + 10}" fill="none" stroke="currentColor" '
            'stroke-width="1.5" stroke-opacity="0.7" marker-end="url(#tip2)"/>'
            f'<circle cx="{x}" cy="{plus}" r="8" fill="var(--md-default-bg-color)" '
            f'stroke="currentColor"/><path d="M{x - 4} {plus} H{x + 4} M{x} {plus - 4} '
            f'V{plus + 4}" stroke="currentColor" stroke-width="1.3"/>'
        )
    return "".join(drawn)


def _arrow(path: str) -> str:
    return (
        f'<path d="{path}" fill="none" stroke="currentColor" stroke-width="1.5" '
        'marker-end="url(#tip2)"/>'
    )
