"""What attention is: float64 NumPy, one query at a time, and nothing imported from regard.

This page is the specification the other tests trust, so it is written to be read, not to be fast:
explicit loops over batch, head and query, vectors over the keys. The gradients are written out by
hand (no automatic differentiation) and checked against finite differences in test_oracle.py.

Axes as in the library: (T, D), (B, T, D) or (B, T, N, D) for query, key and value, where the key's
and value's head count K may divide N; weights (T, S), (B, T, S) or (B, N, T, S).
"""

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np

# ---------------------------------------------------------------------------------------------
# Scores: a(q, k) for one query q [Hq] and several keys k [S, Hk].
#
# `parameters` maps a name to its array; `ranks` says the rank it has when all heads share it, so
# an array of one rank more carries a leading head axis. `pull` takes the cotangent da [S] of the
# scores to (dq, dk, {name: dparameter}).


@dataclass
class Dot:
    """q . k times scale; 1/sqrt(d) when there is no scale."""

    parameters: dict = field(default_factory=dict)
    ranks: ClassVar = {"scale": 0}

    def _scale(self, p, q):
        return p.get("scale", 1.0 / np.sqrt(max(q.size, 1)))

    def scores(self, p, q, k):
        return self._scale(p, q) * (k @ q)

    def pull(self, p, q, k, da):
        scale = self._scale(p, q)
        return scale * (da @ k), scale * np.outer(da, q), {"scale": da @ (k @ q)}


@dataclass
class Gaussian:
    """-|q - k|^2 / (2 width^2)."""

    parameters: dict
    ranks: ClassVar = {"width": 0}

    def scores(self, p, q, k):
        return -np.sum((q - k) ** 2, axis=-1) / (2 * p["width"] ** 2)

    def pull(self, p, q, k, da):
        away = (k - q) * da[:, None] / p["width"] ** 2
        squares = np.sum((q - k) ** 2, axis=-1)
        return away.sum(axis=0), -away, {"width": da @ squares / p["width"] ** 3}


@dataclass
class Bilinear:
    """q^T M k."""

    parameters: dict
    ranks: ClassVar = {"kernel": 2}

    def scores(self, p, q, k):
        return k @ (q @ p["kernel"])

    def pull(self, p, q, k, da):
        pulled = da @ k
        return p["kernel"] @ pulled, np.outer(da, q @ p["kernel"]), {"kernel": np.outer(q, pulled)}


@dataclass
class Additive:
    """w . tanh(q W_q + k W_k); a kernel that is not there is the identity."""

    parameters: dict
    ranks: ClassVar = {"query_kernel": 2, "key_kernel": 2, "vector": 1}

    def _tanh(self, p, q, k):
        x = q @ p["query_kernel"] if "query_kernel" in p else q  # [h]
        y = k @ p["key_kernel"] if "key_kernel" in p else k  # [S, h]
        return np.tanh(x + y)

    def scores(self, p, q, k):
        return self._tanh(p, q, k) @ p["vector"]

    def pull(self, p, q, k, da):
        tanh = self._tanh(p, q, k)
        dz = da[:, None] * p["vector"] * (1 - tanh**2)  # [S, h]
        dx, dy = dz.sum(axis=0), dz
        dq = p["query_kernel"] @ dx if "query_kernel" in p else dx
        dk = dy @ p["key_kernel"].T if "key_kernel" in p else dy
        dp = {"query_kernel": np.outer(q, dx), "key_kernel": k.T @ dy, "vector": da @ tanh}
        return dq, dk, dp


@dataclass
class Manhattan:
    """-rate . |q - k|: a score that the library does not have, for the tests of a user's own."""

    parameters: dict
    ranks: ClassVar = {"rate": 1}

    def scores(self, p, q, k):
        return -np.abs(q - k) @ p["rate"]

    def pull(self, p, q, k, da):
        signs = np.sign(q - k) * p["rate"] * da[:, None]  # [S, D]
        return -signs.sum(axis=0), signs, {"rate": -da @ np.abs(q - k)}


