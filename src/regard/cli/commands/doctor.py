"""`regard doctor`: what works on this machine, and why the rest does not.

It shows versions, devices, every backend run on a small problem (backend_check.py), the installed
extras, and the bundled model. The exit code is 0 if every backend that accepts a problem solves it
correctly.
"""

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 80
GPU_FIX = 'pip install "jax[cuda12]"'

# For users; `all`, `dev` and `docs` are made of these or are for developers.
EXTRAS = ("cli", "flax", "translate", "show", "serve", "ray", "bench")

_REQUIREMENT = re.compile(
    r"([\w.-]+)(?:\[[\w,-]+\])?\s*>=\s*([\d.]+)\s*;.*extra == ['\"](\w+)['\"]"
)

# Set or not, these change what JAX does.
VARIABLES = ("JAX_PLATFORMS", "JAX_ENABLE_X64", "XLA_FLAGS", "CUDA_VISIBLE_DEVICES")


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Write the findings as JSON.")] = False,
) -> None:
    """Check this installation: versions, devices, and which backends work here."""
    from regard.cli.terminal.waiting import waiting

    with waiting("compiling and running each backend") as wait:
        found = examine()
        with wait.aside():
            _tell(found, as_json)
    if not found["healthy"]:
        raise typer.Exit(1)


def _tell(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(found, indent=1, ensure_ascii=False))
    else:
        from rich.console import Console

        print_findings(found, Console(width=min(WIDTH, Console().width), highlight=False))


def examine() -> dict[str, Any]:
    """All findings, in JSON types."""
    from regard.bench.results import record

    found: dict[str, Any] = {
        "healthy": False,
        "versions": record.versions(),
        "system": f"{platform.system()} {platform.machine()}",
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "devices": [],
        "devices_failure": None,
        "unused_gpu": False,
        "backends": [],
        "first_choice": None,
        "extras": [dataclasses.asdict(one) | {"fix": one.fix} for one in find_extras()],
        "model": _bundled_model(),
    }
    try:
        found["devices"] = _devices()
    except Exception as failure:  # JAX could not start the platform that it is set to
        lines = [type(failure).__name__, *str(failure).strip().splitlines()[:1]]
        found["devices_failure"] = "JAX cannot start: " + ": ".join(lines)
        return found
    platforms = {device["platform"] for device in found["devices"]}
    found["unused_gpu"] = platforms == {"cpu"} and shutil.which("nvidia-smi") is not None
    found["backends"], found["first_choice"] = _backends()
    states = {backend["name"]: backend["state"] for backend in found["backends"]}
    core = states["reference"] == states["blockwise"] == "works"
    found["healthy"] = core and "broken" not in states.values()
    return found


def _devices() -> list[dict[str, Any]]:
    import jax

    from regard.bench.results import record

    named = record.describe_device()
    return [
        {
            "platform": device.platform,
            "name": named["name"] if device.platform == "cpu" else device.device_kind,
            "compute_capability": getattr(device, "compute_capability", None),
        }
        for device in jax.local_devices()
    ]


def _backends() -> tuple[list[dict[str, Any]], str]:
    """The result of each backend, and a row for the Hopper kernel of `pallas`."""
    from regard.cli import backend_check

    tried = backend_check.check_backends()
    rows = [dataclasses.asdict(one) | {"state": one.state} for one in tried]
    pallas = next(row for row in rows if row["name"] == "pallas")
    refusal = backend_check.hopper_refusal()
    hopper = pallas | {"name": "hopper"}
    if refusal is not None:
        hopper |= {"state": "absent", "probes": [], "refusals": {"dot": refusal}}
    return [*rows, hopper], backend_check.first_choice()


def _bundled_model() -> dict[str, Any]:
    """Whether the package contains its translator; the extras decide whether it can run."""
    try:
        from regard.seq2seq.model.model_folder import FILES, model_folder

        folder = model_folder()
    except ModuleNotFoundError as missing:
        return {"present": None, "reason": f"{missing.name} is not installed", "megabytes": None}
    except FileNotFoundError as absent:
        return {"present": False, "reason": str(absent), "megabytes": None}
    megabytes = sum((folder / name).stat().st_size for name in FILES) / 1e6
    return {"present": True, "reason": None, "megabytes": round(megabytes, 1)}


# ---------------------------------------------------------------------------------------------
# The extras, by what the package itself declares.


@dataclass
class Extra:
    """One extra: its installed and its missing packages.

    Attributes:
        installed: package -> its version.
        missing: packages that are absent, or older than regard needs.
    """

    name: str
    installed: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    @property
    def fix(self) -> str | None:
        return f'pip install "regard[{self.name}]"' if self.missing else None


