"""What is promised on one NVIDIA H200 in bfloat16 (design section 7), in the order of its table.

Elsewhere the times and rates are only to be looked at; the ratios should hold.
"""

from regard.bench.cases.gpu_table import GPU_CASES, JAX_PEERS, LINEAR_LENGTHS
from regard.bench.results.targets import Target, cheaper, faster, within


def _additive(what: str, case: str, ms: float, times: float) -> tuple[Target, Target]:
    """All in: features, guard and kernel. As time, and over the book's form in the same run."""
    return (
        within(f"additive, {what}", case, ms),
        faster(f"additive, {what}, over the book's form", case, "book", times),
    )


def _rate(case: str, reach: float) -> Target:
    """Useful operations of the wide kernel alone."""
    width, _, backward = case.removeprefix("kernel_").partition("_")
    promise = f"wide kernel alone, width {width}, {backward or 'forward'}"
    return Target(promise, ((case, "regard"),), None, reach, at_least=True, measure="TFLOP/s")


_SHORT, _LONG = LINEAR_LENGTHS

GPU_TARGETS = (
    *_additive("default tolerance, forward", "additive", 0.65, 28.0),
    *_additive("tolerance 2e-2, forward", "additive_2e-2", 0.45, 40.0),
    *_additive("default tolerance, forward+backward", "additive_backward", 2.9, 12.0),
    *_additive("h=V=256, forward", "additive_256", 2.9, 25.0),
    *(_rate(f"kernel_{width}", 600.0) for width in (768, 896, 1024)),
    _rate("kernel_3072", 550.0),
    *(_rate(f"kernel_{width}_backward", 450.0) for width in (768, 896, 1024)),
    cheaper(
        "additive, error of the output over the book's form's",
        "error_1024",
        ("error_1024", "book"),
        0.6,
        "error",
    ),
    within("additive training at 131072, memory", "sweep_131072_backward", 40.0, "peak GiB"),
    cheaper(
        "triangular lengths over cuDNN unmasked",
        "triangular_64",
        ("dot_64", "jax.nn cudnn"),
        0.6,
    ),
    cheaper("Gaussian over dot product", "gaussian_128", ("dot_128", "regard"), 1.1),
    cheaper("bilinear over dot product", "bilinear_128", ("dot_128", "regard"), 1.1),
    *(
        faster(f"{case.name} over the best of jax.nn", case.name, JAX_PEERS, 0.97)
        for case in GPU_CASES
        if set(JAX_PEERS) <= set(case.against)
    ),
    faster("additive, exact, forward, over the book's form", "additive_exact", "book", 4.0),
    faster(
        "additive, exact, forward+backward, over the book's form",
        "additive_exact_backward",
        "book",
        4.0,
    ),
    cheaper(
        f"additive, exact, memory of {_LONG} over {_SHORT}",
        f"memory_exact_{_LONG}",
        (f"memory_exact_{_SHORT}", "regard"),
        2.3,
        "peak GiB",
    ),
)
