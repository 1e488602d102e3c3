"""Files from elsewhere, in whatever state: they are read, or refused in words, and nothing else.

What comes in is a corpus or a model's folder, damaged at random. Allowed are an answer and the
errors that the docstrings name; not allowed are any other exception, a file written, or a file
opened that nobody named. That nothing is unpickled is in test_package.py.
"""

import contextlib
import gzip
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regard.seq2seq.alignment import read_links
from regard.seq2seq.corpus import Cleaning, CorpusError, ParallelFiles, TabSeparated
from regard.seq2seq.model.config import Config
from regard.seq2seq.model.export import SUMS, add_checksums, load_model
from regard.seq2seq.model.model_folder import FILES
from regard.seq2seq.text.tokenizer_pair import TokenizerPair
from regard.show import AttentionMap
from seq2seq.small_translator import save_small

pytestmark = pytest.mark.usefixtures("programs_not_kept")

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
MANY = settings(max_examples=5000 if NIGHTLY else 200, deadline=None)
FEW = settings(
    max_examples=1000 if NIGHTLY else 40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)

# ---------------------------------------------------------------------------------------------
# Which files a reader opens: Python tells a hook.

_opened: list[tuple[str, bool]] | None = None


def _hook(event, arguments):
    if event == "open" and _opened is not None and isinstance(arguments[0], (str, bytes)):
        path, mode, flags = arguments
        writes = bool(flags & (os.O_WRONLY | os.O_RDWR)) or any(m in (mode or "") for m in "wax+")
        _opened.append((os.path.realpath(os.fsdecode(path)), writes))


sys.addaudithook(_hook)


@contextlib.contextmanager
def only_these_are_read(*paths):
    """Nothing else is opened, nothing is written, nothing is left in the folders."""
    global _opened
    allowed = {os.path.realpath(path) for path in paths}
    before = {path: sorted(os.listdir(Path(path).parent)) for path in paths}
    _opened = []
    try:
        yield
    finally:
        opened, _opened = _opened, None
    for path, writes in opened:
        library = path.startswith((sys.prefix, sys.base_prefix)) or path.endswith((".py", ".pyc"))
        assert not writes, f"{path} was opened for writing"
        assert path in allowed or library, f"{path} was opened"
    assert before == {path: sorted(os.listdir(Path(path).parent)) for path in paths}


def test_the_hook_sees_what_it_should(tmp_path):
    (tmp_path / "a").touch()
    (tmp_path / "b").touch()
    with only_these_are_read(tmp_path / "a"):
        (tmp_path / "a").read_bytes()
    with pytest.raises(AssertionError, match="was opened"), only_these_are_read(tmp_path / "a"):
        (tmp_path / "b").read_bytes()
    with pytest.raises(AssertionError, match="for writing"), only_these_are_read(tmp_path / "a"):
        (tmp_path / "a").write_bytes(b"")


# ---------------------------------------------------------------------------------------------
# Corpora.

LINE = st.one_of(
    st.text(max_size=12).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.sampled_from([b"a\tb", b"go.\tva !\tCC-BY", b"\t", b"", b" ", b"\0\tx", b"x\t\xe9t\xe9"]),
    st.binary(max_size=12),
)
TEXT = st.builds(
    lambda start, lines, ends, last: start + b"".join(map(bytes.__add__, lines, ends)) + last,
    st.sampled_from([b"", b"", b"\xef\xbb\xbf", b"\xff\xfe", b"\x1f\x8b"]),
    st.lists(LINE, max_size=8),
    st.lists(st.sampled_from([b"\n", b"\r\n", b"\r", b"\n\n"]), min_size=8, max_size=8),
    LINE,
)


@st.composite
def files(draw):
    """Text, gzip, or gzip that was cut off or hit by something."""
    data = draw(TEXT)
    kind = draw(st.sampled_from(["plain", "plain", "gzip", "cut", "hit"]))
    if kind == "plain":
        return data
    packed = gzip.compress(data, mtime=0)
    if kind == "cut":
        packed = packed[: draw(st.integers(0, len(packed)))]
    if kind == "hit":
        packed = damaged(packed, draw(st.integers(0, len(packed) - 1)), draw(st.integers(0, 255)))
    return packed


def damaged(data, place, byte):
    return data[:place] + bytes([byte]) + data[place + 1 :]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@MANY
@given(files(), st.booleans(), st.integers(0, 2), st.integers(0, 2))
def test_a_tab_separated_file_is_read_or_refused(folder, data, clean, source, target):
    path = folder / "pairs.tsv"
    path.write_bytes(data)
    cleaning = Cleaning() if clean else Cleaning.nothing()
    corpus = TabSeparated(path, source=source, target=target, cleaning=cleaning)
    with only_these_are_read(path):
        account(corpus)


