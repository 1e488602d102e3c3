"""Readers: every way a file can be bad is counted, or refused with file and line."""

import gzip
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.seq2seq.corpus import (
    Cleaning,
    Corpus,
    CorpusError,
    Grammar,
    HuggingFace,
    Pair,
    ParallelFiles,
    Report,
    TabSeparated,
    expanded,
)
from regard.seq2seq.corpus.lines import Lines


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def texts(corpus):
    return [(pair.source, pair.target) for pair in corpus]


def test_every_reader_is_a_corpus(tmp_path):
    corpora = [TabSeparated("x"), ParallelFiles("x", "y"), HuggingFace([], "en", "fr"), Grammar(1)]
    assert all(isinstance(corpus, Corpus) for corpus in corpora)


def test_tab_separated(tmp_path):
    path = write(tmp_path / "fra.txt", "Go.\tVa !\tCC-BY 2.0\nHi.\tSalut.\n")
    corpus = TabSeparated(path)
    assert texts(corpus) == [("Go.", "Va !"), ("Hi.", "Salut.")]
    assert texts(corpus) == [("Go.", "Va !"), ("Hi.", "Salut.")]  # as often as one likes
    assert (corpus.report.read, corpus.report.kept) == (2, 2)


def test_other_columns(tmp_path):
    path = write(tmp_path / "t.tsv", "7\tfra\tOui.\t8\tYes.\n9\tfra\tNon.\n")
    corpus = TabSeparated(path, source=4, target=2)
    assert texts(corpus) == [("Yes.", "Oui.")]
    assert corpus.report.dropped == {"fewer than 5 columns": 1}


def test_bad_lines_are_counted_with_their_places(tmp_path):
    lines = [
        "good\tbon",
        "no tab here",
        "",
        "\tvide",
        "empty\t  ",
        "good\tbon",
        "nul\0byte\tx",
        "long " * 50 + "\tlongue",
        "last\tdernier",
    ]
    path = write(tmp_path / "bad.tsv", "\n".join(lines))  # no newline at the end
    corpus = TabSeparated(path, cleaning=Cleaning(max_words=40))
    assert texts(corpus) == [("good", "bon"), ("last", "dernier")]
    report = corpus.report
    assert (report.read, report.kept) == (9, 2)
    assert report.examples == {
        "no tab": [f"{path}:2"],
        "empty line": [f"{path}:3"],
        "empty source": [f"{path}:4"],
        "empty target": [f"{path}:5"],
        "duplicate": [f"{path}:6"],
        "NUL byte": [f"{path}:7"],
        "more than 40 words": [f"{path}:8"],
    }
    assert all(count == 1 for count in report.dropped.values())
    assert "read 9, kept 2, dropped 7" in str(report)
    assert f"no tab: 1 ({path}:2)" in str(report)


def test_many_examples_are_three():
    report = Report()
    for line in range(1, 11):
        report.drop("no tab", f"f:{line}")
    assert report.examples["no tab"] == ["f:1", "f:2", "f:3"]
    assert "no tab: 10 (f:1, f:2, f:3, ...)" in str(report)


def test_nothing_is_cleaned_where_lines_must_stay_lines(tmp_path):
    path = write(tmp_path / "test.tsv", "a\tb\na\tb\n\t\n")
    assert len(texts(TabSeparated(path, cleaning=Cleaning.nothing()))) == 3


def test_crlf_and_bom_are_mended_and_counted(tmp_path):
    path = write(tmp_path / "dos.tsv", b"\xef\xbb\xbfHi.\tSalut.\r\nYes.\tOui.\r\n")
    corpus = TabSeparated(path)
    assert texts(corpus) == [("Hi.", "Salut."), ("Yes.", "Oui.")]
    assert corpus.report.mended == {"byte order mark": 1, "CRLF line end": 2}
    assert corpus.report.dropped == {}


@pytest.mark.parametrize("name", ["p.tsv.gz", "p.tsv"])
def test_gzip_is_known_by_its_content(tmp_path, name):
    path = write(tmp_path / name, gzip.compress(b"a\tb\nc\td\n"))
    assert texts(TabSeparated(path)) == [("a", "b"), ("c", "d")]


