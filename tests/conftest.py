"""How every test runs: JAX as strict as it gets, float64 at hand, shapes checked at run time.

The docstring examples do not run under this file (see `make doctest`): they must hold in a
reader's session, with JAX's own defaults.
"""

import collections
import gc
import os
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")  # before anything imports Keras
# Fits of 24 columns: threads only wait. For the workers of -n; a plain pytest has loaded NumPy by
# now, with jaxtyping's plugin.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# On a GPU, each worker of -n takes the memory that it needs, and not three quarters of all.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import hypothesis
import jax
import jaxtyping
import pytest
from jax.experimental.compilation_cache import compilation_cache

# float64 arrays exist in every test, so a test names its dtypes; what regard makes of float32 is
# then known not to lean on the default. No silent widening, no silent broadcasting across ranks.
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The shape-typed signatures of regard are enforced here and only here. Before its first import.
jaxtyping.install_import_hook("regard", "shape_types.check_shapes")

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=25)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

ON_GPU = jax.default_backend() == "gpu"
if ON_GPU:  # float32 against an oracle: not TF32, JAX's default there (test_precision.py has that)
    jax.config.update("jax_default_matmul_precision", "highest")


def pytest_addoption(parser):
    parser.addoption("--most", type=int, help="cases of each test in a module marked sampled(n)")


LEFT_OUT = pytest.StashKey[collections.Counter[str]]()  # how many tests, by reason


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(config, items):
    """Leave out what cannot run here, rather than to skip it case by case. Of a parametrized test
    in a module that is marked `sampled`, mark all but a few cases, evenly spaced, as slow.
    """
    reasons = {item: reason for item in items if (reason := _why_not(item))}
    if reasons:
        config.hook.pytest_deselected(items=list(reasons))
        items[:] = [item for item in items if item not in reasons]
    config.stash[LEFT_OUT] = collections.Counter(reasons.values())
    if hasattr(config, "workeroutput"):  # of a worker of xdist; it reaches the terminal below
        config.workeroutput["left_out"] = dict(config.stash[LEFT_OUT])
    tests = collections.defaultdict(list)
    for item in items:
        if "sampled" in item.keywords and hasattr(item, "callspec") and item.cls is None:
            tests[item.path, item.originalname].append(item)  # classes: see cases.tiered
    for cases in tests.values():
        most = config.getoption("--most") or cases[0].get_closest_marker("sampled").args[0]
        kept = {round(i * (len(cases) - 1) / max(most - 1, 1)) for i in range(most)}
        for i, item in enumerate(cases):
            if i not in kept:
                item.add_marker(pytest.mark.slow)


def _why_not(item):
    """Why a test cannot run here, where its marks say so; on a GPU, a `gpu` test has to."""
    if "gpu" in item.keywords:
        return None if ON_GPU else "needs a GPU"
    conditions = ((mark.args[0], mark.kwargs["reason"]) for mark in item.iter_markers("skipif"))
    return next((reason for holds, reason in conditions if holds), None)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Every worker of xdist collects all tests: what one left out, all did."""
    node.config.stash[LEFT_OUT] = collections.Counter(
        getattr(node, "workeroutput", {}).get("left_out")
    )


def pytest_terminal_summary(terminalreporter, config):
    for reason, count in config.stash.get(LEFT_OUT, {}).items():
        terminalreporter.write_line(f"left out: {count} tests ({reason})")


@pytest.fixture(scope="session", autouse=True)
def programs_are_kept(request, tmp_path_factory):
    """Compiled programs are kept as files: a program that two tests or two runs have in common is
    compiled once. On a CPU in `.pytest_cache`, where `make clean` and --cache-clear remove them; on
    a GPU, where the compiler also chooses by timing, for this session only.
    """
    kept = getattr(request.config, "cache", None)
    if kept is None or ON_GPU:
        folder = tmp_path_factory.mktemp("programs")
    else:
        folder = kept.mkdir("programs")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # JAX decided at its first compilation


@pytest.fixture(scope="module")
def programs_not_kept(programs_are_kept):
    """For modules that watch which files are written."""
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()


MOST_MAPS = 20_000  # of memory; Linux allows a process 65,530


@pytest.fixture(scope="module", autouse=True)
def programs_are_dropped_in_time():
    """A compiled program of a CPU takes some twenty memory maps, and a worker compiles thousands:
    past the limit of Linux, XLA's compiler crashes.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module")
def quick_compilation():
    """On a CPU, programs are compiled without LLVM's optimizations, a third to half of the time.

    For modules whose programs run for milliseconds and are not about rounding: kernels in interpret
    mode, front ends, transformations, models of eight words. XLA's own passes are all there. The
    contracts of scores and backends (score/, pool/test_every_backend.py, test_properties.py) are
    asked of the code that users get; on a GPU, everything is.
    """
    jax.config.update("jax_disable_most_optimizations", not ON_GPU)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """With a GPU, a `gpu` test that skips itself fails: a kernel that is not run is not tested."""
    report = yield
    if ON_GPU and report.skipped and "gpu" in item.keywords:
        report.outcome = "failed"
        report.longrepr = f"skipped on a GPU, where it has to run: {report.longrepr}"
    return report
