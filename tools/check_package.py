"""Builds the package and tries it where nothing else is installed: `make package`.

Builds sdist and wheel (the wheel from the sdist, so that the sdist is known to be whole), checks
their contents, metadata and citation, and installs the wheel into a fresh environment for each
Python that is here, with its declared dependencies and no more. Needs an index to install from;
uses the standard library only.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
TOOLS = ("build>=1.2", "twine>=6.0", "cffconvert>=2.0")
MEGABYTES = 20  # a wheel may have, at most
SENTENCE = "Where is the library?"

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^print\(.*\) *# (.*)$", re.MULTILINE)


class Failed(Exception):
    """A check did not hold; the message says which and how."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", nargs="*", default=PYTHONS, help="minor versions to try")
    parser.add_argument("--keep", type=Path, help="copy wheel and sdist into this folder")
    options = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="regard-package-") as folder:
        try:
            check(Path(folder), options.python, options.keep)
        except Failed as failure:
            sys.exit(f"FAILED: {failure}")
    print(f"the package is ready to publish ({time.monotonic() - start:.0f} s)")


def check(folder: Path, minors: list[str], keep: Path | None) -> None:
    tools = make_environment(sys.executable, folder / "tools")
    run(tools, "-m", "pip", "install", "-q", *TOOLS)
    run(tools, "-m", "build", "--outdir", folder / "dist", ROOT)
    (wheel,) = (folder / "dist").glob("*.whl")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    check_contents(wheel, sdist)
    run(tools, "-m", "twine", "check", "--strict", wheel, sdist)
    run(Path(tools).with_name("cffconvert"), "--validate", cwd=ROOT)
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB; metadata and citation are valid")
    tried = 0
    for minor in minors:
        python = find_python(minor)
        if python is None:
            print(f"Python {minor}: NOT TRIED, there is none here")
            continue
        begun = time.monotonic()
        try_wheel(python, wheel, folder / minor)
        tried += 1
        print(f"Python {minor}: installs, attends, translates ({time.monotonic() - begun:.0f} s)")
    if not tried:
        raise Failed(f"none of Python {', '.join(minors)} is here: the wheel was never installed")
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        for made in (wheel, sdist):
            shutil.copy(made, keep)


def check_contents(wheel: Path, sdist: Path) -> None:
    """The wheel has every file of src/regard and nothing else; the sdist what a packager needs."""
    if wheel.stat().st_size > MEGABYTES * 1e6:
        raise Failed(f"{wheel.name} has {wheel.stat().st_size / 1e6:.1f} MB, over {MEGABYTES}")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    tracked = {
        path.relative_to(source).as_posix()
        for path in (source / "regard").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    if packed != tracked:
        raise Failed(f"wheel and src/regard differ in {sorted(packed ^ tracked)[:10]}")
    if "regard/py.typed" not in packed:
        raise Failed("the wheel has no py.typed: type checkers would pass over it")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = ("README.md", "CHANGELOG.md", "LICENSE", "CITATION.cff", "tests/oracle.py", "Makefile")
    missing = [name for name in wanted if name not in names]
    if missing:
        raise Failed(f"the sdist lacks {', '.join(missing)}")


def try_wheel(python: str, wheel: Path, folder: Path) -> None:
    """Installs the wheel bare, then with one extra after the other, and uses what each brings."""
    python = make_environment(python, folder)
    regard = Path(python).with_name("regard")

    run(python, "-m", "pip", "install", "-q", wheel)
    told = run(regard, "doctor", expected=1)
    if 'pip install "regard[cli]"' not in told:
        raise Failed(f"without its extra, the command answers: {told}")
    readme = BLOCK.search((ROOT / "README.md").read_text(encoding="utf-8"))
    if readme is None:
        raise Failed("README.md has no block of Python")
    printed = run(python, "-W", "error", "-c", readme[1], cwd=folder)
    if printed.split("\n")[:-1] != PRINTED.findall(readme[1]):
        raise Failed(f"the README's first block prints something else:\n{printed}")

    run(python, "-m", "pip", "install", "-q", f"{wheel}[cli]")
    run(regard, "--version", cwd=folder)
    run(regard, "doctor", cwd=folder)

    run(python, "-m", "pip", "install", "-q", f"{wheel}[translate]")
    french = run(regard, "translate", "--no-cache", SENTENCE, cwd=folder).strip()
    if not french or french == SENTENCE or "\n" in french:
        raise Failed(f"{SENTENCE!r} was translated as {french!r}")
    run(python, "-m", "pip", "check")
    print(f"  {SENTENCE} → {french}")


def make_environment(python: str, folder: Path) -> str:
    """A fresh virtual environment; the path of its Python."""
    run(python, "-m", "venv", folder)
    return str(folder / "bin" / "python")


def find_python(minor: str) -> str | None:
    """A Python of this minor version that can make environments.

    A pyenv shim is on the PATH even where its version is switched off, so each candidate has to
    run.
    """
    candidates = [shutil.which(f"python{minor}")]
    if shutil.which("pyenv"):
        listed = subprocess.run(["pyenv", "versions", "--bare"], capture_output=True, text=True)
        for version in listed.stdout.split():
            if version.startswith(f"{minor}."):
                prefix = subprocess.run(
                    ["pyenv", "prefix", version], capture_output=True, text=True
                )
                candidates.append(f"{prefix.stdout.strip()}/bin/python")
    for candidate in candidates:
        if candidate is None:
            continue
        test = f"import ensurepip, sys, venv; assert '%d.%d' % sys.version_info[:2] == '{minor}'"
        try:
            tried = subprocess.run([candidate, "-c", test], capture_output=True)
        except OSError:
            continue
        if tried.returncode == 0:
            return candidate
    return None


def run(*command: str | Path, cwd: Path | None = None, expected: int = 0) -> str:
    """Runs a command without this process's Python settings; its output, both streams."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if expected == 0 else subprocess.STDOUT,
        text=True,
    )
    if done.returncode != expected:
        said = f"{done.stdout}\n{done.stderr or ''}".strip()
        raise Failed(f"{' '.join(map(str, command))[:200]} ended with {done.returncode}:\n{said}")
    return done.stdout


if __name__ == "__main__":
    main()
