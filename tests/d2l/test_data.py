"""The book's data sets: local files as they come, what stands in for them, and what is refused."""

import gzip

import matplotlib as mpl
import numpy as np
import pytest

from regard import d2l
from regard.d2l.short_sentences import short_sentences

mpl.use("Agg")


# ---------------------------------------------------------------------------------------------
# Vocab.


def test_vocab():
    lines = [["b", "a", "b"], ["c", "b", "a"]]
    vocab = d2l.Vocab(lines, min_freq=2, reserved_tokens=["<pad>"])
    assert vocab.idx_to_token == ["<pad>", "<unk>", "a", "b"]
    assert vocab.token_freqs == [("b", 3), ("a", 2), ("c", 1)]
    assert vocab["c"] == vocab.unk == 1
    assert vocab[[["a"], ["b", "z"]]] == [[2], [3, 1]]
    assert d2l.Vocab(["b", "a", "b"])["b"] == 2  # one flat list
    assert len(d2l.Vocab()) == 1


@pytest.mark.parametrize("of", [np.asarray, d2l.tensor, list])
def test_tokens_of_numbers(of):
    """The book's fails on a list of one number, which is what one token of a batch is."""
    vocab = d2l.Vocab(["a", "b"])
    assert vocab.to_tokens(of([1, 2, 0])) == ["a", "b", "<unk>"]
    assert vocab.to_tokens(of([2])) == ["b"]
    assert vocab.to_tokens(of([[1], [2]])) == [["a"], ["b"]]
    assert vocab.to_tokens(of([1])[0]) == "a"


# ---------------------------------------------------------------------------------------------
# Sentence pairs.

