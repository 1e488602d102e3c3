"""Which of regard's extras are installed, by what the package itself declares."""

import importlib.metadata
import re
from dataclasses import dataclass, field

# What a user installs; `all`, `dev` and `docs` are made of these or are not for users.
EXTRAS = ("cli", "flax", "translate", "show", "serve", "bench")

_REQUIREMENT = re.compile(r"([\w.-]+)\s*>=\s*([\d.]+)\s*;.*extra == ['\"](\w+)['\"]")


@dataclass
class Extra:
    """One extra: the packages that are there, and those that are not.

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
    """Looks for every package of every extra.

    Example:
        >>> (extra, *_) = find_extras(["no-such-package>=1.0; extra == 'cli'"])
        >>> extra.name, extra.missing, extra.fix
        ('cli', ['no-such-package'], 'pip install "regard[cli]"')

    Args:
        requirements: as package metadata has them; None: those of this installation of regard.
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
