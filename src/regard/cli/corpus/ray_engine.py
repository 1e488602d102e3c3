"""Translates runs of lines on a Ray cluster, by Ray Data.

Each worker is an actor that loads the model once. Ray places the workers, sends the lines and the
model's files to them, starts a worker that died again and repeats what it had not finished. The
machines of the cluster need regard installed, but share no file system.
"""

import contextlib
import logging
import os
import socket
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from regard.cli.corpus.corpus_files import Run
from regard.cli.corpus.run_translator import Request, RunTranslator
from regard.seq2seq.model.model_folder import FILES, model_folder

WORKER_MEMORY = 1 << 30  # bytes; two thirds of it are compiled programs


def translate_on_ray(
    runs: Iterable[Run], lines: int, request: Request, address: str | None
) -> Iterator[tuple[int, str]]:
    """Translates runs of lines on all CPUs of a Ray cluster, or on all its GPUs if it has some.

    Args:
        runs: the runs; they wait in Ray's object store, which moves them to the disk when it is
            full.
        lines: how many lines there are in all.
        request: model and options.
        address: of the cluster; None: the one in RAY_ADDRESS, or else this machine alone.

    Yields:
        The index of a run and its translation, in the order in which they are finished.

    Raises:
        ValueError: the cluster cannot be reached, or a translation failed.
    """
    _check_address(address or os.environ.get("RAY_ADDRESS"))
    ray = _import_ray()
    started_here = not ray.is_initialized()
    try:
        if started_here:
            with _quiet_stderr():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        yield from _translations(ray, runs, lines, request)
    except (ConnectionError, ray.exceptions.RayError) as error:
        reason = str(getattr(error, "cause", None) or error).strip().splitlines()
        raise ValueError(f"translation on the Ray cluster failed: {reason[-1]}") from error
    finally:
        if started_here:
            ray.shutdown()


class _Worker:
    """A `RunTranslator` for batches of one run, as Ray Data calls it."""

    def __init__(self, files: dict[str, bytes], request: Request, lines: int) -> None:
        # One worker per CPU: without this, each would compute on all of them.
        os.environ.setdefault("NPROC", "1")
        with tempfile.TemporaryDirectory() as folder:
            for name, data in files.items():
                Path(folder, name).write_bytes(data)
            self.translate = RunTranslator(replace(request, model=Path(folder)), lines)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        index, first = (int(batch[name][0]) for name in ("index", "first"))
        run = Run(index, first, [str(line) for line in batch["lines"][0]])
        return {"index": [index], "text": [self.translate(run)]}


def _translations(
    ray: Any, runs: Iterable[Run], lines: int, request: Request
) -> Iterator[tuple[int, str]]:
    import pyarrow as pa

    schema = pa.schema(
        [("index", pa.int64()), ("first", pa.int64()), ("lines", pa.list_(pa.string()))]
    )
    blocks = [
        ray.put(pa.table([[run.index], [run.first], [run.lines]], schema=schema)) for run in runs
    ]
    resources = ray.cluster_resources()
    unit = "GPU" if resources.get("GPU") else "CPU"
    ray.data.DataContext.get_current().enable_progress_bars = False
    found = model_folder(request.model)
    translated = ray.data.from_arrow_refs(blocks).map_batches(
        _Worker,
        fn_constructor_args=({name: (found / name).read_bytes() for name in FILES}, request, lines),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(
            min_size=1, max_size=max(1, min(int(resources.get(unit, 1)), len(blocks)))
        ),
        memory=WORKER_MEMORY,
        **{f"num_{unit.lower()}s": 1},
    )
    for row in translated.iter_rows():
        yield int(row["index"]), str(row["text"])


def _check_address(address: str | None) -> None:
    """Raises ValueError where no cluster answers: Ray itself would try for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return  # such as "auto"
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise ValueError(
            f"no Ray cluster answers at {address} ({error.strerror or error}). Fix: ray start "
            "--head on one machine, and the address that it prints."
        ) from None


def _import_ray() -> Any:
    # Before Ray is imported: no report of its use is sent, and its core, which writes to stderr
    # past Python, says only what ends the program.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    import ray
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    return ray


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Discards what is written to stderr, by Ray's core too: it announces its log level there."""
    with open(os.devnull, "w") as nowhere:
        kept = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
