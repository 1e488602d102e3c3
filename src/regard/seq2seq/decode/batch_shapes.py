"""Groups sentences of any lengths into batches of a few shapes: each new shape is compiled anew."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

# Fewer than in training: a wider batch takes little longer to translate, a new shape takes seconds
# to compile.
WIDTHS = (16, 32, 64, 96)
WASTE = 8  # a compiled shape may have at most so many times the places that are needed


@dataclass(frozen=True)
class Group:
    """Sentences to be translated together.

    Attributes:
        members: their positions among the lengths.
        rows: of the batch, at least as many as members.
        width: of the batch, at least as long as the longest.
    """

    members: tuple[int, ...]
    rows: int
    width: int


def groups(
    lengths: Sequence[int],
    *,
    tokens: int,
    known: Collection[tuple[int, int]] = (),
    whole: bool = False,
) -> list[Group]:
    """Groups sentences by length.

    A batch has one of the widths 16, 32, 64 and 96, beyond these a power of two, and
    `tokens // width` rows, rounded down to a power of two. Sentences that do not fill a batch move
    to the next width in use; the last ones make a smaller batch, whose rows are a power of two.

    Example:
        >>> from regard.seq2seq.decode.batch_shapes import groups
        >>> for group in groups([5, 30, 6, 7, 300], tokens=32):
        ...     print(group.members, group.rows, group.width)
        (0, 2) 2 16
        (3,) 1 32
        (1,) 1 32
        (4,) 1 512

    Args:
        lengths: tokens of each sentence, <eos> included.
        tokens: rows times width of a batch, at most.
        known: compiled shapes (rows, width); one of them is used if it is not much larger.
        whole: the last batch is padded to the size of the others of its width, so that there is one
            shape for each width; `known` is then not used.
    """
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    shapes = set(known)
    found: list[Group] = []
    waiting: list[int] = []
    for place, index in enumerate(order):
        width = width_for(lengths[index])
        waiting.append(index)
        last = place + 1 == len(order)
        full = _power_below(max(tokens // width, 1))
        # The next one is wider, or there is none, or the batch is full.
        if not last and width_for(lengths[order[place + 1]]) == width and len(waiting) < full:
            continue
        while len(waiting) >= full:
            found.append(Group(tuple(waiting[:full]), full, width))
            shapes.add((full, width))
            del waiting[:full]
        if last and waiting:
            rows, width = (full, width) if whole else _shape_for(len(waiting), width, shapes)
            found.append(Group(tuple(waiting), rows, width))
    return found


def width_for(length: int) -> int:
    """The narrowest width that a sentence fits into.

    Example:
        >>> [width_for(length) for length in (1, 17, 96, 97)]
        [16, 32, 96, 128]
    """
    return next((width for width in WIDTHS if length <= width), _power_above(length))


def _shape_for(count: int, width: int, known: Collection[tuple[int, int]]) -> tuple[int, int]:
    """A known shape that is large enough and not much too large, or a new one."""
    rows = _power_above(count)
    fitting = [(r * w, r, w) for r, w in known if count <= r and width <= w]
    if fitting and min(fitting)[0] <= WASTE * rows * width:
        _, rows, width = min(fitting)
    return rows, width


def _power_above(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _power_below(number: int) -> int:
    return 1 << (number.bit_length() - 1)
