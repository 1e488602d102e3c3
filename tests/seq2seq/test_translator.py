"""Text in, text out: batching changes nothing, long texts lose nothing, and looks are in place."""

import json

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from regard.seq2seq.alignment import Links, argmax_links, word_weights
from regard.seq2seq.corpus import Grammar
from regard.seq2seq.decode import programs
from regard.seq2seq.decode.batch_shapes import WIDTHS, groups
from regard.seq2seq.decode.beam import search_with_beam
from regard.seq2seq.decode.compiled import compiled
from regard.seq2seq.decode.explaining import explain_words
from regard.seq2seq.decode.hypotheses import SearchOptions
from regard.seq2seq.decode.joining import Part, Written, joined
from regard.seq2seq.decode.search import beam_search, force
from regard.seq2seq.metrics import alignment_error
from regard.seq2seq.model import model_folder as model_folder_module
from regard.seq2seq.model.model_folder import model_folder
from regard.seq2seq.text.sentences import token_ranges
from regard.seq2seq.text.tokenizer import Encoded
from regard.seq2seq.text.vocabulary import EOS, UNK
from regard.seq2seq.text.words import split_words
from regard.seq2seq.train.batches import Batch
from regard.seq2seq.translator import Translator
from seq2seq import reversing
from seq2seq.reversing_translator import WORDS, reversing_translator
from seq2seq.small_translator import save_small, small_translator

pytestmark = pytest.mark.usefixtures("quick_compilation")

SEARCH = SearchOptions(beam=3, dtype="float32")
TEXTS = [
    "one two three.",
    "six",
    "",
    "two two, one five four three six six one two three four, one.",
    "four, five.",
    "three six one",
]


@pytest.fixture(scope="module")
def translator() -> Translator:
    return small_translator()


def assert_same(found, expected):
    assert found.text == expected.text
    assert (found.source_words, found.target_words) == (
        expected.source_words,
        expected.target_words,
    )
    np.testing.assert_allclose(found.weights, expected.weights, atol=1e-4)
    np.testing.assert_allclose(
        [found.score, found.log_prob], [expected.score, expected.log_prob], rtol=1e-4
    )


def test_what_was_learned_comes_out_in_text_and_links():
    translator = reversing_translator()
    pairs = reversing.pairs(32, seed=10**6)
    sources = [[WORDS[token - 4] for token in source] for source, _ in pairs]
    found = translator.translate(" ".join(words) for words in sources)
    right = [
        best.text == " ".join(words[::-1]) for words, (best, *_) in zip(sources, found, strict=True)
    ]
    assert np.mean(right) > 0.9
    # Word i is written at place n - 1 - i, and looked at then; one step later, the next one is.
    gold = [Links((i, len(words) - 1 - i) for i in range(len(words))) for words in sources]
    given = [(words, words[::-1]) for words in sources]
    errors = {
        look: alignment_error([one.links() for one in translator.align(given, look=look)], gold).aer
        for look in ("writing", "reading", "explaining")
    }
    assert errors["writing"] < 15
    assert errors["explaining"] < 5  # it has seen the word
    assert errors["reading"] > 50


def test_texts_together_are_translated_as_each_alone(translator):
    told = []
    together = translator.translate(
        TEXTS, search=SEARCH, batch_tokens=64, progress=lambda *so_far: told.append(so_far)
    )
    assert len({best.text for best, *_ in together}) > 3, "the model writes always the same"
    for text, (best, *_) in zip(TEXTS, together, strict=True):
        (alone, *_), *_ = translator.translate([text], search=SEARCH)
        assert_same(best, alone)
    program = compiled(search_with_beam, True, options=SEARCH, n_best=1)
    count = program._cache_size()
    assert count
    again = translator.translate(TEXTS[::-1], search=SEARCH, batch_tokens=64)
    assert [best.text for best, *_ in again[::-1]] == [best.text for best, *_ in together]
    assert program._cache_size() == count, "it was compiled again"
    # The empty text is not translated; two without a full stop are read with one, too.
    assert told[-1] == (7, 7)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_a_translation_is_what_search_found(translator):
    ids = translator.tokenizers.source.encode(TEXTS[0]).ids
    batch = Batch.of([(ids, ())], width=8)
    found = beam_search(translator.model, batch.source, batch.source_lens, SEARCH, n_best=2)
    (told,) = translator.translate([TEXTS[0]], search=SEARCH, n_best=2, replace_unknown=False)
    assert len(told) == 2
    for k, one in enumerate(told):
        written = np.asarray(found.tokens[0, k, : found.lens[0, k] - 1])
        assert one.text == translator.tokenizers.target.decode(written).text
        np.testing.assert_allclose(one.score, found.scores[0, k], rtol=1e-5)
        # One token, one word; the last column is <eos>.
        expected = np.asarray(found.attention[0, k, : len(written), : len(ids)])
        np.testing.assert_allclose(one.weights, expected, atol=1e-6)