def test_not_utf8_is_refused_with_file_and_line(tmp_path):
    path = write(tmp_path / "latin.tsv", b"ok\tbien\nsummer\t\xe9t\xe9\n")
    corpus = TabSeparated(path)
    with pytest.raises(CorpusError, match="not UTF-8: byte 0xE9 at column 8") as caught:
        list(corpus)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert texts(TabSeparated(path, encoding="latin-1"))[1] == ("summer", "été")


def test_utf16_is_recognized(tmp_path):
    path = write(tmp_path / "wide.tsv", "a\tb\n".encode("utf-16"))
    with pytest.raises(CorpusError, match="begins like UTF-16") as caught:
        list(TabSeparated(path))
    assert f"{path}:1: " in str(caught.value)
    with pytest.raises(ValueError, match="the encoding must have ASCII in it"):
        list(TabSeparated(path, encoding="utf-16"))


def test_an_empty_file_is_refused(tmp_path):
    path = write(tmp_path / "empty.tsv", b"")
    with pytest.raises(CorpusError, match=r"empty\.tsv: the file is empty"):
        list(TabSeparated(path))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.tsv"):
        list(TabSeparated(tmp_path / "nowhere.tsv"))


def test_a_broken_gzip_is_refused_with_its_line(tmp_path):
    lines = b"".join(b"%d\tligne %d\n" % (i, i) for i in range(5000))
    path = write(tmp_path / "cut.tsv.gz", gzip.compress(lines)[:-500])
    with pytest.raises(CorpusError, match=r"cut.tsv.gz:\d+: the gzip file is broken here"):
        list(TabSeparated(path))


def test_no_pair_left_is_refused(tmp_path):
    path = write(tmp_path / "prose.txt", "no tab\nnor here\n")
    with pytest.raises(
        CorpusError, match="no pair is left of the corpus: read 2, kept 0"
    ) as caught:
        list(TabSeparated(path))
    assert f"no tab: 2 ({path}:1, {path}:2)" in str(caught.value)


def test_a_line_without_end_is_not_held_in_memory(tmp_path):
    path = write(tmp_path / "one.txt", b"short\n" + b"x" * 5000 + b"\n" + b"y" * 200 + b"\nlast")
    lines = list(Lines(path, max_bytes=100))
    assert [line.problem for line in lines] == ["", "over-long line", "over-long line", ""]
    assert lines[3].where == f"{path}:4"


