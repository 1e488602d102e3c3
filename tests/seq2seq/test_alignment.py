"""Alignments: from subword weights to words, both shifts, symmetrization, and files."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.seq2seq.alignment import (
    Links,
    argmax_links,
    format_links,
    parse_links,
    read_links,
    symmetrize,
    word_weights,
    write_links,
)

LINK = st.tuples(st.integers(0, 30), st.integers(0, 30))
LINKS = st.sets(LINK, max_size=20)


def owners(pieces):
    """Which word each token is of, for words of so many pieces."""
    return [word for word, count in enumerate(pieces) for _ in range(count)]


PIECES = st.lists(st.integers(1, 3), min_size=1, max_size=6)


@given(PIECES, PIECES, st.integers(0, 2**31), st.sampled_from([0, 1]))
def test_word_weights_against_loops(source_pieces, target_pieces, seed, shift):
    source, target = owners(source_pieces), owners(target_pieces)
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.ones(len(source) + 1), len(target) + 1)  # an <eos> on both sides
    expected = np.zeros((len(target_pieces), len(source_pieces)))
    largest = np.zeros_like(expected)
    for t, j in enumerate(target):
        row = np.zeros(len(source_pieces))
        for s, i in enumerate(source):
            row[i] += weights[t + shift, s]
        expected[j] += row / target_pieces[j]
        largest[j] = np.maximum(largest[j], row)
    np.testing.assert_allclose(word_weights(weights, source, target, shift=shift), expected)
    got = word_weights(weights, source, target, shift=shift, over_target="max")
    np.testing.assert_allclose(got, largest)


def test_a_row_keeps_its_total():
    weights = np.full((3, 4), 0.25)
    got = word_weights(weights, [0, 0, 1, 2], [0, 1, 1])
    np.testing.assert_allclose(got.sum(axis=1), [1.0, 1.0])


def test_the_shift_reads_the_next_row():
    """A decoder that looks at word t − 1 at step t: only shift=1 gives the diagonal."""
    weights = np.eye(5)[[4, 0, 1, 2, 3]]
    words = [0, 1, 2, 3]
    assert argmax_links(word_weights(weights, words, words, shift=1)) == {(i, i) for i in range(4)}
    assert argmax_links(word_weights(weights, words, words)) == {(i - 1, i) for i in range(1, 4)}


def test_tokens_of_no_word_are_left_out():
    weights = np.array([[0.5, 0.5], [0.9, 0.1]])
    np.testing.assert_allclose(word_weights(weights, [0, 0], [-1, 0]), [[1.0]])


def test_nothing_to_align():
    assert word_weights(np.zeros((1, 1)), [], []).shape == (0, 0)
    assert argmax_links(np.zeros((0, 3))) == frozenset()
    assert argmax_links(np.zeros((3, 0))) == frozenset()
    assert argmax_links(np.zeros((2, 2))) == frozenset()


@pytest.mark.parametrize(("shape", "shift"), [((2, 3), 1), ((1, 3), 0), ((2, 2), 0), ((2,), 0)])
def test_too_few_weights_are_refused(shape, shift):
    with pytest.raises(ValueError, match="weights must have a row per target token") as caught:
        word_weights(np.zeros(shape), [0, 1, 2], [0, 1], shift=shift)
    assert f"Got weights {list(shape)}, 2 target tokens, 3 source tokens." in str(caught.value)


def test_threshold():
    weights = np.array([[0.6, 0.4], [0.45, 0.55]])
    assert argmax_links(weights, 0.58) == {(0, 0)}


@given(LINKS, LINKS)
def test_symmetrizations_lie_between_intersection_and_union(forward, backward):
    both, either = forward & backward, forward | backward
    grown = symmetrize(forward, backward, "grow-diag")
    final = symmetrize(forward, backward)
    assert symmetrize(forward, backward, "intersection") == both
    assert symmetrize(forward, backward, "union") == either
    assert both <= grown <= final <= either


def test_symmetrize_by_hand():
    """(1, 1) touches (0, 0) and links two free words; (4, 4) touches nothing: it comes last."""
    forward, backward = {(0, 0), (1, 1)}, {(0, 0), (4, 4)}
    assert symmetrize(forward, backward, "grow-diag") == {(0, 0), (1, 1)}
    assert symmetrize(forward, backward) == {(0, 0), (1, 1), (4, 4)}


@given(LINKS, LINKS)
def test_a_line_of_links_comes_back(sure, possible):
    links = Links(sure, possible)
    assert parse_links(format_links(links)) == links
    assert links.sure <= links.possible


def test_pharaoh_and_talp():
    assert format_links({(2, 0), (0, 1), (10, 3)}) == "0-1 2-0 10-3"
    links = parse_links("0-0 1p2  3-1\n")
    assert links.sure == {(0, 0), (3, 1)}
    assert links.possible == {(0, 0), (3, 1), (1, 2)}


@pytest.mark.parametrize("part", ["3", "a-b", "1-", "-1", "1-2-3", "1q2", "0.5-1"])
def test_what_is_no_link_is_refused_with_file_and_line(tmp_path, part):
    path = tmp_path / "bad.talp"
    path.write_text(f"0-0\n0-0 {part} 1-1\n")
    with pytest.raises(ValueError, match="a link is written i-j, or ipj") as caught:
        read_links(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert str(caught.value).endswith(f"Got {part!r}.")


def test_files_keep_empty_lines(tmp_path):
    path = tmp_path / "test.align"
    alignments = [Links({(0, 0)}, {(1, 0)}), Links(()), Links({(1, 1)})]
    write_links(path, alignments)
    assert path.read_bytes() == b"0-0 1p0\n\n1-1\n"
    assert read_links(path) == alignments
    path.write_bytes(b"\xef\xbb\xbf0-0\r\n\r\n1-1")
    assert [len(links.sure) for links in read_links(path)] == [1, 0, 1]
