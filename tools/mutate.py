"""Mutation testing of the core: break a file in one place, and see whether the tests notice.

    python tools/mutate.py mask normalize blockwise [--sample 60] [--seed 0]

Each mutant changes one thing in one file: a comparison, an operator, a constant, a condition, or
a statement that is left out. Error messages, docstrings and annotations are not mutated: what an
error says has tests of its own, by text. A copy of the repository is mutated, never the
repository. Each mutant is tried in a fork of a process that has imported JAX already, and programs
that a mutant does not change come from JAX's cache of compiled ones.
"""

import argparse
import ast
import copy
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The tests of each file in stages, the quickest first: a mutant goes on to the next stage only
# where nobody has noticed it yet.
CONTRACT = "test_equals_the_oracle and blockwise and"
TARGETS = {
    "mask": (
        "src/regard/mask/canonical.py",
        [
            ["tests/test_mask_by_definition.py"],
            ["tests/test_mask_algebra.py", "tests/test_mask.py"],
        ],
    ),
    "allowed": (
        "src/regard/mask/allowed.py",
        [
            ["tests/test_mask_by_definition.py"],
            ["tests/test_mask_algebra.py", "tests/test_mask.py"],
        ],
    ),
    "normalize": (
        "src/regard/normalize/kernel.py",
        [["tests/test_normalize_by_tiles.py"], ["tests/test_normalize.py"]],
    ),
    "blockwise": (
        "src/regard/pool/blockwise.py",
        [
            ["tests/pool/test_every_backend.py", "-k", f"{CONTRACT} (everything or window)"],
            ["tests/score/test_every_score.py", "-k", f"{CONTRACT} additive"],
            ["tests/pool/test_every_backend.py", "-k", f"{CONTRACT} (float64 or bias)"],
            ["tests/test_summary.py"],
            ["tests/test_dropout.py"],
        ],
    ),
}
CPU_SECONDS = 240  # a mutant may run so long; an endless loop is one that was noticed


@dataclass(frozen=True)
class Mutant:
    """One change: its line, what stood there, and what stands there now."""

    line: int
    before: str
    after: str
    index: int  # among the mutants of its file


# ---------------------------------------------------------------------------------------------
# The operators.

COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Pow: ast.Mult,
}


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """What a node may be changed into."""
    new = copy.deepcopy(node)
    if isinstance(new, ast.Compare) and type(new.ops[0]) in COMPARISONS:
        new.ops[0] = COMPARISONS[type(new.ops[0])]()
        yield new
    elif isinstance(new, ast.BinOp) and type(new.op) in OPERATORS:
        new.op = OPERATORS[type(new.op)]()
        yield new
    elif isinstance(new, ast.BoolOp):
        new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
        yield new
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, (ast.Not, ast.USub, ast.Invert)):
        yield new.operand
    elif isinstance(new, ast.Constant) and isinstance(new.value, bool):
        yield ast.Constant(not new.value)
    elif isinstance(new, ast.Constant) and isinstance(new.value, (int, float)):
        yield ast.Constant(new.value + 1)
        yield ast.Constant(new.value - 1)
    elif isinstance(new, (ast.If, ast.IfExp)):
        new.test = ast.UnaryOp(ast.Not(), new.test)
        yield new
    elif isinstance(new, ast.Return) and new.value is not None:
        yield ast.Return(None)
    elif isinstance(new, (ast.Assign, ast.AugAssign, ast.Expr, ast.Raise)):
        yield ast.Pass()


def places(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Every (parent, field, index) that may be mutated, in the order of the text."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "bases", "exc", "keywords_only"):
            continue
        children = value if isinstance(value, list) else [value]
        for index, child in enumerate(children):
            if not isinstance(child, ast.AST) or _is_said(child):
                continue
            yield tree, name, index if isinstance(value, list) else None
            yield from places(child)


def _is_said(node: ast.AST) -> bool:
    """Imports, docstrings, texts, type aliases: nothing that computes."""
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.JoinedStr)):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.AnnAssign) and node.value is None:
        return True
    # A type alias, and the body of a method that a subclass has to write.
    alias = isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript)
    if alias and isinstance(node.value.value, ast.Name):
        return node.value.value.id in ("Callable", "tuple")
    return isinstance(node, ast.Raise) and ast.unparse(node) == "raise NotImplementedError"


