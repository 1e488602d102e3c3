"""The README's Python runs as it stands, and prints what it says it prints."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^print\(.*\) *# (.*)$", re.MULTILINE)


def program() -> str:
    """All Python blocks, top to bottom, each line where the README has it."""
    text = README.read_text()
    lines = [""] * text.count("\n")
    for block in BLOCK.finditer(text):
        start = text.count("\n", 0, block.start(1))
        code = block.group(1).splitlines()
        lines[start : start + len(code)] = code
    return "\n".join(lines)


def test_the_blocks_run_and_print_what_they_say():
    """In a process of its own: a reader's JAX has none of this suite's flags."""
    source = program()
    code = f"exec(compile({source!r}, 'README.md', 'exec'), {{'__name__': '__main__'}})"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    stated = PRINTED.findall(source)
    assert stated, "the README shows no output"
    assert done.stdout.splitlines() == stated
