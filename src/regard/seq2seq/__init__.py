"""A Bahdanau translator, in the order that a sentence travels.

| module | what it does |
| --- | --- |
| `corpus` | sentence pairs, from files or from the embedded English–French grammar |
| `words`, `tokenizer`, `tokenizer_pair` | text to words to numbers, and back |
| `batches` | numbers to arrays of a few fixed shapes, in an order that can be resumed |
| `encoder`, `decoder`, `model` | the network |
| `settings`, `prepare`, `training` | learning to translate, from one file of settings |
| `search`, `translator` | translating: token ids, and text |
| `alignment`, `metrics` | which word came from which, and how good it all is |

Nothing is imported here: reading a corpus needs neither Flax nor `tokenizers`. What is missing is
asked for where it is needed, with the pip command: `pip install "regard[translate]"`.
"""
