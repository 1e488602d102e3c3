"""The benchmark: named cases, this library and its peers, ratios of one run.

`regard bench` and `python -m regard.bench` run it. In the order of the data: `cases` (what is
computed: `case`, the `tables` of cases, the `expected` float64 answers), `peers` (what computes it:
`jax_peers`, `torch_peers`, and the wide kernel alone in `kernels`, each as a `program`), `run`
(`timing` is the interleaved loop; `measure` runs a group of cases; `processes` does so with one
process for each framework, on a GPU), `results` (`targets` are the promises; `record` the JSON;
`report` the terminal; `pictures` the figures). `report` needs Rich and `pictures` Matplotlib.
"""

from regard.bench.cases.case import Case, Inputs, make_inputs, select
from regard.bench.cases.tables import CPU_CASES, GPU_CASES
from regard.bench.results.targets import CPU_TARGETS, GPU_TARGETS, Target, Verdict, judge
from regard.bench.run.measure import Row, Settings, measure_cases
from regard.bench.run.processes import measure_in_processes
from regard.bench.run.timing import DeviceClock, Timing, interleave

__all__ = [
    "CPU_CASES",
    "GPU_CASES",
    "Case",
    "Inputs",
    "make_inputs",
    "select",
    "DeviceClock",
    "Timing",
    "interleave",
    "Row",
    "Settings",
    "measure_cases",
    "measure_in_processes",
    "CPU_TARGETS",
    "GPU_TARGETS",
    "Target",
    "Verdict",
    "judge",
]
