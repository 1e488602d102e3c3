"""Text in the form of word-aligned test sets: a space between words, no contractions.

The gold alignments of the Canadian Hansards, among others, are of French with its elisions and
contractions written out. Training text is brought to the same form before alignments are scored.
"""

import re

from regard.seq2seq.text.words import split_words

ELIDED = {
    "c'": "ce",
    "d'": "de",
    "j'": "je",
    "l'": "le",
    "m'": "me",
    "n'": "ne",
    "s'": "se",
    "t'": "te",
    "qu'": "que",
    "jusqu'": "jusque",
    "lorsqu'": "lorsque",
    "presqu'": "presque",
    "puisqu'": "puisque",
    "quoiqu'": "quoique",
}
CONTRACTED = {"du": "de le", "des": "de les", "au": "à le", "aux": "à les"}


def expanded(text: str, language: str) -> str:
    """A sentence with a space between all its words, hyphens included.

    French elisions and contractions are written out: `du` is `de le`, `l'` is always `le`. Text
    that has this form already is not changed.

    Example:
        >>> from regard.seq2seq.corpus import expanded
        >>> expanded("L'avenir des Nord-Américains, c'est aujourd'hui.", "fr")
        "Le avenir de les Nord - Américains , ce est aujourd' hui ."
        >>> expanded("It's the well-known Bill C-49.", "en")
        "It 's the well - known Bill C - 49 ."

    Args:
        text: a sentence.
        language: "fr" writes out elisions and contractions; any other only splits.
    """
    words: list[str] = []
    for word in split_words(text).words:
        for part in re.split(r"(-|(?<=^[Aa]ujourd')(?=hui$))", word):
            for piece in split_words(part).words if part not in ("", word) else [part]:
                words.append(_written_out(piece) if language == "fr" else piece)
    return " ".join(filter(None, words))


def _written_out(word: str) -> str:
    small = word.lower()
    whole = ELIDED.get(small) or CONTRACTED.get(small)
    if whole is None:
        return word
    return whole[0].upper() + whole[1:] if word[0].isupper() else whole