def test_n_best_are_ranked_and_different(translator):
    (best, *rest), (empty, *none) = translator.translate(
        ["one two three.", " \t"], search=SEARCH, n_best=3
    )
    assert len(rest) == 2
    assert not none
    assert empty.text == ""
    assert best.score >= rest[0].score >= rest[1].score
    assert len({best.text, *(one.text for one in rest)}) == 3
    with pytest.raises(ValueError, match=r"from 1 to beam. Got 4, beam 3"):
        translator.translate(["one"], search=SEARCH, n_best=4)
    with pytest.raises(TypeError, match=r"Fix: \[text\]"):
        translator.translate("one two")
    with pytest.raises(TypeError, match=r"must be strings\. Got 3 of type int"):
        translator.translate(["one", 3])


def test_greedy_is_a_beam_of_one(translator):
    (best,), *_ = translator.translate(["one two three."], search=SearchOptions(beam=1))
    assert best.target_words
    assert best.weights.shape == (len(best.target_words), 4)


@pytest.mark.parametrize(
    "text", ["\0", "a\0b", "🦊 👩‍👩‍👧", "שלום עולם", "\ufeff", "x" * 3000, "\udcff"]
)
def test_no_text_is_too_strange(translator, text):
    (best,), *_ = translator.translate([text], search=SEARCH)
    assert best.weights.shape == (len(best.target_words), len(best.source_words))
    assert best.source_words == split_words(text).words


def test_a_long_text_is_its_sentences():
    translator = small_translator(longest=7)
    sentences = ["one two three four.", "six five four, six.", "two one."]
    whole, *parts = translator.translate([" ".join(sentences), *sentences], search=SEARCH)
    parts = [best for best, *_ in parts]
    assert whole[0].text == " ".join(best.text for best in parts if best.text)
    assert whole[0].source_words == sum((best.source_words for best in parts), ())
    assert whole[0].target_words == sum((best.target_words for best in parts), ())
    expected = np.zeros((len(whole[0].target_words), len(whole[0].source_words)))
    row = column = 0
    for best in parts:
        T, S = best.weights.shape
        expected[row : row + T, column : column + S] = best.weights
        row, column = row + T, column + S
    np.testing.assert_allclose(whole[0].weights, expected, atol=1e-4)
    log_prob = sum(best.log_prob for best in parts)
    np.testing.assert_allclose(whole[0].log_prob, log_prob, rtol=1e-5)


def test_five_thousand_words_lose_none(translator):
    draw = np.random.default_rng(0)
    words = draw.choice(["one", "two", "three", "four", "five", "six"], size=5000)
    (best,), *_ = translator.translate([" ".join(words)], search=SearchOptions(beam=1))
    assert best.source_words == tuple(words)
    # Every part was written about: 53 parts of up to 95 words, each looked at somewhere.
    looked = best.weights.sum(0).reshape(-1, 50).sum(1)
    assert (looked > 0).all()


