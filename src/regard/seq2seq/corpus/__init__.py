"""Where sentence pairs come from: readers of files, and a grammar that makes its own.

A corpus yields `Pair`s, and can be iterated any number of times; afterwards its `report` says what
it read, kept and dropped, and why. Nothing is dropped silently.

| corpus | reads |
| --- | --- |
| `Grammar` | nothing: it makes English–French pairs, with gold word alignments |
| `TabSeparated` | one file, a tab between the sides |
| `ParallelFiles` | two files, line by line |
| `HuggingFace` | a dataset of the package `datasets` |
"""

from regard.seq2seq.corpus.cleaning import Cleaning
from regard.seq2seq.corpus.expanded import expanded
from regard.seq2seq.corpus.grammar import Grammar
from regard.seq2seq.corpus.hugging_face import HuggingFace
from regard.seq2seq.corpus.pair import Corpus, CorpusError, Pair, Progress, Report
from regard.seq2seq.corpus.parallel import ParallelFiles
from regard.seq2seq.corpus.tab_separated import TabSeparated

__all__ = [
    "Corpus",
    "CorpusError",
    "Pair",
    "Report",
    "Progress",
    "Cleaning",
    "Grammar",
    "TabSeparated",
    "ParallelFiles",
    "HuggingFace",
    "expanded",
]
