"""Formulas as MathML, made while the site is built: browsers draw it, and nothing is fetched.

The Markdown extension arithmatex finds $...$ and $$...$$ and leaves the LaTeX in elements of the
class "arithmatex"; here each of them becomes a <math> element.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert

INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    content = INLINE.sub(lambda found: _math(found[1], "inline"), content)
    content = BLOCK.sub(
        lambda found: f'<div class="formula" tabindex="0">{_math(found[1], "block")}</div>', content
    )
    if 'class="arithmatex"' in content:
        raise ValueError("a formula was left as LaTeX: formulas.py does not know its form.")
    return content


def _math(latex: str, display: str) -> str:
    return convert(html.unescape(latex).strip(), display=display)
