"""A Bahdanau translator, in the order that a sentence travels.

| module | what it does |
| --- | --- |
| `corpus` | sentence pairs, from files or from the embedded English–French grammar |
| `text` | text to words to numbers, and back |
| `model` | encoder, attention, decoder; a model's configuration and its files |
| `train` | learning to translate, from one file of settings; batches, checkpoints, validation |
| `distributed` | training on several devices and in several processes |
| `decode` | search: from token ids to hypotheses with their attention |
| `translator`, `translation` | translating text: sentences in, text with weights and links out |
| `alignment`, `metrics` | which word came from which, and how good it all is |

Nothing is imported here: reading a corpus needs neither Flax nor `tokenizers`. What is missing is
asked for where it is needed, with the pip command: `pip install "regard[translate]"`.
"""
