"""What a word is: text to words and back, the same for every language and every part of seq2seq.

Gold alignments, attention maps and unknown-word replacement all count words, so there is one
splitter. It is lossless: it also records where there was no space. How words become token ids is
`tokenizer.py`.
"""

import re
import unicodedata
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Words:
    """A text as words, and where no space stood between them.

    Example:
        >>> from regard.seq2seq.text.words import split_words
        >>> split = split_words("L'enfant dort, n'est-ce pas ?")
        >>> split.words
        ("L'", 'enfant', 'dort', ',', "n'", 'est', '-ce', 'pas', '?')
        >>> split.text
        "L'enfant dort, n'est-ce pas ?"

    Attributes:
        words: the words, as they stand in the text.
        glued: one bool per word: no space before it. The first is always glued.
    """

    words: tuple[str, ...]
    glued: tuple[bool, ...]

    @property
    def text(self) -> str:
        """The words as one line of text."""
        pairs = zip(self.words, self.glued, strict=True)
        return "".join(word if glued else " " + word for word, glued in pairs if word).strip()

    def with_words(self, replacements: dict[int, str]) -> "Words":
        """The same, with the words at some positions replaced.

        Example:
            >>> split_words("Bonjour, quelqu'un !").with_words({2: "Grosvenor"}).text
            'Bonjour, Grosvenor !'
        """
        words = (replacements.get(i, word) for i, word in enumerate(self.words))
        return replace(self, words=tuple(words))

    def __len__(self) -> int:
        return len(self.words)


def normalize(text: str, *, lowercase: bool = False, strip_accents: bool = False) -> str:
    r"""Text as the tokenizer sees it; `decode(encode(text))` gives this back.

    - Unicode NFC: `é` is one character.
    - Every run of white space, no-break spaces among it, is one space; none at the ends.
    - Typographic apostrophes are `'`.
    - Invisible characters are removed: control characters (NUL too), byte order marks, soft
      hyphens, zero-width spaces, direction marks. Joiners inside words and emoji stay.
    - Half a surrogate pair, which no file can hold, is U+FFFD.

    Example:
        >>> normalize("Qu\u2019est-ce\u00a0que\tc'est\u202f?\r\n")
        "Qu'est-ce que c'est ?"
        >>> normalize("L'ÉTÉ", lowercase=True, strip_accents=True)
        "l'ete"

    Args:
        text: any string.
        lowercase: `É` is `é`.
        strip_accents: `é` is `e`.
    """
    if not text.isascii() or not text.isprintable():
        text = _unicode_form("NFC", text.translate(_TRANSLATION))
    if lowercase:
        text = text.lower()
    if strip_accents:
        letters = _unicode_form("NFD", text)
        kept = "".join(c for c in letters if unicodedata.category(c) != "Mn")
        text = _unicode_form("NFC", kept)
    return " ".join(text.split())


def _unicode_form(form: Literal["NFC", "NFD"], text: str) -> str:
    """`unicodedata.normalize` in linear time: that function sorts each run of marks quadratically.

    No language has 30 marks on one character (Unicode's UAX #15, section 13): such a run is cut.
    """
    if len(text) <= 1000:
        return unicodedata.normalize(form, text)
    return "".join(unicodedata.normalize(form, part) for part in _MARK_RUN.split(text))


def split_words(text: str) -> Words:
    """Splits text into words.

    Punctuation stands alone, a run of one mark together. Elided words (`l'`, `qu'`), the pronouns
    behind a French verb (`-t-il`, `-ce`), and the endings of English contractions (`n't`, `'s`)
    are words. Other apostrophes and hyphens (`aujourd'hui`, `o'clock`, `twenty-one`), numbers
    (`1,000.5`), titles (`Mr.`, `M.`), and emoji with their modifiers are left whole.

    Example:
        >>> split_words("He doesn't eat at two o'clock.").words
        ('He', 'does', "n't", 'eat', 'at', 'two', "o'clock", '.')
        >>> split_words("Mange-t-il aujourd'hui ?").words
        ('Mange', '-t-il', "aujourd'hui", '?')

    Args:
        text: any string; it is normalized first.
    """
    words: list[str] = []
    glued: list[bool] = []
    for chunk in normalize(text).split():
        found = (piece[0] for piece in _PIECE.finditer(chunk))
        parts = [part for piece in found for part in _without_clitics(piece)]
        words += parts
        glued += [i > 0 for i in range(len(parts))]
    if glued:
        glued[0] = True
    return Words(tuple(words), tuple(glued))


