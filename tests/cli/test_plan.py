"""`svdq plan` as a user runs it: a deadline, a price, two experts, wrong input."""

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from svdq.cli.main import cli, run


def test_a_deadline_and_a_price() -> None:
    arguments = "plan --videos 5000 --deadline 8h --step-ms 764 --encode-ms 140 --decode-ms 3383 --gpu-hour-price 2.5"
    result = CliRunner().invoke(cli, arguments.split(), catch_exceptions=False)
    assert "25 steps of 764 ms, encode 140 ms, decode 3.383 s." in result.stdout
    assert "4 GPUs are enough for 5,000 videos in 8 h" in result.stdout
    rows = [re.split(r"\s{2,}", line) for line in result.stdout.splitlines()]
    assert ["pipeline of 4", "4", "5.656 s", "637", "7 h 51 min", "yes", "78.55", "0.0157"] in rows


def test_the_example_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs/internals/capacity.md").read_text(encoding="utf-8")
    found = re.search(r"`svdq (plan [^`]+)`:\n\n```\n(.*?)```", page, re.DOTALL)
    assert found is not None
    result = CliRunner().invoke(cli, found[1].split(), catch_exceptions=False)
    at = re.compile(r"at (\d{4}-\d\d-\d\d )?\d\d:\d\d")
    assert at.sub("", result.stdout) == at.sub("", found[2])


@pytest.mark.parametrize("deadline", ["07:00", "2099-01-31", "2099-01-31T07:00Z"])
def test_a_deadline_as_a_time(deadline: str) -> None:
    assert run(["plan", "--videos", "2", "--deadline", deadline, "--step-ms", "5"]) == 0


def test_a_deadline_that_nothing_meets() -> None:
    arguments = ["plan", "--videos", "2", "--deadline", "1m", "--step-ms", "5000", "--steps", "25"]
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert "No number of GPUs renders 2 videos in 60 s." in result.stdout


def test_two_experts() -> None:
    arguments = "plan --videos 50 --step-ms 5000 --encode-ms 1000 --decode-ms 5000 --gpus 7 --segments 15+25"
    result = CliRunner().invoke(cli, arguments.split(), catch_exceptions=False)
    assert "40 steps of 5 s, encode 1 s, decode 5 s, experts 15 + 25." in result.stdout
    rows = [re.split(r"\s{2,}", line) for line in result.stdout.splitlines()]
    assert ["pipeline of 3 + 4", "7", "32.5 s", "111", "28 min"] in rows
    assert ["7 replicas", "7", "29.43 s", "122", "27 min"] in rows
    # Four steps, as of a distilled model, are divided in proportion.
    assert "experts 2 + 2" in CliRunner().invoke(cli, [*arguments.split(), "--steps", "4"]).stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "--videos"),
        ("--videos 5", "--step-ms"),
        ("--videos 5 --step-ms 50 --deadline soon", "--deadline 'soon' is not a duration"),
        ("--videos 5 --step-ms 0", "0.0 is not in the range"),
        ("--videos 5 --step-ms nan", "'--step-ms': 'nan' is not a number"),
        ("--videos 5 --step-ms 50 --gpu-hour-price nan", "'--gpu-hour-price': 'nan' is not a number"),
        ("--videos 5 --step-ms 50 --segments 15", "written like 15+25"),
        ("--videos 5 --step-ms 50 --segments 0+40", "written like 15+25"),
    ],
)
def test_wrong_input_is_one_sentence(home: Path, capsys: Any, arguments: str, words: str) -> None:
    assert run(["plan", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
