"""A page written for the book's package runs after its one import line is changed.

In a process of its own, with JAX's defaults and warnings as errors. The page is ours, written in
the manner of the book's attention chapter: the same calls, in the same order.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from regard import d2l

PAGE = '''
from d2l import jax as d2l
from flax import linen as nn
from jax import numpy as jnp
import jax
import math

# Queries, keys, values
weights = d2l.reshape(d2l.eye(10), (1, 1, 10, 10))
d2l.show_heatmaps(weights, xlabel='Keys', ylabel='Queries')

# Pooling by similarity
d2l.use_svg_display()
fig, axes = d2l.plt.subplots(1, 2, sharey=True, figsize=(12, 3))
kernels = (lambda x: d2l.exp(-x**2 / 2), lambda x: d2l.abs(x) < 1.0)
x = d2l.arange(-2.5, 2.5, 0.1)
for kernel, ax in zip(kernels, axes):
    ax.plot(d2l.numpy(x), d2l.numpy(kernel(x)))
f = lambda x: 2 * d2l.sin(x) + x
x_train = jnp.sort(jax.random.uniform(d2l.get_key(), (40,)) * 5)
y_train = f(x_train) + jax.random.normal(d2l.get_key(), (40,))
x_val = d2l.arange(0, 5, 0.1)
k = kernels[0](d2l.reshape(x_train, (-1, 1)) - d2l.reshape(x_val, (1, -1)))
k = d2l.astype(k, d2l.float32)
d2l.check_shape(y_train @ (k / d2l.reduce_sum(k, 0)), (50,))

# Scores
print(d2l.masked_softmax(jax.random.uniform(d2l.get_key(), (2, 2, 4)), jnp.array([2, 3])).shape)
print(d2l.masked_softmax(d2l.rand(2, 2, 4), d2l.tensor([[1, 3], [2, 4]])).shape)
Q, K = d2l.ones((2, 3, 4)), d2l.ones((2, 4, 6))
d2l.check_shape(jax.lax.batch_matmul(Q, K), (2, 3, 6))
d2l.check_shape(d2l.batch_matmul(Q, K), (2, 3, 6))

queries = d2l.normal(0, 1, (2, 1, 2))
keys = d2l.normal(0, 1, (2, 10, 2))
values = d2l.normal(0, 1, (2, 10, 4))
valid_lens = d2l.tensor([2, 6])
attention = d2l.DotProductAttention(dropout=0.5)
(output, attention_weights), params = attention.init_with_output(
    d2l.get_key(), queries, keys, values, valid_lens)
print(output.shape)
d2l.show_heatmaps(d2l.reshape(attention_weights, (1, 1, 2, 10)), xlabel='Keys', ylabel='Queries')

queries = jax.random.normal(d2l.get_key(), (2, 1, 20))
attention = d2l.AdditiveAttention(num_hiddens=8, dropout=0.1)
(output, attention_weights), params = attention.init_with_output(
    d2l.get_key(), queries, keys, values, valid_lens)
print(output.shape)
d2l.show_heatmaps(d2l.reshape(attention_weights, (1, 1, 2, 10)), xlabel='Keys', ylabel='Queries')

# Bahdanau
class MyDecoder(d2l.AttentionDecoder):
    """A reader's own, on the base class: no recurrence, only a look."""
    vocab_size: int

    def setup(self):
        self.attention = d2l.AdditiveAttention(16, 0.1)
        self.embedding = nn.Embed(self.vocab_size, 16)
        self.dense = nn.Dense(self.vocab_size)

    def init_state(self, enc_outputs, enc_valid_lens, *args):
        outputs, hidden_state = enc_outputs
        return (outputs.transpose(1, 0, 2), hidden_state, enc_valid_lens)

    def __call__(self, X, state, training=False):
        enc_outputs, hidden_state, enc_valid_lens = state
        context, w = self.attention(self.embedding(X), enc_outputs, enc_outputs, enc_valid_lens,
                                    training=training)
        self.sow('intermediates', 'dec_attention_weights', [w])
        return self.dense(context), [enc_outputs, hidden_state, enc_valid_lens]

