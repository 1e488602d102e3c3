"""A random attention problem: drawn once, run by regard, and answered by the oracle."""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

import oracle
import regard
from cases import AS_RUN, BACKENDS, CHOOSY, DTYPES, MASKS, REGIMES, SCORES, Case

# What the additive lift may add, by the query's dtype: (forward, gradient), relative in norm. Its
# contract is on the score, tolerance * |w|_1; test_additive.py holds it to that. Here, the issue's
# numbers for float32; in half precision a score off by 2^-8 * 4 moves a weight by that part of it.
LIFT_TOLERANCES = {
    "float64": (0.0, 0.0),  # the exact path
    "float32": (2e-6, 1e-4),
    "float16": (2**-11 * 4, 2**-11 * 32),
    "bfloat16": (2**-8 * 4, 2**-8 * 32),
}


ARGUMENTS = ("query", "key", "value", "bias", "sink")  # of attend; all else is the score's


@dataclass
class Problem:
    """The inputs of one case, in float64 already rounded to the case's dtypes."""

    case: Case
    inputs: dict  # query, key, value, bias (where there is one), and the score's parameters
    facts: dict  # the mask, as oracle.allowed takes it
    cotangent: np.ndarray
    dtypes: dict  # of each input, and of "out"
    lifted: bool | None = None  # whether the score's lift ran; known once there is an answer

    @functools.cached_property
    def shape(self):
        return oracle.weights_shape(self.inputs["query"], self.inputs["key"])

    @functools.cached_property
    def may(self):
        return oracle.allowed(
            self.shape, **{name: fact for name, fact in self.facts.items() if name != "as_mask"}
        )

    @functools.cached_property
    def may_per_key(self):
        """[S], [B, S] or [B, S, K]: is this key seen by any query of its heads?"""
        if len(self.shape) < 4:
            return self.may.any(axis=-2)
        B, N, T, S = self.shape
        K = self.inputs["key"].shape[2]
        per_key_head = self.may.reshape(B, K, N // K * T, S).any(axis=2)  # [B, K, S]
        return per_key_head.swapaxes(1, 2)

    @functools.cached_property
    def may_per_query(self):
        """[T], [B, T] or [B, T, N]: does this query see any key?"""
        sees = self.may.any(axis=-1)
        return sees.swapaxes(1, 2) if sees.ndim == 3 else sees

    def tolerance(self, name):
        """The relative error allowed to `name` ("out", or an input: its gradient), from its
        dtype.
        """
        # Scores are in float32 at least, and in float64 only where everything is.
        compute = "float64" if set(self.dtypes.values()) == {"float64"} else "float32"
        kind = "forward" if name == "out" else "gradient"
        allowed = max(getattr(DTYPES[dtype], kind) for dtype in (compute, self.dtypes[name]))
        if name == "out":
            # S values that differ in sign average to √S less than they are, with their rounding.
            # It counts from 4,096 keys.
            allowed = max(allowed, math.sqrt(self.shape[-1]) * np.finfo(compute).eps / 4)
        if self.backend.implementation == "pallas" or self.case.backend == "cudnn, stand-in":
            # Kernels multiply 16-bit numbers, so they round twice: what is stored, and before it
            # features, weights or d scores. So does a GPU's projection where a CPU stands in.
            halves = [dtype for dtype in self.dtypes.values() if "16" in dtype]
            allowed = max(allowed, *(2 * getattr(DTYPES[half], kind) for half in halves), 0)
        if name.split()[-1] in ("scale", "width") or name.isdigit():  # or the factor of a sum
            # One number for all pairs: its gradient is a sum whose terms cancel, by up to 90 times
            # in these cases, and its rounding is that of the terms.
            allowed *= 8
        return max(allowed, self._lift_tolerance(kind))

    def _lift_tolerance(self, kind):
        if not SCORES[self.case.score].approximate or self.case.backend == "reference":
            return 0.0
        return LIFT_TOLERANCES[self.dtypes["query"]][kind == "gradient"]

    @property
    def _oracle_arguments(self):
        row = SCORES[self.case.score]
        names = [name for name in self.inputs if name not in ARGUMENTS]
        return {
            "score": row.oracle({name: self.inputs[name] for name in names}),
            "may": self.may,
            "bias": self.inputs.get("bias"),
            "sink": self.inputs.get("sink"),
            "softcap": self.case.softcap,
            "regime": REGIMES[self.case.regime].oracle,
        }

    @functools.cached_property
    def pooled(self):
        """What the oracle says: (out, weights)."""
        return oracle.attend(*self._tensors(), **self._oracle_arguments)

    @functools.cached_property
    def gradients(self):
        """What the oracle says: the gradients by name."""
        return oracle.gradients(self.cotangent, *self._tensors(), **self._oracle_arguments)

    def _tensors(self):
        return [self.inputs[name] for name in ("query", "key", "value")]

    @property
    def backend(self):
        return {**BACKENDS, **AS_RUN, **CHOOSY}[self.case.backend]

    @functools.cached_property
    def program(self):
        """One jitted function for everything a test needs of this case; compiled once."""
        implementation = self.backend.implementation
        normalize = REGIMES[self.case.regime].normalize

        @jax.jit
        def run(inputs, masks, cotangent):
            def pool(inputs):
                return regard.attend(
                    **inputs,
                    **masks,
                    normalize=normalize,
                    softcap=self.case.softcap,
                    implementation=implementation,
                    return_lifted=True,
                )

            out, pull, lifted = jax.vjp(pool, inputs, has_aux=True)
            return out, pull(cotangent)[0], lifted

        return run

    def run(self, inputs=None, facts=None):
        """Out and gradients by name, in the dtypes they came in. `inputs` replaces some of them."""
        inputs = {**self.inputs, **(inputs or {})}
        with self.backend.tiling():
            out, found, self.lifted = self.program(*self._arguments(inputs, facts))
        read = SCORES[self.case.score].read
        own = [name for name in inputs if name not in ARGUMENTS]
        gradients = {name: read(found["score"], name) for name in own}
        gradients |= {name: found[name] for name in ARGUMENTS if name in found}
        return np.asarray(out), {name: np.asarray(g) for name, g in gradients.items()}

    @functools.cached_property
    def program_alone(self):
        """The forward pass of a call that is not differentiated: a program of its own."""
        keywords = dict(implementation=self.backend.implementation)
        keywords |= dict(normalize=REGIMES[self.case.regime].normalize, softcap=self.case.softcap)
        return jax.jit(lambda inputs, masks: regard.attend(**inputs, **masks, **keywords))

    def run_alone(self, inputs=None):
        """Out, not differentiated. `inputs` replaces some of them."""
        with self.backend.tiling():
            arguments = self._arguments({**self.inputs, **(inputs or {})})
            return np.asarray(self.program_alone(*arguments[:2]))

    def explained(self):
        """What `regard.explain` says about this case."""
        with self.backend.tiling():
            arguments = self._arguments(self.inputs)[:2]
            return regard.explain(
                **arguments[0],
                **arguments[1],
                normalize=REGIMES[self.case.regime].normalize,
                softcap=self.case.softcap,
                implementation=self.backend.implementation,
            )

    def compiled_text(self):
        """The compiled program; after `answer` this compiles nothing."""
        with self.backend.tiling():
            return self.program.lower(*self._arguments(self.inputs)).compile().as_text()

    def _arguments(self, inputs, facts=None):
        return (
            self.as_arguments(inputs),
            as_arguments(self.facts if facts is None else facts),
            jnp.asarray(self.cotangent, self.dtypes["out"]),
        )

    @functools.cached_property
    def answer(self):
        return self.run()

    def as_arguments(self, inputs):
        """The arrays as attend's keywords, the score among them."""
        arrays = {name: jnp.asarray(x, self.dtypes[name]) for name, x in inputs.items()}
        keywords = {name: arrays.pop(name) for name in ARGUMENTS if name in arrays}
        return {**keywords, "score": SCORES[self.case.score].make(**arrays)}


def as_arguments(facts):
    """The library's valid_lens and mask for a line of the mask table."""
    masks = []
    if "causal" in facts:
        masks.append(regard.Mask.causal(align=facts["causal"]))
    if "window" in facts:
        left, right, align = facts["window"]
        masks.append(regard.Mask.window(left, right, align=align))
    if "segments" in facts:
        masks.append(regard.Mask.segments(*(jnp.asarray(ids) for ids in facts["segments"])))
    if "boolean" in facts:
        masks.append(regard.Mask.boolean(jnp.asarray(facts["boolean"])))
    lens = jnp.asarray(facts["valid_lens"]) if "valid_lens" in facts else None
    if facts.get("as_mask"):
        masks.append(regard.Mask.lengths(lens))
        lens = None
    return {
        "valid_lens": lens,
        "mask": functools.reduce(lambda a, b: a & b, masks) if masks else None,
    }


@functools.lru_cache(maxsize=64)
def draw(case):
    """Unit-variance inputs of the case's shapes, and its mask. The same for every backend."""
    rng = np.random.default_rng(case.seed)
    B, T, N, K, S, V = case.sizes
    row = SCORES[case.score]
    Hq, Hk = row.widths
    lead = () if B is None else (B,)
    heads, key_heads = ((), ()) if N is None else ((N,), (K,))

    def normal(*shape):
        return rng.standard_normal(shape)

    inputs = {
        "query": normal(*lead, T, *heads, Hq),
        "key": normal(*lead, S, *key_heads, Hk),
        "value": normal(*lead, S, *key_heads, V),
    }
    if case.bias is not None:
        inputs["bias"] = normal(*case.bias)
    inputs |= row.draw(normal, N or 1)
    if case.sink:
        inputs["sink"] = normal(N or 1)
    facts = MASKS[case.mask](rng, 1 if B is None else B, N or 1, T, S)
    facts = {name: _at_rank(name, fact, case) for name, fact in facts.items()}
    *of_inputs, of_value = case.dtype.split(", ") if ", " in case.dtype else [case.dtype] * 3
    dtypes = dict.fromkeys(inputs, of_inputs[0]) | {
        "key": of_inputs[1],
        "value": of_value,
        "out": of_value,
    }
    inputs = {name: rounded(x, dtypes[name]) for name, x in inputs.items()}
    cotangent = rounded(normal(*inputs["query"].shape[:-1], V), of_value)
    return Problem(case, inputs, facts, cotangent, dtypes)


def _at_rank(name, fact, case):
    """A fact drawn for rank 4, as ranks 3 and 2 write it."""
    if name == "valid_lens" and case.sizes.B is None:
        return fact[0] if fact.ndim else fact  # (B, T) -> (T,), (B,) -> ()
    if name == "segments" and case.sizes.B is None:
        return tuple(ids[0] if ids.ndim == 2 else ids for ids in fact)
    if name == "boolean" and case.sizes.N is None and fact.ndim == 4:
        return fact[0, 0] if case.sizes.B is None else fact[:, 0]
    return fact


def rounded(x, dtype):
    """x as it is after a trip through dtype, in float64 again."""
    return np.asarray(jnp.asarray(x, dtype)).astype(np.float64)


def error(got, expected):
    """|got - expected| / |expected|, in norm; the absolute error where nothing is expected."""
    expected = np.asarray(expected, np.float64)
    apart = np.linalg.norm(np.ravel(np.asarray(got).astype(np.float64) - expected))
    size = np.linalg.norm(np.ravel(expected))
    return apart / size if size > 0 else apart


def assert_close(got, expected, tolerance, what=""):
    """Same shape, and relative error in norm within tolerance."""
    assert np.shape(got) == np.shape(expected), (
        f"{what}: shape {np.shape(got)}, expected {np.shape(expected)}"
    )
    np.testing.assert_array_less(
        error(got, expected), np.nextafter(tolerance, 1), err_msg=f"{what}: relative error"
    )


def assert_near(got, expected, tolerance, least, what):
    """Same shape, and |got - expected| within tolerance of |expected|, or of `least`: terms of that
    size cancel.
    """
    assert np.shape(got) == np.shape(expected), (
        f"{what}: shape {np.shape(got)}, expected {np.shape(expected)}"
    )
    apart = np.linalg.norm(np.asarray(got).astype(np.float64) - expected)
    size = max(np.linalg.norm(expected), least)
    assert apart <= tolerance * size, f"{what}: off by {apart:.3g} of {size:.3g}"
