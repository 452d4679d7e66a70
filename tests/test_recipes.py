"""The commands of README.md and docs/gpus.md from an installation to videos, typed as they stand."""

import contextlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.hub import running
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parent.parent
#: What the commands run: this checkout; and pip, which finds all requirements installed and uses no network.
PROGRAMS = f"""
svdq() {{ {shlex.quote(sys.executable)} -c 'from svdq.cli.main import main; main()' "$@"; }}
pip() {{ (
  cd {shlex.quote(str(ROOT))}
  {shlex.quote(sys.executable)} -m pip "$@" --quiet --dry-run --no-index --no-build-isolation
) }}
"""


def commands(page: str, heading: str) -> list[str]:
    """The lines of the shell's blocks below a heading."""
    section = (ROOT / page).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return "".join(re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)).splitlines()


@pytest.mark.long
@pytest.mark.timeout(900)  # five workers and pip start, one after the other
@pytest.mark.usefixtures("own_server")
def test_every_command_of_the_recipes(home: Path, tiny_wan: Path, tmp_path: Path) -> None:
    """The hub has a small model, of which a model file makes small videos."""
    for name in ("beach", "trip/cup"):
        photo = Path("photos") / f"{name}.png"
        photo.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((96, 64), 60).convert("RGB").save(photo)
        photo.with_suffix(".txt").write_text("The waves roll in.")
    small = "steps = 2\nwidth = 64\nheight = 32\nframes = 5\n"
    Path("small.toml").write_text(f'base = "stand-in/wan"\n[defaults]\n{small}')
    readme = commands("README.md", "With model weights")
    gpus = commands("docs/gpus.md", "300 photos in a night, on one 4090")
    assert [line.split("  ")[0] for line in readme] == gpus[:4]
    assert [line.split()[:2] for line in readme[1:]] == [["svdq", "setup"], ["svdq", "submit"], ["svdq", "worker"]]

    ours, theirs = os.openpty()
    # What setup asks for: the model, the folder and, where systemd runs, the night; asked again, all stays as it is.
    os.write(ours, b"small.toml\n\n\n" + b"\n" * 3)
    with running("stand-in/wan", tiny_wan) as hub:
        environment = {name: text for name, text in os.environ.items() if name != "SVDQ_HOME"}
        environment |= {"HOME": str(tmp_path), "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub")}
        environment |= {"SVDQ_WORKER_OPTIONS": "--ranks 1 --device cpu", "TERM": "dumb", "XDG_DATA_HOME": ""}
        script = "\n".join(["set -euo pipefail", PROGRAMS, *readme, *gpus])
        process = subprocess.Popen(["bash", "-c", script], stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        said = read_all(ours)
        assert process.wait(PATIENCE_S) == 0, said
    assert "To go on from here" not in said
    assert said.count("The first video") == 2
    assert said.count("Nothing was changed.") == 1
    videos = sorted(path.parent.name for path in Path("videos").rglob("*.mp4"))
    assert videos == ["trip", "videos", "videos"]  # the photos', and the first one
    assert {path.name for path in (tmp_path / ".local/share/svdq").iterdir()} <= named_in_home()


def read_all(descriptor: int) -> str:
    """All that is written to a terminal until nobody has it open."""
    said = b""
    with contextlib.suppress(OSError):
        while chunk := os.read(descriptor, 65536):
            said += chunk
    os.close(descriptor)
    return said.decode()


def named_in_home() -> set[str]:
    """What is in the home, as the page about removing svdq has it."""
    page = (ROOT / "docs" / "uninstall.md").read_text(encoding="utf-8")
    rows = page.partition("| in the home |")[2].partition("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
