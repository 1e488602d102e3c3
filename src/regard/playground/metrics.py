"""Counters of the server, in the text that Prometheus reads."""

import threading
from collections import defaultdict

BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    """Counts requests, sentences and seconds.

    Example:
        >>> metrics = Metrics()
        >>> metrics.request("/healthz", 200, 0.003)
        >>> print(metrics.text().splitlines()[2])
        regard_requests_total{path="/healthz",status="200"} 1
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[tuple[str, int], int] = defaultdict(int)
        self._seconds: dict[str, list[float]] = {}
        self._batches = self._sentences = 0
        self._batch_seconds = 0.0

    def request(self, path: str, status: int, seconds: float) -> None:
        """One request was answered."""
        with self._lock:
            self._requests[path, status] += 1
            row = self._seconds.setdefault(path, [0.0] * (len(BOUNDS) + 2))
            for place, bound in enumerate(BOUNDS):
                row[place] += seconds <= bound
            row[-2] += 1
            row[-1] += seconds

    def batch(self, sentences: int, seconds: float) -> None:
        """One beam search was run."""
        with self._lock:
            self._batches += 1
            self._sentences += sentences
            self._batch_seconds += seconds

    def text(self, waiting: int = 0) -> str:
        """Everything, as /metrics answers it."""
        with self._lock:
            lines = [
                "# HELP regard_requests_total Requests answered.",
                "# TYPE regard_requests_total counter",
            ]
            for (path, status), count in sorted(self._requests.items()):
                lines.append(f'regard_requests_total{{path="{path}",status="{status}"}} {count}')
            lines += [
                "# HELP regard_request_seconds Time to answer.",
                "# TYPE regard_request_seconds histogram",
            ]
            for path, row in sorted(self._seconds.items()):
                bounds = [*map(str, BOUNDS), "+Inf"]
                lines += [
                    f'regard_request_seconds_bucket{{path="{path}",le="{bound}"}} {count:.0f}'
                    for bound, count in zip(bounds, row, strict=False)
                ]
                lines.append(f'regard_request_seconds_sum{{path="{path}"}} {row[-1]!r}')
                lines.append(f'regard_request_seconds_count{{path="{path}"}} {row[-2]:.0f}')
            single = {
                ("regard_batches_total", "counter", "Beam searches run."): self._batches,
                ("regard_sentences_total", "counter", "Sentences translated."): self._sentences,
                (
                    "regard_batch_seconds_total",
                    "counter",
                    "Time spent in beam searches.",
                ): self._batch_seconds,
                ("regard_waiting_sentences", "gauge", "Sentences in the queue."): waiting,
            }
        for (name, kind, help_), value in single.items():
            lines += [f"# HELP {name} {help_}", f"# TYPE {name} {kind}", f"{name} {value!r}"]
        return "\n".join(lines) + "\n"