def _without_clitics(word: str) -> list[str]:
    """`donne-le-moi` as `donne`, `-le`, `-moi`; the time is linear in the word's length."""
    first = min((at for at in map(word.find, "'-") if at >= 0), default=len(word))
    end, tail = len(word), []
    while end > max(first, 2) and word[: min(end, _WHOLE_LENGTH + 1)].lower() not in _WHOLE:
        # The longest one: the search goes from left to right.
        found = _CLITIC.search(word, max(end - _CLITIC_LENGTH, 1), end)
        if found is None:
            break
        end = found.start()
        tail.append(found[0])
    return [word[:end], *reversed(tail)]


def _ranges(characters: list[int]) -> str:
    """The inside of a regular expression's [] for sorted code points."""
    text, start = "", 0
    for i, code in enumerate(characters):
        if i + 1 == len(characters) or characters[i + 1] != code + 1:
            text += f"{re.escape(chr(characters[start]))}-{re.escape(chr(code))}"
            start = i + 1
    return text


# Python's \w leaves out the vowel signs of Hindi, the points of Hebrew and other marks. The signs
# that make an emoji of a character belong to emoji.
_EMOJI_SIGNS = "\u20e3\ufe00-\ufe0f\U0001f3fb-\U0001f3ff"
_MARKS = _ranges(
    [
        code
        for code in range(0x300, 0x1F000)
        if unicodedata.category(chr(code))[0] == "M"
        and not re.match(f"[{_EMOJI_SIGNS}]", chr(code))
    ]
)
_MARK_RUN = re.compile(rf"([{_MARKS}]{{30}})")
_LETTER = rf"[\w{_MARKS}]"
_SIGN = rf"[^\w\s{_MARKS}]"
_ELIDED = r"(?:[ldjnmtsc]|qu|jusqu|lorsqu|puisqu|quoiqu|presqu)'"
_PIECE = re.compile(
    "|".join(
        (
            r"(?-i:Mr|Mrs|Ms|Dr|M)\.$|aujourd'$",  # the latter, where a corpus has "aujourd' hui"
            rf"{_ELIDED}(?={_LETTER})",
            r"\d+(?:[.,:]\d+)+",
            rf"{_LETTER}+(?:[-'\u200c\u200d]{_LETTER}+)*",
            "[\U0001f1e6-\U0001f1ff]{2}",  # a flag
            rf"{_SIGN}[{_EMOJI_SIGNS}]*(?:\u200d{_SIGN}[{_EMOJI_SIGNS}]*)+",  # a family, say
            rf"{_SIGN}[{_EMOJI_SIGNS}]+",
            rf"(?P<sign>{_SIGN})(?P=sign)*",
        )
    ),
    re.IGNORECASE,
)

# Clitics: endings that are words of their own.
_PRONOUNS = "je|tu|ils?|elles?|on|nous|vous|ce|moi|toi|lui|leur|les?|la"
_CLITIC = re.compile(rf"(?:(?:-t)?-(?:{_PRONOUNS})|n't|'(?:s|re|ve|ll|d|m))\Z", re.IGNORECASE)
_CLITIC_LENGTH = len("-t-elles")
_WHOLE = {"rendez-vous"}
_WHOLE_LENGTH = max(map(len, _WHOLE))

# Line separators and no-break spaces are white space to str.split already.
_TRANSLATION = {ord(apostrophe): "'" for apostrophe in "\u2019\u02bc\u2032"}
_TRANSLATION |= {code: "" for code in (*range(0x20), *range(0x7F, 0xA0)) if not chr(code).isspace()}
_UNSEEN = (0xAD, 0x61C, 0x200B, 0x200E, 0x200F, 0xFEFF)
_UNSEEN += (*range(0x202A, 0x202F), *range(0x2060, 0x2070))
_TRANSLATION |= dict.fromkeys(_UNSEEN, "")
_TRANSLATION |= dict.fromkeys(range(0xD800, 0xE000), "\ufffd")