@hypothesis.given(
    st.text(alphabet='ab. ,!")(é。', max_size=60), st.integers(1, 9), st.integers(1, 3)
)
def test_ranges_are_the_whole_text_and_fit(text, limit, pieces):
    split = split_words(text)
    word_of_token = [word for word in range(len(split)) for _ in range(pieces)]
    ranges = token_ranges(split, word_of_token, limit)
    covered = [token for start, stop in ranges for token in range(start, stop)]
    assert covered == list(range(len(word_of_token)))
    assert all(0 < stop - start <= limit for start, stop in ranges)


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("A b c.", 4, ["A b c ."]),
        ("A b. C d e.", 6, ["A b .", "C d e ."]),
        ("He (b!) C d.", 6, ["He ( b ! )", "C d ."]),
        ("Mr. B has 3.5 c. D e.", 6, ["Mr. B has 3.5 c .", "D e ."]),
        ("a b, c d e f", 5, ["a b ,", "c d e f"]),
        ("a b c d e f", 5, ["a b c", "d e f"]),
        ("好。吗？", 2, ["好 。", "吗 ？"]),
    ],
)
def test_a_text_is_cut_where_a_reader_would(text, limit, expected):
    split = split_words(text)
    ranges = token_ranges(split, range(len(split)), limit)
    assert [" ".join(split.words[start:stop]) for start, stop in ranges] == expected


@hypothesis.given(
    st.lists(st.integers(1, 200), max_size=80), st.sampled_from([1, 64, 1024]), st.booleans()
)
def test_groups_hold_everyone_once_in_few_shapes(lengths, tokens, some_known):
    known = {(64, 96), (1, 16)} if some_known else set()
    found = groups(lengths, tokens=tokens, known=known)
    members = sorted(index for group in found for index in group.members)
    assert members == list(range(len(lengths)))
    for group in found:
        assert len(group.members) <= group.rows
        assert max(lengths[index] for index in group.members) <= group.width
        assert group.rows & (group.rows - 1) == 0
        assert group.width in WIDTHS or group.width & (group.width - 1) == 0
    # A full batch of each width, and one for what is left.
    assert len({(group.rows, group.width) for group in found}) <= len({*WIDTHS, 128, 256}) + 1


def test_a_compiled_shape_is_used_again_unless_it_is_much_too_large():
    (group,) = groups([5, 5, 5], tokens=1024, known={(8, 16), (64, 96)})
    assert (group.rows, group.width) == (8, 16)
    (group,) = groups([5], tokens=1024, known={(64, 96)})
    assert (group.rows, group.width) == (1, 16)


def test_unknown_words_become_what_was_looked_at(translator):
    source = Encoded((4, UNK, 5), ("one", "Grosvenor", "two"), (0, 1, 2))
    looks = np.array([[0.1, 0.7, 0.2, 0.0], [0.8, 0.1, 0.1, 0.0], [0.0, 0.0, 0.0, 1.0]])
    target = translator.tokenizers.target
    six = target.encode("six").ids[0]
    written = Written(np.array([UNK, six, EOS]), looks, -1.0, -2.0)
    found = [(Part(0, 0, 3), [written])]
    (best,) = joined(source, found, target, 1.0, replace_unknown=True)
    assert best.split.text == "Grosvenor six"
    assert best.split.words == ("Grosvenor", "six")
    assert argmax_links(best.weights) == {(1, 0), (0, 1)}
    assert argmax_links(best.weights, threshold=0.75) == {(0, 1)}
    (left,) = joined(source, found, target, 1.0, replace_unknown=False)
    assert left.split.text == "<unk> six"
    # Where it looked nowhere (a model without attention), there is nothing to put in its place.
    blind = [(Part(0, 0, 3), [Written(written.tokens, 0 * looks, -1.0, -2.0)])]
    assert joined(source, blind, target, 1.0, replace_unknown=True)[0].split.text == "<unk> six"


