"""Files of JSON that name their format and its version."""

import json
from typing import Any


def parse_versioned(
    text: str | bytes, origin: str, file_format: str, version: int
) -> dict[str, Any]:
    """The content of a file of this format and version.

    Example:
        >>> from regard.versioned_json import parse_versioned
        >>> parse_versioned('{"format": "regard notes", "version": 1}', "n.json", "regard notes", 2)
        Traceback (most recent call last):
        ValueError: n.json is of version 1, and this regard reads version 2. Fix: ...

    Args:
        text: what was read.
        origin: where from, for messages.
        file_format: "regard ..." and what it is.
        version: the only one that is read.

    Raises:
        ValueError: the text is not JSON, or of another format or version.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{origin} is damaged: it is not JSON ({error}).") from None
    if not isinstance(content, dict) or content.get("format") != file_format:
        what = file_format.removeprefix("regard ")
        raise ValueError(f"{origin} is no {what}: its format is not {file_format!r}.")
    if content.get("version") != version:
        raise ValueError(
            f"{origin} is of version {content.get('version')!r}, and this regard reads version "
            f"{version}. Fix: the regard that wrote it, or a newer one."
        )
    return content
