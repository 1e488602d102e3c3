"""A backend of one's own, in one file: sums over keys one at a time. test_toys.py registers it."""

import jax.numpy as jnp
from jax import lax

from regard.pool.backend import Backend
from regard.pool.merge import log_sum_exp
from regard.pool.reference import masked_scores
from regard.score.contract import accumulation_dtype, repeat_heads


class KeyByKey(Backend):
    name = "key by key"

    def refuses(self, request):
        return "draws no random numbers for dropout_rate=" if request.dropout else None

    def describe(self, request):
        return "adds one key after the other"

    def pool(self, problem, settings):
        problem = problem.zeroed()
        scores, allowed = masked_scores(problem, self.scores(problem, settings))
        weights = problem.normalize(scores, allowed)
        value = repeat_heads(problem.value, problem.query)
        wide = accumulation_dtype(weights.dtype, value.dtype)
        value = value.astype(wide)

        def add(out, s):
            one = jnp.take(weights.astype(wide), s, axis=3)[..., None]
            return out + one * jnp.take(value, s, axis=2)[:, :, None, :], None

        start = jnp.zeros((*weights.shape[:3], value.shape[-1]), wide)
        out, _ = lax.scan(add, start, jnp.arange(value.shape[2]))
        out = out.astype(problem.out_dtype)
        return (out, log_sum_exp(scores)) if problem.lse else out, jnp.array(False)
