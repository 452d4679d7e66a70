"""Command lines that svdq prints: a shell gives back the arguments."""

import shlex

import pytest

from svdq.pipeline.command_line import arguments_of, svdq_command, variable


@pytest.mark.parametrize("name", ["photo.jpg", "my photo.jpg", "it's.jpg", "-photo.jpg", "--last.jpg", "$(id).jpg"])
def test_a_shell_reads_what_was_meant(name: str) -> None:
    words = shlex.split(svdq_command("submit", name, options=("--like", name)))
    assert words[1:] == [*arguments_of("submit", name, options=("--like", name))]
    assert ("--" in words) == name.startswith("-")
    assert "--" not in words or words[words.index("--") + 1 :] == [name]
    assert shlex.split(variable("SVDQ_MODEL", name)) == [f"SVDQ_MODEL={name}"]
