"""deploy/cron/crontab: its commands are ours. tests/worker/test_cron.py runs it under a cron daemon."""

import re
from collections.abc import Callable
from pathlib import Path

CRONTAB = Path(__file__).parents[2] / "deploy/cron/crontab"


def test_commands_in_the_crontab_are_commands_of_ours(check_command: Callable[[list[str]], None]) -> None:
    lines = [line for line in CRONTAB.read_text().splitlines() if re.match(r"\d+ \d+ \* \* ", line)]
    commands = [re.search(r"\bsvdq (.*?)(?: 2>>.*)?$", line) for line in lines]
    assert len(commands) == 2
    for command in commands:
        assert command is not None
        check_command(command[1].replace("$(date +\\%F)", "2027-01-31").split())
