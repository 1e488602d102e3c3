"""The README's own pictures: `python docs/readme_pictures.py` draws them into docs/images.

On a white ground: a README is shown on light pages and on dark ones, and a picture cannot know.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
IMAGES = HERE / "images"
SENTENCE = "She does not want to see the red car."


def pipeline() -> None:
    """Score, mask, normalize, pool: the picture of the site's first page."""
    sys.path.insert(0, str(HERE / "hooks"))
    from storyboard import pipeline

    figure = pipeline()
    figure.savefig(IMAGES / "pipeline.png", dpi=130, bbox_inches="tight", facecolor="white")


def alignment() -> None:
    """Where the bundled translator looked."""
    from regard.seq2seq.translator import Translator
    from regard.show import AttentionMap

    (best,) = Translator.load().translate([SENTENCE])[0]
    seen = AttentionMap(best.weights, best.target_words, best.source_words, end="(end)")
    seen.save(IMAGES / "alignment.png")
    print(best.text)


if __name__ == "__main__":
    alignment()
    pipeline()