WHERE = ("at", "held")  # beside the parameters: the query's position, and the keys' [S]


@dataclass
class Rotary:
    """`inner` of queries and keys rotated by their positions, pair by pair, as complex numbers."""

    inner: object  # of a class above
    parameters: dict
    fraction: float = 1.0
    interleaved: bool = False
    base: float = 10_000.0

    @property
    def ranks(self):
        return self.inner.ranks

    def _turn(self, x, positions, sign=1):
        size = round(self.fraction * x.shape[-1])
        rate = self.base ** (-np.arange(0, size, 2) / max(size, 1))
        pairs = np.arange(size).reshape((-1, 2) if self.interleaved else (2, -1))
        pairs = pairs.T if self.interleaved else pairs
        number = x[..., pairs[0]] + 1j * x[..., pairs[1]]
        number = number * np.exp(1j * sign * np.multiply.outer(positions, rate))
        turned = x.copy()
        turned[..., pairs[0]], turned[..., pairs[1]] = number.real, number.imag
        return turned

    def scores(self, p, q, k):
        return self.inner(p).scores(p, self._turn(q, p["at"]), self._turn(k, p["held"]))

    def pull(self, p, q, k, da):
        turned = self._turn(q, p["at"]), self._turn(k, p["held"])
        dq, dk, dp = self.inner(p).pull(p, *turned, da)
        return self._turn(dq, p["at"], -1), self._turn(dk, p["held"], -1), dp


@dataclass
class Alibi:
    """-slope (i - j); two-sided: -slope |i - j|."""

    parameters: dict
    two_sided: bool = False
    ranks: ClassVar = {"slopes": 0}

    def _distance(self, p):
        return np.abs(p["at"] - p["held"]) if self.two_sided else p["at"] - p["held"]

    def scores(self, p, q, k):
        return -p["slopes"] * self._distance(p)

    def pull(self, p, q, k, da):
        return np.zeros_like(q), np.zeros_like(k), {"slopes": -da @ self._distance(p)}


@dataclass
class TwoSidedAlibi(Alibi):
    two_sided: bool = True


@dataclass
class RelativeBias:
    """table[j - i + R], of a table of 2R + 1 entries, past whose ends distances are clipped."""

    parameters: dict
    ranks: ClassVar = {"table": 1}

    def _entry(self, p):
        furthest = p["table"].size // 2
        return np.clip(p["held"] - p["at"], -furthest, furthest) + furthest

    def scores(self, p, q, k):
        return p["table"][self._entry(p)]

    def pull(self, p, q, k, da):
        found = np.zeros_like(p["table"])
        np.add.at(found, self._entry(p), da)
        return np.zeros_like(q), np.zeros_like(k), {"table": found}


@dataclass
class Sum:
    """Σ_i c_i a_i(q, k). Parameters: "i name" of term i, and "i" for its factor."""

    terms: list  # of classes above
    parameters: dict

    @property
    def ranks(self):
        named = {
            f"{i} {name}": rank
            for i, term in enumerate(self.terms)
            for name, rank in term.ranks.items()
        }
        return named | {str(i): 0 for i in range(len(self.terms))}

    def _terms(self, p):
        for i, term in enumerate(self.terms):
            start = f"{i} "
            own = {name.removeprefix(start): x for name, x in p.items() if name.startswith(start)}
            own |= {name: p[name] for name in WHERE if name in p}
            yield i, term(own), own, p.get(str(i), 1.0)

    def scores(self, p, q, k):
        return sum(factor * term.scores(own, q, k) for _, term, own, factor in self._terms(p))

    def pull(self, p, q, k, da):
        dq, dk, dp = np.zeros_like(q), np.zeros_like(k), {}
        for i, term, own, factor in self._terms(p):
            dq_i, dk_i, found = term.pull(own, q, k, factor * da)
            dq, dk = dq + dq_i, dk + dk_i
            dp |= {f"{i} {name}": x for name, x in found.items()}
            dp[str(i)] = da @ term.scores(own, q, k)
        return dq, dk, dp


