"""Every line of docs/quickstart.md, run in one shell as a reader would."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def steps() -> list[tuple[str, str]]:
    """The commands of the page, each with what the page shows below it."""
    found: list[tuple[str, list[str]]] = []
    for language, block in BLOCK.findall(PAGE):
        assert language == "console", "a block that no test would run"
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return [(command, "\n".join(lines)) for command, lines in found]


def pattern(shown: str) -> str:
    """A regular expression for what the page shows: `…` is anything."""
    return ".*".join(map(re.escape, shown.split("…")))


@pytest.mark.long
@pytest.mark.usefixtures("own_server")
def test_every_line_of_the_quickstart(home: Path) -> None:
    Path("docs").symlink_to(ROOT / "docs")
    mark = "=== next command ==="
    script = "\n".join(
        ["set -euo pipefail"]
        # A function of the shell, so that the checkout is run whatever is on PATH.
        + [f"svdq() {{ {shlex.quote(sys.executable)} -c 'from svdq.cli.main import main; main()' \"$@\"; }}"]
        + [f"{command}\necho {shlex.quote(mark)}" for command, _ in steps()]
    )
    done = subprocess.run(
        ["bash", "-c", f"exec 2>&1\n{script}"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=200,
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert done.returncode == 0, done.stdout
    outputs = done.stdout.split(mark + "\n")
    assert len(outputs) == len(steps()) + 1
    for (command, shown), printed in zip(steps(), outputs, strict=False):
        assert re.fullmatch(pattern(shown), printed.strip(), re.DOTALL), f"{command} printed:\n{printed}"
    assert len(list(Path("videos").glob("*.mp4"))) == 2
    assert Path("gallery.html").is_file()