def find_extras(requirements: list[str] | None = None) -> list[Extra]:
    """Finds every package of every extra.

    Example:
        >>> (extra, *_) = find_extras(["no-such-package>=1.0; extra == 'cli'"])
        >>> extra.name, extra.missing, extra.fix
        ('cli', ['no-such-package'], 'pip install "regard[cli]"')

    Args:
        requirements: in the form of package metadata; None: those of the installed regard.
    """
    if requirements is None:
        try:
            requirements = importlib.metadata.requires("regard") or []
        except importlib.metadata.PackageNotFoundError:  # a source tree that was never installed
            requirements = []
    extras = {name: Extra(name) for name in EXTRAS}
    for requirement in requirements:
        parts = _REQUIREMENT.match(requirement)
        if parts is None or parts[3] not in extras:
            continue
        package, oldest, extra = parts.groups()
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            extras[extra].missing.append(package)
            continue
        if _numbers(version) < _numbers(oldest):
            extras[extra].missing.append(f"{package} {oldest} (here {version})")
        else:
            extras[extra].installed[package] = version
    return list(extras.values())


def _numbers(version: str) -> list[int]:
    """The numbers a version begins with, without zeros at the end: [1, 2] for 1.2.0rc1."""
    release = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in release[0].split(".")] if release else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers


# ---------------------------------------------------------------------------------------------
# The findings on a terminal.

_SIGNS = {"works": "[green]✓[/]", "absent": "[dim]–[/]", "broken": "[red]✗[/]"}


def print_findings(found: dict[str, Any], console: "Console") -> None:
    """Prints what `examine` found, as wide as the console."""
    from rich.markup import escape

    verdict = "[green]attention works here[/]" if found["healthy"] else "[red]something is wrong[/]"
    console.print(f"\n[bold]regard {found['versions']['regard']}[/] · {verdict}")

    _section(console, "This machine", ((None, name, escape(t)) for name, t in _machine(found)))
    if found["devices_failure"] is None:
        _section(console, "Backends, each run on a small problem", _backend_rows(found))
    if found["extras"]:  # a source tree that was never installed has no metadata
        _section(console, "Extras", _extra_rows(found))
    model = found["model"]
    said = f"English to French, {model['megabytes']} MB" if model["present"] else model["reason"]
    sign = _SIGNS["works" if model["present"] else "absent"]
    _section(console, "Bundled model", [(sign, "translator", escape(said))])


def _machine(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    versions = found["versions"]
    yield "Python", f"{versions['python']} on {found['system']}"
    yield "JAX", f"{versions['jax']}, jaxlib {versions['jaxlib']}, NumPy {versions['numpy']}"
    yield "cuDNN", versions["cudnn"] or "not installed with JAX"
    if found["devices_failure"] is not None:
        yield "devices", f"none: {found['devices_failure']}"
    for device in found["devices"]:
        capability = device["compute_capability"]
        more = f", compute capability {capability}" if capability else ""
        yield device["platform"], f"{device['name']}{more}"
    if found["unused_gpu"]:
        yield "note", f"nvidia-smi exists, but this JAX has no GPU support. Fix: {GPU_FIX}"
    for name, value in found["environment"].items():
        yield "set", f"{name}={value}"


def _backend_rows(found: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    from rich.markup import escape

    for backend in found["backends"]:
        text = " ".join(_findings(backend))
        if backend["name"] == found["first_choice"]:
            text = f"{text} attend's first choice here."
        yield _SIGNS[backend["state"]], backend["name"], escape(text)


def _findings(backend: dict[str, Any]) -> Iterator[str]:
    if not backend["probes"]:
        yield backend["refusals"]["dot"] + "."
        return
    passed = [probe for probe in backend["probes"] if probe["passed"]]
    if passed:
        names = ", ".join(probe["score"] for probe in passed)
        worst = max(probe["error"] for probe in passed)
        slope = max(probe["gradient_error"] for probe in passed)
        yield f"{names}: within {worst:.0e} of float64, gradients {slope:.0e} ({backend['dtype']})."
    for probe in backend["probes"]:
        if probe["failure"] is not None:
            yield f"{probe['score']} fails: {probe['failure']}."
        elif not probe["passed"]:
            yield (
                f"{probe['score']} is WRONG: off by {probe['error']:.0e}, "
                f"gradients by {probe['gradient_error']:.0e}."
            )
    for score, reason in backend["refusals"].items():
        yield f"Not {score}: {reason}."


def _extra_rows(found: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    from rich.markup import escape

    for extra in found["extras"]:
        if extra["missing"]:
            text = f"missing {', '.join(extra['missing'])}. Fix: {extra['fix']}"
            yield _SIGNS["absent"], extra["name"], escape(text)
        elif extra["installed"]:
            listed = ", ".join(f"{name} {version}" for name, version in extra["installed"].items())
            yield _SIGNS["works"], extra["name"], escape(listed)


def _section(console: "Console", title: str, rows: Any) -> None:
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    for options in ({"width": 1}, {"width": 10, "style": "bold"}, {"overflow": "fold"}):
        table.add_column(**options)
    for sign, name, text in rows:
        table.add_row(sign or "", name, text)
    console.print(f"\n[bold cyan]{title}[/]")
    console.print(table)
