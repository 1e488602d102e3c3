"""English endings: plurals, the -s of verbs, and a before an."""


def plural(noun: str) -> str:
    """The plural of a noun that has no irregular one.

    Example:
        >>> [plural(noun) for noun in ("cat", "box", "cherry", "boy")]
        ['cats', 'boxes', 'cherries', 'boys']
    """
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def third_person(verb: str) -> str:
    """he, she or it with a verb.

    Example:
        >>> [third_person(verb) for verb in ("eat", "watch", "cry", "go", "have", "buy")]
        ['eats', 'watches', 'cries', 'goes', 'has', 'buys']
    """
    if verb == "have":
        return "has"
    return verb + "es" if verb.endswith("o") else plural(verb)


def article(next_word: str) -> str:
    """a or an.

    Example:
        >>> article("apple"), article("university"), article("honest"), article("house")
        ('an', 'a', 'an', 'a')
    """
    next_word = next_word.lower()
    if next_word.startswith(("uni", "use", "eu")):
        return "a"
    return "an" if next_word[0] in "aeiou" or next_word.startswith(("hon", "hour")) else "a"
