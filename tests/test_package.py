"""What holds for the package as a whole: which way its imports point, what is public, what is said
about its version, and what it needs."""

import ast
import importlib.metadata
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax.numpy as jnp
import jaxtyping
import pytest

import regard

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "regard"

# From the bottom up: a module imports from its own layer and from those below it. The names are
# those of regard's modules and subpackages; "regard" is the public front, regard/__init__.py.
LAYERS = (
    {
        "score",
        "mask",
        "normalize",
        "dropout",
        "shapes",
        "placement",
        "atomic_file",
        "versioned_json",
    },
    {"pool", "memory"},
    {"front_door"},
    {"attend", "weights", "summary"},
    {"regard"},
    {"modules", "nnx", "linen", "interop"},
    {"seq2seq"},
    {"show"},
    {"d2l", "bench", "cli", "playground"},
)
HEIGHT = {part: height for height, layer in enumerate(LAYERS) for part in layer}

# What `import regard` may need; every other package is an extra.
REQUIRED = {"jax", "numpy", "jaxtyping"}
CORE = [part for layer in LAYERS[:5] for part in layer]

EXTRAS = "flax keras equinox torch typer rich matplotlib optax orbax starlette uvicorn tokenizers"


def module_name(path: Path) -> str:
    """The import name of a file of the package: regard.score.dot, say."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    """The name that stands for a module in LAYERS: "score" for regard.score.dot."""
    return module.split(".")[1] if "." in module else module


def imports(source: str, package: str) -> set[str]:
    """Every name that a source text imports, anywhere in it, as an absolute dotted name.

    `from a import b` counts as `a.b`: whether b is a module of a or a name in it, a is left
    standing as the beginning.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(relative, package)
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def parts_imported(source: str, package: str) -> set[str]:
    """The parts of regard that a source text imports, by their names in LAYERS."""
    ours = [name for name in imports(source, package) if name.split(".")[0] == "regard"]
    # `from regard import Dot` imports the front; `from regard import mask`, the part.
    return {part_of(name) if part_of(name) in HEIGHT else "regard" for name in ours}


def package_of(module: str) -> str:
    """What a relative import in a module starts from: a package is its own."""
    is_package = MODULES[module].name == "__init__.py"
    return module if is_package else module.rpartition(".")[0]


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module):
    importer = part_of(module)
    assert importer in HEIGHT, f"{module} has no layer yet: give {importer} one in LAYERS"
    imported = parts_imported(MODULES[module].read_text(), package_of(module))
    above = {part for part in imported if HEIGHT[part] > HEIGHT[importer]}
    assert not above, f"{module} imports from a layer above its own: {sorted(above)}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import regard", {"regard"}),
        ("import regard.attend as a", {"attend"}),
        ("from regard import Dot", {"regard"}),
        ("from regard import cli, pool", {"cli", "pool"}),
        ("from regard.score.dot import Dot", {"score"}),
        ("from . import reference", {"pool"}),
        ("from .reference import pool", {"pool"}),
        ("from ..score import Dot", {"score"}),
        ("def later():\n    from regard import bench", {"bench"}),
        ("import jax\nfrom regardless import x", set()),
    ],
)
def test_no_form_of_import_is_overlooked(source, expected):
    assert parts_imported(source, "regard.pool") == expected


def test_the_core_imports_only_what_it_requires():
    outside = {
        name.split(".")[0]
        for module, path in MODULES.items()
        if part_of(module) in CORE
        for name in imports(path.read_text(), package_of(module))
    }
    assert outside - set(sys.stdlib_module_names) - {"regard"} <= REQUIRED


def test_importing_regard_needs_no_extra():
    """In a process where every extra is missing: not even jax may pull one in for us."""
    code = f"""
        import sys
        for extra in {EXTRAS.split()}:
            sys.modules[extra] = None  # now `import extra` is a ModuleNotFoundError
        import regard
        missing = [name for name in regard.__all__ if not hasattr(regard, name)]
        assert not missing, missing
    """
    done = run_python(inspect.cleandoc(code))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("argv", "missing", "pip"),
    [
        ([], "typer", 'pip install "regard[cli]"'),
        (["tour"], "rich", 'pip install "regard[cli]"'),
        (["demo"], "rich", 'pip install "regard[translate]"'),
        (["serve"], "rich", 'pip install "regard[serve]"'),
        (["bench"], "typer", 'pip install "regard[bench]"'),
    ],
)
def test_the_command_answers_with_the_pip_command(argv, missing, pip):
    code = f"""
        import sys
        sys.argv = ["regard", *{argv}]
        sys.modules[{missing!r}] = None
        from regard.cli import main
        main()
    """
    done = run_python(inspect.cleandoc(code))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        f"The regard command needs {missing}, which is not installed.",
        f"Install it with: {pip}",
    ]


def run_python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_all_is_what_is_public():
    public = {
        name
        for name, value in vars(regard).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert sorted(regard.__all__) == sorted(public)


@pytest.mark.parametrize("name", regard.__all__)
def test_every_public_name_has_an_example(name):
    docstring = getattr(regard, name).__doc__ or ""
    assert ">>> " in docstring, f"regard.{name} needs an example that runs in its docstring"


@pytest.mark.parametrize("name", ["Mask", "Score"])
def test_what_a_user_calls_or_overrides_has_a_docstring(name):
    members = vars(getattr(regard, name))
    bare = [m for m, v in members.items() if not m.startswith("_") and not inspect.getdoc(v)]
    assert not bare, f"{name}: without a docstring are {bare}"


def test_version_and_changelog_agree():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    first = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert regard.__version__ == declared
    assert importlib.metadata.version("regard") == declared, "stale install: run make again"
    assert first is not None
    assert first.group(1) == declared


def test_the_citation_names_this_version():
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert cited is not None
    assert cited.group(1) == declared["version"]
    assert f"\nlicense: {declared['license']}\n" in (ROOT / "CITATION.cff").read_text()


def test_a_users_file_passes_the_type_checker():
    """As in an installed package: py.typed is there, and only the user's own lines count."""
    assert (PACKAGE / "py.typed").is_file()
    options = ["--strict", "--follow-imports=silent", "--config-file="]
    cache = f"--cache-dir={ROOT / '.mypy_cache' / 'user'}"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, cache, ROOT / "tests" / "typed_user.py"],
        env=os.environ | {"MYPYPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_is_pickled():
    """A model or a corpus from elsewhere must not be able to run code."""
    unsafe = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    for module, path in MODULES.items():
        source = path.read_text()
        found = {name.split(".")[0] for name in imports(source, package_of(module))}
        assert not found & unsafe, f"{module} imports {sorted(found & unsafe)}"
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                refused = isinstance(node.value, ast.Constant) and node.value.value is False
                assert refused, f"{module}, line {node.value.lineno}: allow_pickle"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), f"{module}, line {node.lineno}"


def test_the_stated_minimum_versions_agree():
    """The README and the workflow name the oldest Python and JAX; pyproject.toml decides."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python = project["requires-python"].removeprefix(">=")
    (jax,) = [d.removeprefix("jax>=") for d in project["dependencies"] if d.startswith("jax>=")]
    assert f"Python {python} or newer and JAX {jax} or newer" in (ROOT / "README.md").read_text()
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    assert f'python: "{python}", jax: "jax=={jax}"' in workflow


def test_shapes_in_signatures_are_checked():
    """conftest.py's import hook is at work: a wrong shape does not get past a signature."""
    rows = jnp.zeros((3, 4), jnp.float32)
    with pytest.raises(jaxtyping.TypeCheckError, match="inputs"):
        regard.score.contract.project(rows[0], rows)