def test_only_newlines_end_lines(tmp_path):
    """Form feeds, U+2028 and the like would put two files out of step."""
    text = "a\u2028b\x0bc\x85d\x0ce\rf"
    source, target = write(tmp_path / "s", text + "\ng\n"), write(tmp_path / "t", "x\ny\n")
    assert texts(ParallelFiles(source, target)) == [(text, "x"), ("g", "y")]


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n\r\0"), max_size=20)))
def test_every_line_is_read_as_it_was_written(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("lines") / "f.txt"
    write(path, "".join(line + "\n" for line in ["first", *lines]))
    assert [line.text for line in Lines(path)] == ["first", *lines]


def test_parallel_files(tmp_path):
    source = write(tmp_path / "train.en.gz", gzip.compress(b"One.\nTwo.\n"))
    target = write(tmp_path / "train.fr", "Un.\nDeux.\n")
    assert texts(ParallelFiles(source, target)) == [("One.", "Un."), ("Two.", "Deux.")]


def test_parallel_files_of_unequal_length_are_refused_with_both_counts(tmp_path):
    source, target = write(tmp_path / "s", "a\nb\nc\n"), write(tmp_path / "t", "x\n")
    for first, second, counts in ((source, target, (3, 1)), (target, source, (1, 3))):
        with pytest.raises(CorpusError, match="as many lines as each other") as caught:
            list(ParallelFiles(first, second))
        expected = f"Got {first} with {counts[0]} lines, {second} with {counts[1]}."
        assert expected in str(caught.value)


def test_parallel_problems_are_those_of_the_bad_side(tmp_path):
    source, target = write(tmp_path / "s", "a\nb\nc\n"), write(tmp_path / "t", b"x\n\0\n\n")
    corpus = ParallelFiles(source, target)
    assert texts(corpus) == [("a", "x")]
    assert corpus.report.examples == {"NUL byte": [f"{target}:2"], "empty target": [f"{source}:3"]}


def test_parallel_files_with_gold_links(tmp_path):
    source, target = (
        write(tmp_path / "s", "the cat\na dog\n"),
        write(tmp_path / "t", "le chat\nun chien\n"),
    )
    links = write(tmp_path / "g.talp", "0-0 1-1\n0p0 1-1\n")
    pairs = list(ParallelFiles(source, target, links))
    assert [len(pair.links.sure) for pair in pairs] == [2, 1]
    write(links, "0-0\n")
    with pytest.raises(CorpusError, match=r"for each pair\. Got .* with 1 lines, .* with 2"):
        list(ParallelFiles(source, target, links))
    write(links, "0-0\n1-0 1p2\n")
    with pytest.raises(CorpusError, match=r"g\.talp:2: .* Got 1-2, source with 2 words, target"):
        list(ParallelFiles(source, target, links))


def test_lopsided_pairs():
    cleaning = Cleaning(max_ratio=3)
    assert cleaning.objection(Pair("one", "un " * 20)) == "one side 3 times as long as the other"
    assert cleaning.objection(Pair("one", "un " * 9)) == ""


@pytest.mark.parametrize(
    ("text", "written_out"),
    [
        ("Le prix du pain, des œufs", "Le prix de le pain , de les œufs"),
        ("Au Canada et aux États-Unis", "À le Canada et à les États - Unis"),
        ("Qu'est-ce qu'il a, lorsqu'il vient ?", "Que est - ce que il a , lorsque il vient ?"),
        ("la main-d'œuvre d'aujourd'hui", "la main - de œuvre de aujourd' hui"),
        ("M. Roy a-t-il $250,000 ?", "M. Roy a - t - il $ 250,000 ?"),
        ("", ""),
    ],
)
def test_french_written_out(text, written_out):
    assert expanded(text, "fr") == written_out
    assert expanded(written_out, "fr") == written_out


def test_english_is_only_split():
    assert expanded("Canada's self-employed don't.", "en") == "Canada 's self - employed do n't ."


def test_hugging_face_rows():
    rows = [
        {"translation": {"en": "Yes.", "fr": "Oui."}},
        {"translation": {"en": "No.", "fr": None}},
        {"translation": {"en": "N\0l", "fr": "x"}},
    ]
    corpus = HuggingFace(rows, "en", "fr")
    assert texts(corpus) == [("Yes.", "Oui.")]
    assert corpus.report.examples == {"empty target": ["dataset[1]"], "NUL byte": ["dataset[2]"]}
    columns = HuggingFace([{"source": "a", "target": "b"}], "source", "target")
    assert texts(columns) == [("a", "b")]
    with pytest.raises(CorpusError, match=r"dataset\[0\]: a row must have 'en' and 'de'"):
        list(HuggingFace(rows, "en", "de"))


def test_a_dataset_by_name_is_loaded(monkeypatch):
    class Datasets:
        @staticmethod
        def load_dataset(name, config, *, split, streaming):
            assert (name, config, split, streaming) == ("wmt", "fr-en", "test", True)
            return iter([{"translation": {"en": "Yes.", "fr": "Oui."}}])

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    corpus = HuggingFace("wmt", "en", "fr", config="fr-en", split="test", streaming=True)
    assert texts(corpus) == [("Yes.", "Oui.")]


def test_without_datasets_the_pip_command_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets"):
        list(HuggingFace("wmt", "en", "fr"))


@pytest.mark.parametrize("packed", [False, True])
def test_progress_goes_from_start_to_end(tmp_path, packed):
    lines = b"".join(b"%d\tligne %d\n" % (i, i) for i in range(5000))
    path = write(tmp_path / "many", gzip.compress(lines) if packed else lines)
    calls = []
    list(TabSeparated(path, progress=lambda read, fraction: calls.append((read, fraction))))
    assert [read for read, _ in calls] == [1000, 2000, 3000, 4000, 5000, 5000]
    fractions = [fraction for _, fraction in calls]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