# ---------------------------------------------------------------------------------------------
# Regimes: weights of one query from its scores a [S], S >= 1, over the keys it may attend to and
# only those. `pull` takes the cotangent dw of the weights to that of the scores.


class Softmax:
    def weights(self, a):
        e = np.exp(a - a.max())
        return e / e.sum()

    def pull(self, a, w, dw):
        return w * (dw - w @ dw)


@dataclass
class SinkSoftmax:
    """Softmax over the scores and one more, the sink's, whose weight no value gets."""

    sink: float

    def weights(self, a):
        top = max(a.max(), self.sink)
        e = np.exp(a - top)
        return e / (e.sum() + np.exp(self.sink - top))

    def pull(self, a, w, dw):
        return w * (dw - w @ dw)

    def pull_sink(self, w, dw):
        return -(1 - w.sum()) * (w @ dw)


class Sparsemax:
    """Euclidean projection onto the simplex, by sorting (Martins and Astudillo 2016, algorithm
    1).
    """

    def weights(self, a):
        a = a - a.max()  # a constant changes nothing, but 1 is lost beside 1e30
        down = np.sort(a)[::-1]
        count = np.arange(1, a.size + 1)
        support = np.flatnonzero(1 + count * down > np.cumsum(down))[-1] + 1
        threshold = (down[:support].sum() - 1) / support
        return np.maximum(a - threshold, 0.0)

    def pull(self, a, w, dw):
        support = w > 0
        return np.where(support, dw - dw[support].mean(), 0.0)


@dataclass
class Kernel:
    """f(a) / sum f(a); a row whose f are all zero has nothing to attend to."""

    f: object
    slope: object

    def weights(self, a):
        total = self.f(a).sum()
        return self.f(a) / total if total > 0 else np.zeros_like(a)

    def pull(self, a, w, dw):
        total = self.f(a).sum()
        return self.slope(a) * (dw - w @ dw) / total if total > 0 else np.zeros_like(a)


@dataclass
class Cone:
    """f(a), not normalized."""

    f: object
    slope: object

    def weights(self, a):
        return self.f(a)

    def pull(self, a, w, dw):
        return self.slope(a) * dw


@dataclass
class Hard:
    """1 at the largest score, the first of equals; straight-through: backward as softmax's."""

    straight_through: bool = False

    def weights(self, a):
        w = np.zeros_like(a)
        w[np.argmax(a)] = 1.0
        return w

    def pull(self, a, w, dw):
        if not self.straight_through:
            return np.zeros_like(a)
        return Softmax().pull(a, Softmax().weights(a), dw)


class Uniform:
    def weights(self, a):
        return np.full_like(a, 1.0 / a.size)

    def pull(self, a, w, dw):
        return np.zeros_like(a)


# ---------------------------------------------------------------------------------------------
# Masks: which keys each query may attend to.


def allowed(shape, valid_lens=None, causal=None, window=None, segments=None, boolean=None):
    """The boolean weights-shaped array of the pairs that take part: all conditions must hold.

    valid_lens: () | (B,) | (B, T) | (B, N, T), at rank 2 () | (T,).  causal: "end" | "start".
    window: (left, right, align), None for no limit.  segments: (query ids, key ids), ids [T] or
    [B, T].  boolean: broadcastable to `shape`.
    """
    B, N, T, S = _heads_shape(tuple(shape))
    lens = (
        None if valid_lens is None else _lens_per_query(np.asarray(valid_lens), B, N, T, len(shape))
    )
    table = None if boolean is None else np.broadcast_to(boolean, shape).reshape(B, N, T, S)
    if segments is not None:
        query_ids = np.broadcast_to(segments[0], (B, T))
        key_ids = np.broadcast_to(segments[1], (B, S))
    if causal is not None:
        causal_window = (None, 0, causal)

    may = np.zeros((B, N, T, S), bool)
    for b in range(B):
        for n in range(N):
            for t in range(T):
                for s in range(S):
                    may[b, n, t, s] = (
                        (lens is None or s < lens[b, n, t])
                        and (causal is None or _in_window(t, s, T, S, *causal_window))
                        and (window is None or _in_window(t, s, T, S, *window))
                        and (segments is None or query_ids[b, t] == key_ids[b, s])
                        and (table is None or table[b, n, t, s])
                    )
    return may.reshape(shape)


