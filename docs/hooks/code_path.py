"""Lets code on the pages import what is in this folder, and draw in its style from the start."""

import importlib
import sys
from pathlib import Path
from typing import Any


def on_config(config: Any) -> None:
    folder = str(Path(__file__).resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    importlib.import_module("pictures")