LINES = [
    "Go.\tVa !\tCC-BY 2.0 (France) Attribution: tatoeba.org",
    "Go.\tMarche.",
    "Wait, go.\tAttends, va\u202f!",
    "Who is it?\tC'est qui\xa0?",
    "Is it you?\tEst-ce vous ?",
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "fra-eng" / "fra.txt"
    path.parent.mkdir()
    path.write_bytes("\r\n".join(LINES).encode())
    return path


def test_pairs_of_a_file(file, capsys):
    data = d2l.MTFraEng(2, num_steps=4, num_train=3, num_val=2, path=file)
    assert capsys.readouterr().err == ""
    source, target, lens, label = (np.asarray(a) for a in data.arrays)
    said = data.src_vocab.to_tokens(source)
    assert said[0] == ["go", ".", "<eos>", "<pad>"]
    assert said[2] == ["<unk>", "<unk>", "go", "."]  # cut, and what occurs once is not known
    np.testing.assert_array_equal(lens, [3, 3, 4, 4, 4])
    answers = data.tgt_vocab.to_tokens(label)
    assert answers[0] == ["va", "!", "<eos>", "<pad>"]
    assert answers[2][2:] == ["va", "!"]  # the no-break space is a space
    assert answers[3][-2:] == ["?", "<eos>"]
    begun = data.tgt_vocab.to_tokens(target)
    assert [row[0] for row in begun] == ["<bos>"] * 5
    assert [row[1:] for row in begun] == [row[:-1] for row in answers]
    assert "<bos>" not in data.src_vocab.token_to_idx
    assert [len(b[0]) for b in data.train_dataloader()] == [2, 1]
    (rows,) = data.val_dataloader()
    np.testing.assert_array_equal(rows[0], source[3:])


def test_the_books_place_and_gzip(file, capsys):
    data = d2l.MTFraEng(2, num_train=5, num_val=0, root=file.parent.parent)
    assert data.val_dataloader() is None
    assert capsys.readouterr().err == ""
    packed = file.with_suffix(".tsv.gz")
    packed.write_bytes(gzip.compress(file.read_bytes()))
    same = d2l.MTFraEng(2, num_train=5, num_val=0, path=packed)
    for found, expected in zip(same.arrays, data.arrays, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_file_with_too_few_pairs_or_none(file, tmp_path):
    with pytest.raises(
        ValueError, match=r"num_train 512, num_val 2, 5 pairs in .*Fix: num_train=3"
    ):
        d2l.MTFraEng(2, num_val=2, path=file)
    with pytest.raises(FileNotFoundError):
        d2l.MTFraEng(2, path=tmp_path / "none.txt")


def test_without_a_file_the_grammar_takes_its_place_and_says_so(tmp_path, capsys):
    data = d2l.MTFraEng(128, root=tmp_path)
    assert "640 sentences of regard's own" in capsys.readouterr().err
    assert [a.shape for a in data.arrays] == [(640, 9), (640, 9), (640,), (640, 9)]
    known = {*data.src_vocab.token_to_idx, *data.tgt_vocab.token_to_idx}
    for example in ("go .", "i lost .", "he's calm .", "i'm home .", "va !", "j'ai perdu ."):
        assert known >= set(example.split())
    assert len(data.train_dataloader()) == 4


def test_build_uses_the_vocabularies(tmp_path):
    data = d2l.MTFraEng(128, root=tmp_path)
    batch = data.build(["He's calm.", "zebra"], ["il est calme .", "zèbre"])
    assert [a.shape for a in batch] == [(2, 9), (2, 9), (2,), (2, 9)]
    assert data.src_vocab.to_tokens(batch[0][1])[:3] == ["<unk>", "<eos>", "<pad>"]
    np.testing.assert_array_equal(batch[2], [4, 2])
    for pairs in ((["a", "b"], ["c"]), ("a b", "c d")):
        with pytest.raises(ValueError, match="two lists of sentences of one length"):
            data.build(*pairs)


def test_short_sentences_are_distinct_and_go_on_as_long_as_asked():
    pairs = short_sentences(1000)
    assert len({pair.source for pair in pairs}) == len(pairs) == 1000
    assert pairs[:640] == short_sentences(640)
    french = {pair.source: pair.target for pair in pairs}
    assert french["She left."] == "Elle est partie."
    assert french["They're reading."] == "Ils lisent."
    assert french["Go now."] == "Va maintenant !"
    assert french["I was home."] == "J'étais chez moi."


# ---------------------------------------------------------------------------------------------
# Pictures.


def write_files(folder, packed, count=6):
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for part in ("train", "t10k"):
        pictures = random.integers(0, 256, (count, 28, 28)).astype(np.uint8)
        labels = random.integers(0, 10, count).astype(np.uint8)
        for name, array in (("images-idx3", pictures), ("labels-idx1", labels)):
            raw = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes()
            raw += array.tobytes()
            end = ".gz" if packed else ""
            path = folder / f"{part}-{name}-ubyte{end}"
            path.write_bytes(gzip.compress(raw) if packed else raw)
    return pictures, labels


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("place", ["", "FashionMNIST/raw", "fashion-mnist"])
def test_pictures_of_files(tmp_path, packed, place, capsys):
    pictures, labels = write_files(tmp_path / "data" / place, packed)
    data = d2l.FashionMNIST(batch_size=4, root=tmp_path / "data")
    assert capsys.readouterr().err == ""
    np.testing.assert_array_equal(data.val[0], pictures)
    X, y = next(iter(data.val_dataloader()))
    np.testing.assert_allclose(X[..., 0], pictures[:4].astype(np.float32) / 255, rtol=1e-6)
    np.testing.assert_array_equal(y, labels[:4])
    assert y.dtype == np.int32


@pytest.mark.parametrize(
    ("end", "said"),
    [("", "is not an IDX file.*13 bytes"), (".gz", r"is damaged: .*ended.*\. Fix")],
)
def test_a_file_that_is_cut_off(tmp_path, end, said):
    write_files(tmp_path / "data", packed=bool(end))
    path = tmp_path / "data" / f"t10k-labels-idx1-ubyte{end}"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"t10k-labels-idx1-ubyte{end} {said}"):
        d2l.FashionMNIST(root=tmp_path / "data")


@pytest.mark.parametrize("size", [(28, 28), (56, 56), (96, 96), (28, 40), (31, 20)])
def test_pictures_are_resized_in_proportion(tmp_path, size):
    folder = tmp_path / "data"
    write_files(folder, packed=False)
    data = d2l.FashionMNIST(batch_size=4, resize=size, root=folder)
    X, _ = next(iter(data.val_dataloader()))
    X = np.asarray(X)
    assert X.shape == (4, *size, 1)
    side = min(size)
    inside = [slice((n - side) // 2, (n - side) // 2 + side) for n in size]
    mean = data.val[0][:4].mean((1, 2)) / 255
    np.testing.assert_allclose(X[:, inside[0], inside[1], 0].mean((1, 2)), mean, atol=0.02)
    np.testing.assert_allclose(X.sum((1, 2, 3)), X[:, inside[0], inside[1]].sum((1, 2, 3)))


def test_without_files_pictures_are_drawn_and_it_is_said(tmp_path, capsys):
    data = d2l.FashionMNIST(root=tmp_path)
    assert "4,608 pictures drawn" in capsys.readouterr().err
    (X, y), (X_val, y_val) = data.train, data.val
    assert (X.shape, X.dtype, y.dtype) == ((4096, 28, 28), np.uint8, np.int32)
    assert set(np.unique(y)) == set(np.unique(y_val)) == set(range(10))
    # The nearest mean picture tells most kinds, and not all: something is left to learn.
    means = np.stack([X[y == kind].mean(0) for kind in range(10)])
    nearest = ((X_val[:, None] - means) ** 2).sum((2, 3)).argmin(1)
    assert 0.6 < (nearest == y_val).mean() < 1
    np.testing.assert_array_equal(d2l.FashionMNIST(root=tmp_path).train[0], X)


def test_pictures_are_shown_with_their_labels(tmp_path):
    data = d2l.FashionMNIST(batch_size=8, root=tmp_path)
    data.visualize(next(iter(data.val_dataloader())), ncols=4)
    axes = d2l.plt.gcf().axes
    assert len(axes) == 4
    assert all(ax.get_title() in data.text_labels(range(10)) for ax in axes)
    d2l.plt.close("all")
