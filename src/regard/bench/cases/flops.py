"""Useful floating-point operations of a case: what a perfect program would still have to do."""

from regard.bench.cases.case import Case


def useful_flops(case: Case) -> float | None:
    """Operations of the matrix products over the pairs that take part; None where no count fits.

    A pair of query and key costs D products for its score and V to pool its value, two
    operations each. The backward pass makes the score again (D), and takes the gradients of
    query (D), key (D), weight (V) and value (V): 3D + 2V, the count that flash attention's
    papers use. Projections and features are not counted: they are overhead, linear in T and S.
    An additive score has no such count, because its work is tanh by one way and matrix products
    of another width by the other.

    >>> useful_flops(Case("full", "dot", B=1, T=2, S=8, D=4, V=4))
    256.0
    >>> useful_flops(Case("causal", "dot", B=1, T=8, S=8, D=4, V=4, mask="causal"))
    576.0
    """
    if case.score == "additive":
        return None
    forward, backward = case.D + case.V, 3 * case.D + 2 * case.V
    per_pair = {
        "forward": forward,
        "backward": backward,
        "forward+backward": forward + backward,
    }[case.direction]
    return 2.0 * _pairs(case) * per_pair


def _pairs(case: Case) -> int:
    """Pairs of query and key that may look at each other, over examples and heads."""
    if case.mask in ("causal", "triangular"):
        # Query t sees t + 1 keys; the causal diagonal of a wide case ends at its last key.
        first = case.S - case.T if case.mask == "causal" else 0
        seen = sum(min(case.S, max(0, first + t + 1)) for t in range(case.T))
    elif case.mask == "lengths":
        seen = case.T * max(1, case.S // 2)
    else:
        seen = case.T * case.S
    return case.B * (case.N or 1) * seen