def mutants(source: str) -> Iterator[tuple[Mutant, str]]:
    """Every mutant of a file, with the whole text it makes."""
    tree = ast.parse(source)
    count = 0
    for parent, name, index in list(places(tree)):
        held = getattr(parent, name)
        node = held if index is None else held[index]
        for new in variants(node):
            ast.copy_location(new, node)
            if index is None:
                setattr(parent, name, new)
            else:
                held[index] = new
            text = ast.unparse(ast.fix_missing_locations(tree))
            line = getattr(node, "lineno", 0)
            yield Mutant(line, _short(node), _short(new), count), text
            count += 1
        if index is None:
            setattr(parent, name, node)
        else:
            held[index] = node


def _short(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(node)).splitlines()[0][:100]


# ---------------------------------------------------------------------------------------------
# Trying them.


def noticed(tree: Path, stages: list[list[str]], log: Path) -> tuple[bool, str]:
    """Whether the tests of the mutated tree fail, and how it ended."""
    for tests in stages:
        failed, how = _fails(tree, tests, log)
        if failed:
            return True, how
    return False, "SURVIVED"


def _fails(tree: Path, tests: list[str], log: Path) -> tuple[bool, str]:
    """In a fork, so that what it imports is gone afterwards."""
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
            file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os.chdir(tree)
            import pytest

            options = [
                "-x",
                "-q",
                "--no-header",
                "-p",
                "no:cacheprovider",
                "-W",
                "ignore::pytest.PytestAssertRewriteWarning",
            ]
            code = int(pytest.main([*tests, *options]))
        except BaseException:
            traceback.print_exc()
            code = 99
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True, f"signal {signal.Signals(os.WTERMSIG(status)).name}"
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, 1, 2, 99):
        raise RuntimeError(f"pytest ended with {code}: see {log}")
    return code != 0, {0: "passed", 1: "failed"}.get(code, "did not load")


def mutate(name: str, sample: int, seed: int, only: list[int] | None) -> dict:
    """Tries a sample of one file's mutants."""
    path, stages = TARGETS[name]
    original = (ROOT / path).read_text(encoding="utf-8")
    everything = list(mutants(original))
    chosen = everything
    if only is not None:
        chosen = [pair for pair in everything if pair[0].index in only]
    elif sample < len(everything):
        chosen = sorted(random.Random(seed).sample(everything, sample), key=lambda m: m[0].index)
    survivors = []
    with tempfile.TemporaryDirectory(prefix=f"mutate-{name}-") as folder:
        tree = Path(folder) / "tree"
        for part in ("src", "tests"):
            shutil.copytree(ROOT / part, tree / part)
        shutil.copy(ROOT / "pyproject.toml", tree)
        sys.path[:0] = [str(tree / "src"), str(tree / "tests")]
        target, log = tree / path, Path(folder) / "log"
        failed, _ = noticed(tree, stages, log)
        if failed:
            sys.exit(f"the tests fail without any mutant:\n{log.read_text()[-3000:]}")
        for number, (mutant, text) in enumerate(chosen, 1):
            target.write_text(text, encoding="utf-8")
            # Times of files are too coarse to tell one mutant's bytecode from the next one's.
            for stale in (target.parent / "__pycache__").glob(f"{target.stem}.*"):
                stale.unlink()
            start = time.monotonic()
            killed, how = noticed(tree, stages, log)
            took = time.monotonic() - start
            if not killed:
                survivors.append(mutant)
            print(
                f"{name} {number}/{len(chosen)} #{mutant.index} line {mutant.line}: {mutant.before}"
                f"  →  {mutant.after}: {how} ({took:.0f} s)",
                flush=True,
            )
    return {
        "file": path,
        "mutants": len(everything),
        "tried": len(chosen),
        "killed": len(chosen) - len(survivors),
        "survivors": [asdict(mutant) for mutant in survivors],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=TARGETS)
    parser.add_argument("--sample", type=int, default=60, help="mutants of each file, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*", help="these mutants, by number")
    options = parser.parse_args()
    # Nothing of regard is imported before a fork, and no JAX backend started.
    with tempfile.TemporaryDirectory(prefix="mutate-cache-") as cache:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
        import beartype  # noqa: F401
        import hypothesis  # noqa: F401
        import jax
        import jax.numpy  # noqa: F401
        import jaxtyping  # noqa: F401
        import pytest  # noqa: F401

        for name in options.names:
            result = mutate(name, options.sample, options.seed, options.only)
            share = result["killed"] / max(result["tried"], 1)
            print(json.dumps(result, indent=1))
            print(f"{result['file']}: {result['killed']} of {result['tried']} killed ({share:.0%})")


if __name__ == "__main__":
    main()