@MANY
@given(files(), files(), st.none() | files(), st.booleans())
def test_parallel_files_are_read_or_refused(folder, source, target, links, clean):
    paths = [folder / name for name in ("a.en", "a.fr")]
    for path, data in zip(paths, (source, target), strict=True):
        path.write_bytes(data)
    gold = None
    if links is not None:
        gold = folder / "a.links"
        gold.write_bytes(links)
    cleaning = Cleaning() if clean else Cleaning.nothing()
    corpus = ParallelFiles(*paths, links=gold, cleaning=cleaning)
    with only_these_are_read(*paths, *([] if gold is None else [gold])):
        account(corpus)


def account(corpus):
    """Every line is a pair or is counted; or the file is refused."""
    try:
        pairs = list(corpus)
    except CorpusError:
        return
    except ValueError:  # only a file of links may say so
        if getattr(corpus, "links", None) is None:
            raise
        return
    report = corpus.report
    assert report.kept == len(pairs)
    assert report.read == report.kept + sum(report.dropped.values())


@MANY
@given(files() | st.from_regex(rb"([0-9]{1,3}[-p][0-9]{1,3} ?){0,4}\n?", fullmatch=True))
def test_links_are_read_or_refused(folder, data):
    path = folder / "gold.links"
    path.write_bytes(data)
    with only_these_are_read(path), contextlib.suppress(ValueError):
        read_links(path)


# ---------------------------------------------------------------------------------------------
# Models.

ANY_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["../../etc/passwd", "additive", "dot", "gru", 10**400, 1e39, [1e39]]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A model's folder that loads; its files' bytes by name."""
    made = tmp_path_factory.mktemp("sound")
    save_small(made)
    add_checksums(made, "tokenizer.json")
    return {name: (made / name).read_bytes() for name in (*FILES, SUMS)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


def put(folder, contents):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, data in contents.items():
        (folder / name).write_bytes(data)


def loads_or_is_refused(folder):
    """True where it loads."""
    with only_these_are_read(*(folder / name for name in (*FILES, SUMS))):
        try:
            load_model(folder)
            TokenizerPair.load(folder)
        except (ValueError, FileNotFoundError):
            return False
    return True


def test_the_sound_model_loads(sound, model):
    put(model, sound)
    assert loads_or_is_refused(model)


@FEW
@given(st.data())
def test_a_damaged_file_loads_or_is_refused(sound, model, data):
    name = data.draw(st.sampled_from(FILES))
    content = sound[name]
    kind = data.draw(st.sampled_from(["cut", "hit", "hit", "replaced", "missing"]))
    if kind == "cut":
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    elif kind == "hit":  # the beginning has the lengths and the names
        place = data.draw(st.integers(0, min(len(content), 600) - 1))
        content = damaged(content, place, data.draw(st.integers(0, 255)))
    elif kind == "replaced":
        content = data.draw(st.binary(max_size=60))
    contents = {**sound, name: content}
    if kind == "missing":
        del contents[name]
    checked = data.draw(st.booleans())
    if not checked:
        del contents[SUMS]
    put(model, contents)
    loaded = loads_or_is_refused(model)
    same = content == sound[name] and kind != "missing"
    whole = content.rstrip() == sound[name].rstrip()  # the last line's end was cut, no more
    harmless = kind in ("hit", "replaced") or (kind == "cut" and whole)
    accepted = same or (harmless and not checked)
    assert not loaded or accepted, f"{name} was {kind}, and nothing noticed it"


@MANY
@given(st.data())
def test_a_strange_configuration_is_refused_in_words(sound, data):
    given = json.loads(sound["config.json"])
    for name in data.draw(st.lists(st.sampled_from([*given, "new"]), min_size=1, max_size=2)):
        given[name] = data.draw(ANY_JSON)
    with contextlib.suppress(ValueError):
        Config.from_json(json.dumps(given))


@MANY
@given(st.data())
def test_a_strange_tokenizer_is_refused_in_words(sound, folder, data):
    given = json.loads(sound["tokenizer.json"])
    side = given[data.draw(st.sampled_from(["source", "target"]))]
    place = data.draw(st.sampled_from([given, side])) if isinstance(side, dict) else given
    place[data.draw(st.sampled_from([*place, "new"]))] = data.draw(ANY_JSON)
    (folder / "tokenizer.json").write_text(json.dumps(given), encoding="utf-8")
    with only_these_are_read(folder / "tokenizer.json"), contextlib.suppress(ValueError):
        TokenizerPair.load(folder)


@MANY
@given(st.data())
def test_a_strange_attention_map_is_refused_in_words(data):
    given = json.loads(AttentionMap([[0.5, 0.5]]).to_json())
    given[data.draw(st.sampled_from([*given, "new"]))] = data.draw(ANY_JSON)
    with contextlib.suppress(ValueError):
        AttentionMap.from_json(json.dumps(given))


@pytest.mark.parametrize("text", ["[" * 100_000, "{" * 50, '"\\ud800"', "NaN", "1e999", ""])
def test_json_that_is_hard_on_a_parser(text, folder):
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    for read in (Config.from_json, AttentionMap.from_json, lambda _: TokenizerPair.load(folder)):
        with pytest.raises(ValueError, match=r"\w"):
            read(text)