vocab_size, embed_size, num_hiddens, num_layers = 10, 8, 16, 2
batch_size, num_steps = 4, 7
encoder = d2l.Seq2SeqEncoder(vocab_size, embed_size, num_hiddens, num_layers)
X = jnp.zeros((batch_size, num_steps), dtype=jnp.int32)
enc_outputs, _ = encoder.init_with_output(d2l.get_key(), X, training=False)
d2l.check_shape(enc_outputs[0], (num_steps, batch_size, num_hiddens))
for decoder in (
    d2l.Seq2SeqAttentionDecoder(vocab_size, embed_size, num_hiddens, num_layers),
    MyDecoder(vocab_size),
):
    state = decoder.init_state(enc_outputs, None)
    (output, state), _ = decoder.init_with_output(d2l.get_key(), X, state, training=False)
    d2l.check_shape(output, (batch_size, num_steps, vocab_size))
    d2l.check_shape(state[0], (batch_size, num_steps, num_hiddens))
    d2l.check_shape(state[1][0], (batch_size, num_hiddens))
    d2l.check_len(state, 3)

    model = d2l.EncoderDecoder(encoder, decoder)
    lens = d2l.tensor([7, 3, 2, 1])
    params = model.init(d2l.get_key(), X, X, lens)['params']
    batch = (X, X, lens, X)
    preds, (dec_attention_weights, _) = model.predict_step(params, batch, num_steps, True)
    d2l.check_shape(preds, (batch_size, num_steps))
    looked = d2l.concat([step[0][0][0] for step in dec_attention_weights], 0)
    looked = d2l.reshape(looked, (1, 1, -1, num_steps))
    d2l.show_heatmaps(looked[:, :, :, :6], xlabel='Key positions', ylabel='Query positions')

# Multi-head attention and positions
num_hiddens, num_heads = 100, 5
attention = d2l.MultiHeadAttention(num_hiddens, num_heads, 0.5)
valid_lens = d2l.tensor([3, 2])
X = d2l.ones((2, 4, num_hiddens))
Y = d2l.ones((2, 6, num_hiddens))
d2l.check_shape(attention.init_with_output(d2l.get_key(), X, Y, Y, valid_lens,
                                           training=False)[0][0],
                (2, 4, num_hiddens))

pos_encoding = d2l.PositionalEncoding(32, 0)
params = pos_encoding.init(d2l.get_key(), d2l.zeros((1, 60, 32)))
X, inter_vars = pos_encoding.apply(params, d2l.zeros((1, 60, 32)), mutable='intermediates')
P = inter_vars['intermediates']['P'][0][:, :X.shape[1], :]
d2l.plot(d2l.arange(60), P[0, :, 6:10].T, xlabel='Row (position)', figsize=(6, 2.5),
         legend=["Col %d" % d for d in d2l.arange(6, 10)])
d2l.show_heatmaps(d2l.expand_dims(d2l.expand_dims(P[0], axis=0), axis=0), xlabel='Column',
                  ylabel='Row (position)', figsize=(3.5, 4), cmap='Blues')
'''

PRINTS = ["(2, 2, 4)", "(2, 2, 4)", "(2, 1, 4)", "(2, 1, 4)"]


@pytest.mark.slow
def test_a_page_of_the_book_runs_after_one_changed_line():
    page = PAGE.replace("from d2l import jax as d2l", "from regard import d2l")
    assert page.count("regard") == 1
    source = str(Path(d2l.__file__).parents[2])
    before = f"import sys; sys.path.insert(0, {source!r})\nimport regard.d2l\n"
    before += "assert 'matplotlib' not in sys.modules, 'imported before anything is drawn'\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", before + page],
        capture_output=True,
        text=True,
        timeout=300,
        env={"MPLBACKEND": "Agg", "JAX_PLATFORMS": "cpu", "PATH": "", "HOME": "/nonexistent"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == [*PRINTS, ""]
