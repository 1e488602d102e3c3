"""Fits the sine series of the additive lift's defaults: `python tools/fit_sine_series.py`.

Writes src/regard/score/sine_series.npz, which the package reads instead of fitting. A table for
each default tolerance and each range that `design_limit` asks for; others are fitted when they are
needed. A few minutes on one core.
"""

import sys
import time

import numpy as np

from regard.score import sine_series
from regard.score.additive import DEFAULT_TOLERANCE, LARGEST_LIMIT, LEAST_LIMIT


def main() -> None:
    limits = np.arange(LEAST_LIMIT, LARGEST_LIMIT + 0.1, 0.25)
    tables = {}
    for tolerance in sorted(DEFAULT_TOLERANCE.values()):
        began = time.monotonic()
        for limit in limits:
            table = sine_series.SeriesTable.fit(tolerance, float(limit))
            name = sine_series.table_name(tolerance, float(limit))
            tables[name] = np.vstack([table.limits, table.frequency, table.coefficients])
        seconds = time.monotonic() - began
        print(f"{tolerance:g}: {len(limits)} tables, {seconds:.0f} s", file=sys.stderr)
    path = f"src/regard/score/{sine_series.STORED}"
    np.savez_compressed(path, **tables)
    print(path)


if __name__ == "__main__":
    main()
