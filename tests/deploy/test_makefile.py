"""The Makefile: when it makes a new environment."""

import shutil
import subprocess
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parents[2] / "Makefile"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def planned(folder: Path) -> str:
    """The commands that `make demo` would run."""
    return subprocess.run(
        ["make", "-n", "--no-print-directory", "demo"], cwd=folder, capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with an environment, as `make demo` leaves it."""
    folder = tmp_path / "it's (a), folder"
    (folder / ".venv").mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt"):
        (folder / name).touch()
    shutil.copy(MAKEFILE, folder)
    [command] = [line for line in planned(folder).splitlines() if line.startswith("pwd")]
    subprocess.run(command, shell=True, cwd=folder, check=True)
    (folder / ".venv" / "installed-worker").touch()
    return folder


def test_an_environment_is_made_once(checkout: Path) -> None:
    assert planned(checkout) == ".venv/bin/python deploy/demo.py\n"


def test_a_checkout_that_was_moved_gets_a_new_environment(checkout: Path) -> None:
    """The programs in the old one name a Python that is gone."""
    moved = checkout.rename(checkout.with_name("moved"))
    commands = planned(moved)
    assert "-m venv --clear .venv\n" in commands
    assert "-e '.[worker]'" in commands
