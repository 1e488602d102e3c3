"""Text to numbers and back: words, tokenizers, vocabularies, sentence boundaries."""
