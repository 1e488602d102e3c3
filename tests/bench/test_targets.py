"""Verdicts from known numbers."""

import pytest

from regard.bench.measure import Row
from regard.bench.targets import TARGETS, Target, judge
from regard.bench.timing import Timing


def row(case, who, ms=None, mib=None, absent=None):
    return Row(
        case,
        who,
        timing=None if ms is None else Timing((ms / 1e3,) * 3),
        temp_bytes=None if mib is None else round(mib * 2**20),
        absent=absent,
    )


FASTER = Target("faster", ("case", "book"), ("case", "regard"), 4.0, at_least=True)
CHEAPER = Target("cheaper", ("causal", "regard"), ("case", "regard"), 0.65, at_least=False)
SMALL = Target("small", ("case", "regard"), None, 1024.0, at_least=False, measure="memory")


@pytest.mark.parametrize(
    ("target", "rows", "measured", "outcome"),
    [
        (FASTER, [row("case", "book", 80), row("case", "regard", 20)], 4.0, "reached"),
        (FASTER, [row("case", "book", 70), row("case", "regard", 20)], 3.5, "short"),
        (CHEAPER, [row("causal", "regard", 50), row("case", "regard", 100)], 0.5, "reached"),
        (CHEAPER, [row("causal", "regard", 80), row("case", "regard", 100)], 0.8, "short"),
        (SMALL, [row("case", "regard", mib=512)], 512.0, "reached"),
        (SMALL, [row("case", "regard", mib=2048)], 2048.0, "short"),
        (FASTER, [row("case", "regard", 20)], None, "not measured"),
        (FASTER, [row("case", "book", 80)], None, "not measured"),
        (
            FASTER,
            [row("case", "book", absent="not installed"), row("case", "regard", 20)],
            None,
            "not measured",
        ),
        (SMALL, [row("case", "regard", ms=1)], None, "not measured"),
    ],
)
def test_verdict(target, rows, measured, outcome):
    (verdict,) = judge(rows, [target])
    assert verdict.outcome == outcome
    assert verdict.measured == (None if measured is None else pytest.approx(measured))


def test_the_promises_are_those_of_the_design():
    goals = {(t.over, t.under): t.goal for t in TARGETS}

    def against(case, who):
        return goals[(case, who), (case, "regard")]

    for suffix in ("", "_backward"):
        assert against(f"additive_book_1e-3{suffix}", "book") == "≥ 4×"
        assert against(f"additive_book{suffix}", "book") == "≥ 2×"
        assert against(f"dot_heads{suffix}", "jax.nn") == "≥ 2.5×"
        assert against(f"dot_heads{suffix}", "torch") == "≥ 0.9×"
    assert goals[("causal_4096", "regard"), ("full_4096", "regard")] == "≤ 0.65×"
    assert goals[("additive_guard", "lift"), ("additive_guard", "unguarded")] == "≤ 1.05×"
    assert goals[("memory_16384", "regard"), None] == "≤ 1024 MiB"


def test_a_verdict_tells_the_noise_of_its_loop():
    rows = [
        Row("case", "regard", group="one", timing=Timing((0.020,))),
        Row("case", "regard again", group="one", timing=Timing((0.019,))),
        Row("case", "book", group="one", timing=Timing((0.1,))),
        Row("other", "regard", group="two", timing=Timing((0.020,))),
        Row("other", "regard again", group="two", timing=Timing((0.010,))),
    ]
    (verdict,) = judge(rows, [FASTER])
    assert verdict.noise == pytest.approx(0.05)
