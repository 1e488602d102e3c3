"""Translate your own text with the bundled model, and see which word came from which.

    python examples/your_own_alignments.py ["A sentence." FOLDER]

prints the translation and its weights, and writes alignment.html (open it: point at words) and
alignment.png into the folder; 15 seconds.
"""

import sys
from pathlib import Path

from regard.seq2seq.translator import Translator
from regard.show import AttentionMap

text = "The old man is reading an interesting book in the garden."
text = sys.argv[1] if len(sys.argv) > 1 else text
folder = Path(*sys.argv[2:3])

translator = Translator.load()  # or Translator.load("runs/fr"), a model of your own
((best,),) = translator.translate([text])
print(f"{text}\n{best.text}\n")

seen = AttentionMap(best.weights, best.target_words, best.source_words, best.text, end="(end)")
seen.print()
for name in ("alignment.html", "alignment.png"):
    print(f"\nwrote {seen.save(folder / name)}", end="")
print("\n")

# Links are the heaviest weight of each word that was written: what `regard align` prints.
for i, j in sorted(best.links(), key=lambda link: link[1]):
    print(f"{best.target_words[j]:>14}  ←  {best.source_words[i]:<14} {best.weights[j, i]:.2f}")
