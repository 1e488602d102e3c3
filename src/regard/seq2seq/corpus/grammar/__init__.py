"""An English–French corpus of the project's own making, with gold word alignments.

A synchronous grammar makes both sentences of a pair together, so it knows which word came from
which. `Grammar` is the corpus; the rules are, from words to sentences: `nouns`, `adjectives`,
`verbs`, `noun_phrases`, `verb_phrases`, `adjuncts`, `clauses`, `questions`, `sentences`.
"""

from regard.seq2seq.corpus.grammar.corpus import Grammar

__all__ = ["Grammar"]