def _lens_per_query(lens, B, N, T, rank):
    if rank == 2 and lens.ndim == 1:
        lens = lens[None, None, :]  # (T,)
    elif lens.ndim == 1:
        lens = lens[:, None, None]  # (B,)
    elif lens.ndim == 2:
        lens = lens[:, None, :]  # (B, T)
    return np.broadcast_to(lens, (B, N, T))


def _in_window(t, s, T, S, left, right, align):
    position = t + S - T if align == "end" else t
    return (left is None or s >= position - left) and (right is None or s <= position + right)


# ---------------------------------------------------------------------------------------------
# Attention, and its gradients.


class Pooled(NamedTuple):
    out: np.ndarray
    weights: np.ndarray  # before dropout


def attend(
    query,
    key,
    value,
    *,
    score,
    may=None,
    bias=None,
    regime=None,
    keep=None,
    rate=0.0,
    softcap=None,
    sink=None,
):
    """out = sum_s weight_s value_s, per query, over the keys it may attend to; none: zeros.

    may: boolean, broadcastable to the weights (see `allowed`).  bias: added to the scores; -inf
    there is the same as not being allowed.  keep: boolean, what dropout at `rate` keeps.  softcap:
    c tanh(a / c), before the bias.  sink: () or [N], with softmax.
    """
    regime = regime or Softmax()
    shape = weights_shape(query, key)
    q, k, v = (_with_heads(x) for x in (query, key, value))
    first = k.shape[1] - q.shape[1]
    may, bias, keep = (_per_head(x, shape) for x in (may, bias, keep))
    weights = np.zeros(_heads_shape(shape))
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for b, n, t, m, seen in _rows(q, k, may, bias):
        where = (b, n, t, seen)
        a = _scores(score, n, q[b, t, n], k[b, seen, m], bias, where, softcap, first)
        w = _regime(regime, sink, n).weights(a)
        weights[b, n, t, seen] = w
        kept = w if keep is None else w * keep[b, n, t, seen] / (1 - rate)
        out[b, t, n] = kept @ v[b, seen, m]
    return Pooled(out.reshape(*np.shape(query)[:-1], v.shape[3]), weights.reshape(shape))


def gradients(
    cotangent,
    query,
    key,
    value,
    *,
    score,
    may=None,
    bias=None,
    regime=None,
    keep=None,
    rate=0.0,
    softcap=None,
    sink=None,
):
    """The gradients of sum(cotangent * out) by name: query, key, value, bias, sink, parameters."""
    regime = regime or Softmax()
    shape = weights_shape(query, key)
    q, k, v, g = (_with_heads(x) for x in (query, key, value, cotangent))
    first = k.shape[1] - q.shape[1]
    may_h, bias_h, keep_h = (_per_head(x, shape) for x in (may, bias, keep))
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    dbias, dsink = np.zeros(_heads_shape(shape)), np.zeros(np.shape(sink))
    dparameters = {name: np.zeros(np.shape(p)) for name, p in score.parameters.items()}
    for b, n, t, m, seen in _rows(q, k, may_h, bias_h):
        where, p = (b, n, t, seen), _of_head(score, n, t + first, seen)
        a = _scores(score, n, q[b, t, n], k[b, seen, m], bias_h, where, softcap, first)
        of_head = _regime(regime, sink, n)
        w = of_head.weights(a)
        scaled = 1.0 if keep_h is None else keep_h[b, n, t, seen] / (1 - rate)
        dv[b, seen, m] += np.outer(w * scaled, g[b, t, n])
        dw = (v[b, seen, m] @ g[b, t, n]) * scaled
        da = of_head.pull(a, w, dw)
        dbias[b, n, t, seen] = da
        if sink is not None:
            dsink[n if np.ndim(sink) else ...] += of_head.pull_sink(w, dw)
        if softcap is not None:
            raw = score.scores(p, q[b, t, n], k[b, seen, m])
            da = da * (1 - np.tanh(raw / softcap) ** 2)
        dq_row, dk_rows, dp = score.pull(p, q[b, t, n], k[b, seen, m], da)
        dq[b, t, n] += dq_row
        dk[b, seen, m] += dk_rows
        for name, total in dparameters.items():
            total[n if total.ndim > score.ranks[name] else ...] += dp[name]
    found = {
        "query": dq.reshape(np.shape(query)),
        "key": dk.reshape(np.shape(key)),
        "value": dv.reshape(np.shape(value)),
        **dparameters,
    }
    if sink is not None:
        found["sink"] = dsink
    if bias is not None:
        found["bias"] = _summed_to(dbias.reshape(shape), np.shape(bias))
    return found


