"""The benchmark: named cases, this library and its peers, ratios of one run.

`regard bench` and `python -m regard.bench` run it. The steps, one file each: `cases` (what is
computed), `expected` (the float64 answers), `peers` (who computes it, as `program`s), `timing`
(the interleaved loop), `measure` (all of that together), `targets` (what is promised), `record`
(JSON), `report` (the terminal) and `plot` (the picture). `report` needs Rich and `plot`
matplotlib; the others need what regard needs.
"""

from regard.bench.cases import CASES, Case, Inputs, make_inputs, select
from regard.bench.measure import Row, Settings, measure_cases
from regard.bench.targets import TARGETS, Target, Verdict, judge
from regard.bench.timing import Timing, interleave

__all__ = [
    "CASES",
    "Case",
    "Inputs",
    "make_inputs",
    "select",
    "Timing",
    "interleave",
    "Row",
    "Settings",
    "measure_cases",
    "TARGETS",
    "Target",
    "Verdict",
    "judge",
]
