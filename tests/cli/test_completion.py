"""Completion as a shell asks for it, through the lazy table of commands."""

import os
import subprocess
import sys

import pytest

from tests.conftest import Cli


def complete(svdq: Cli, words: str, **environment: str) -> list[str]:
    """The offers to bash for the last word: lines of `type,value`."""
    index = len(words.split(" ")) - 1
    done = svdq(_SVDQ_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=str(index), **environment)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("svdq do", ["plain,doctor"]),
        ("svdq redis st", ["plain,start", "plain,stop"]),
        ("svdq submit --vari", ["plain,--variations"]),
        ("svdq submit --priority l", ["plain,low"]),
        ("svdq submit pho", ["file,pho"]),
    ],
)
def test_commands_options_values_and_files_are_completed(svdq: Cli, words: str, offered: list[str]) -> None:
    assert complete(svdq, words) == offered


def test_commands_are_completed_without_importing_them() -> None:
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('MODULES', *(name for name in sys.modules if name.startswith('svdq.cli.'))))\n"
        "from svdq.cli.main import main\n"
        "main()"
    )
    environment = {**os.environ, "_SVDQ_COMPLETE": "bash_complete", "COMP_WORDS": "svdq ", "COMP_CWORD": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "plain,submit" in done.stdout
    assert done.stdout.splitlines()[-1] == "MODULES svdq.cli.main"
