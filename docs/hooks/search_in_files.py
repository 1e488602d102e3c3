"""The search index once more as a script, which a page that was opened as a file may read."""

from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority


@event_priority(-100)  # after the search plugin
def on_post_build(config: Any) -> None:
    index = Path(config.site_dir) / "search" / "search_index.json"
    text = index.read_text(encoding="utf-8")
    index.with_suffix(".js").write_text(f"var __index = {text}\n", encoding="utf-8")
