"""The examples under deploy/: what can be told of them without installing anything."""

import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from svdq.cli.main import cli

CRON = Path(__file__).parent.parent / "deploy/cron"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    units = []
    for path in sorted(CRON.glob("svdq-night.*")):
        # The program and the user of the example are not on this machine.
        text = path.read_text().replace("/opt/svdq/bin/svdq", sys.executable).replace("User=svdq\n", "User=root\n")
        (tmp_path / path.name).write_text(text)
        units.append(str(tmp_path / path.name))
    assert len(units) == 2
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", ["crontab", "svdq-night.service"])
def test_commands_in_the_examples_are_commands_of_ours(name: str) -> None:
    lines = [line.replace("/opt/svdq/bin/svdq", "svdq") for line in (CRON / name).read_text().splitlines()]
    commands = [
        line.partition("svdq ")[2].split() for line in lines if "svdq " in line and not line.startswith(("#", "D"))
    ]
    assert commands
    for command, *arguments in commands:
        found = cli.get_command(click.Context(cli), command)
        assert found is not None, command
        known = {option for parameter in found.params for option in parameter.opts}
        assert {word for word in arguments if word.startswith("--")} <= known
