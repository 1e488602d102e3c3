"""The benchmark: named cases, this library and its peers, ratios of one run.

`regard bench` and `python -m regard.bench` run it. The steps, a file or two each: `cases` with
`cpu_table` and `gpu_table` (what is computed), `expected` (the float64 answers), `peers`,
`torch_peers` and `kernels` (who computes it, as `program`s), `timing` (the interleaved loop),
`measure` (all of that together), `processes` and `worker` (the same with a process for each
framework, on a GPU), `targets` with `cpu_targets` and `gpu_targets` (what is promised), `record`
(JSON), `report` (the terminal), `plot` and `bars` (the pictures). `tune` finds block shapes for
the wide kernel. `report` needs Rich and the pictures matplotlib; the others need what regard needs.
"""

from regard.bench.cases.case import Case, Inputs, make_inputs, select
from regard.bench.cases.cpu_table import CPU_CASES
from regard.bench.cases.gpu_table import GPU_CASES
from regard.bench.results.cpu_targets import CPU_TARGETS
from regard.bench.results.gpu_targets import GPU_TARGETS
from regard.bench.results.targets import Target, Verdict, judge
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