@pytest.mark.parametrize(("look", "shift"), [("writing", 0), ("reading", 1), ("explaining", 0)])
def test_align_looks_as_forced_decoding_does(translator, look, shift):
    pairs = [("one two, three", "un deux"), ("", "un"), (["four,", "six"], ["six", "un", "un"])]
    found = translator.align(pairs, look=look)
    assert [one.weights.shape for one in found] == [(2, 4), (1, 0), (3, 2)]
    assert found[2].source_words == ("four,", "six")
    tokenizers = translator.tokenizers
    for pair, one in zip(pairs, found, strict=True):
        source, target = tokenizers.source.encode(pair[0]), tokenizers.target.encode(pair[1])
        if not source.ids:
            continue
        batch = Batch.of([(source.ids, target.ids)], width=8)
        given = [batch.source, batch.source_lens, batch.target_in]
        if look == "explaining":
            looks = np.asarray(explain_words(translator.model, *given, batch.target_out))
        else:
            looks = np.asarray(force(translator.model, *given))
        expected = word_weights(looks[0], source.word_of_token, target.word_of_token, shift=shift)
        np.testing.assert_allclose(one.weights, expected, atol=1e-5)
    other = translator.align(pairs, look="reading" if look == "writing" else "writing")
    assert np.abs(other[0].weights - found[0].weights).max() > 1e-3
    with pytest.raises(ValueError, match=r"one of writing, reading, explaining for a .*Got 'both'"):
        translator.align(pairs, look="both")
    with pytest.raises(TypeError, match=r"\(source, target\) each\. Got 'un'"):
        translator.align(["un"])


def test_a_hurried_program_gives_the_same(translator):
    batch = Batch.of([((4, 5, 6), ()), ((7,), ())], width=8)
    given = jnp.asarray(batch.source), jnp.asarray(batch.source_lens)
    hurried = programs.search(translator.model, *given, SEARCH, 2, hurry=True)
    usual = beam_search(translator.model, *given, SEARCH, n_best=2)
    np.testing.assert_array_equal(hurried.tokens, usual.tokens)
    np.testing.assert_allclose(hurried.scores, usual.scores, rtol=1e-4)


def test_load_finds_models_and_runs(tmp_path):
    saved = save_small(tmp_path / "run" / "model")
    for folder in (tmp_path / "run", tmp_path / "run" / "model", str(tmp_path / "run")):
        loaded = Translator.load(folder)
        assert loaded.tokenizers == saved.tokenizers
        np.testing.assert_array_equal(
            loaded.model.target_embedding[...], saved.model.target_embedding[...]
        )


def test_load_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(model_folder_module, "bundled_folder", lambda: tmp_path / "bundled")
    with pytest.raises(FileNotFoundError, match="comes without its English-French model"):
        Translator.load()
    with pytest.raises(FileNotFoundError, match="nowhere is not there"):
        Translator.load(tmp_path / "nowhere")
    save_small(tmp_path / "bundled")
    assert model_folder() == tmp_path / "bundled"
    (tmp_path / "bundled" / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks tokenizer\.json"):
        Translator.load()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="has not come to its end"):
        Translator.load(tmp_path / "run")


def test_load_refuses_what_does_not_fit_together(tmp_path):
    save_small(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["target"]["pieces"].append("sept")
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match="12 entries, tokenizers of 12 and 13"):
        Translator.load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "heads": 4}))
    with pytest.raises(ValueError, match=r"config\.json is damaged.* remove \S+SHA256SUMS"):
        Translator.load(tmp_path)
    (tmp_path / "SHA256SUMS").unlink()  # as the message says for a change on purpose
    with pytest.raises(ValueError, match=r"of this version of regard: unknown fields \['heads'\]"):
        Translator.load(tmp_path)


@pytest.mark.parametrize(("dtype", "bound", "differing"), [("float32", 1e-4, 0), ("auto", 0.05, 5)])
@pytest.mark.slow
def test_a_batch_changes_scores_by_rounding_only(dtype, bound, differing):
    """The bound that `Translator.translate` states, for the bundled model."""
    translator = Translator.load()
    texts = [pair.source for pair in Grammar(48, "test")]
    search = SearchOptions(beam=4, dtype=dtype)
    together = translator.translate(texts, search=search, hurry=False)
    few = [translator.translate(texts[i : i + 4], search=search) for i in range(0, 48, 4)]
    alone = [best for found in few for best, *_ in found]
    same = [(one, best) for one, (best, *_) in zip(alone, together, strict=True)]
    same = [(one, best) for one, best in same if one.text == best.text]
    assert len(same) >= 48 - differing
    assert max(abs(one.score - best.score) for one, best in same) < bound