def scores(query, key, *, score):
    """a(q, k) for every pair, weights-shaped, no mask."""
    q, k = _with_heads(query), _with_heads(key)
    shape = weights_shape(query, key)
    a = np.zeros(_heads_shape(shape))
    for b, n, t, m, seen in _rows(q, k, None, None):
        p = _of_head(score, n, t + k.shape[1] - q.shape[1], seen)
        a[b, n, t, seen] = score.scores(p, q[b, t, n], k[b, seen, m])
    return a.reshape(shape)


def weights_shape(query, key):
    """(T, S), (B, T, S) or (B, N, T, S)."""
    q, k = np.shape(query), np.shape(key)
    return {
        2: lambda: (q[0], k[0]),
        3: lambda: (q[0], q[1], k[1]),
        4: lambda: (q[0], q[2], q[1], k[1]),
    }[len(q)]()


def _rows(q, k, may, bias):
    """Every query (b, n, t) with a visible key, its key head m, and the keys it sees."""
    B, T, N, _ = q.shape
    S, K = k.shape[1:3]
    for b in range(B):
        for n in range(N):
            for t in range(T):
                sees = np.ones(S, bool) if may is None else may[b, n, t].copy()
                if bias is not None:
                    sees &= bias[b, n, t] > -np.inf
                if sees.any():
                    yield b, n, t, n // (N // K), np.flatnonzero(sees)


def _regime(regime, sink, n):
    if sink is None:
        return regime
    assert isinstance(regime, Softmax)
    return SinkSoftmax(float(sink[n] if np.ndim(sink) else sink))


def _scores(score, n, q, k, bias, where, softcap=None, first=0):
    """first: the position of query 0, S - T: the last query stands where the last key does."""
    a = score.scores(_of_head(score, n, where[2] + first, where[3]), q, k)
    a = a if softcap is None else softcap * np.tanh(a / softcap)
    return a if bias is None else a + bias[where]


def _of_head(score, n, at, held):
    """The parameters of one head, and where its query and keys stand."""
    return {
        name: np.asarray(p)[n] if np.ndim(p) > score.ranks[name] else np.asarray(p)
        for name, p in score.parameters.items()
    } | {"at": at, "held": held}


def _with_heads(x):
    x = np.asarray(x, np.float64)
    return {2: lambda: x[None, :, None, :], 3: lambda: x[:, :, None, :], 4: lambda: x}[
        x.ndim
    ]()  # [B, T, N, D]


def _heads_shape(shape):
    return {2: (1, 1, *shape), 3: (*shape[:1], 1, *shape[1:]), 4: shape}[len(shape)]  # [B, N, T, S]


def _per_head(x, shape):
    return None if x is None else np.broadcast_to(x, shape).reshape(_heads_shape(shape))


def _summed_to(x, shape):
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    for axis, size in enumerate(shape):
        if size == 1:
            x = x.sum(axis=axis, keepdims=True)
    return x
