"""A corpus, translated by any number of processes that share nothing but the folder of its parts.

Each process reads the whole file and makes the parts that are its own by their number; then it
makes those that nobody is at work on, whosever they are: a process that was killed, or that never
came, costs time and nothing else. It ends when the file is whole. The parts themselves are
parts.py.
"""

import time
from collections.abc import Callable, Iterator

from regard.cli.corpus.corpus_file import CorpusFile, Run
from regard.cli.corpus.resumable_output import Parts
from regard.cli.corpus.which_process import Process

POLL = 0.5  # seconds between two looks at what the others are doing


def run_corpus(
    file: CorpusFile,
    parts: Parts,
    process: Process,
    make: Callable[[Run], str],
    *,
    done: Callable[[Run], None] = lambda run: None,
    waits: Callable[[int], None] = lambda count: None,
) -> bool:
    """Makes parts until there are none left to make, and joins them.

    Args:
        file: what to translate.
        parts: of the translation, one for each run of the file.
        process: which one this is; process i of N begins with the parts i, i + N, i + 2N, ...
        make: a run's translation, its lines ended by "\\n".
        done: called with each run that was made here.
        waits: called, now and then, with the number of parts that others are at work on, where
            nothing else is left.

    Returns:
        Whether this process is the one that joined them.
    """
    wanted = [index for index in parts.missing() if index % process.count == process.number]
    while True:
        for run in _among(file, wanted):
            # Asked twice: the one who had it may have finished between the two questions.
            if not parts.needs(run.index):
                continue
            with parts.claim(run.index) as mine:
                if mine and parts.needs(run.index):
                    parts.write(run.index, make(run))
                    done(run)
        missing = parts.missing()
        if not missing:
            return parts.join()
        wanted = [index for index in missing if parts.is_free(index)]
        if not wanted:
            waits(len(missing))
            time.sleep(POLL)


def _among(file: CorpusFile, wanted: list[int]) -> Iterator[Run]:
    """The runs with some numbers; the file is not read further than it takes."""
    if not wanted:
        return
    among, last = frozenset(wanted), max(wanted)
    for run in file.runs():
        if run.index in among:
            yield run
        if run.index == last:
            return
