"""`svdq plan` as a user runs it: a deadline, a price, two experts, wrong input."""

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from svdq.cli.main import cli, run
from svdq.worker.fit import Cards
from tests.conftest import Cli


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
    assert ["7 in rounds", "7", "30.9 s", "117", "29 min"] in rows
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


A14B = "Wan-AI/Wan2.2-I2V-A14B-Diffusers"


def rows_about(*arguments: str) -> list[list[str]]:
    result = CliRunner().invoke(cli, ["plan", "--model", *arguments], catch_exceptions=False)
    return [re.split(r"\s{2,}", line.rstrip()) for line in result.stdout.splitlines()]


def test_memory_and_disk_of_a_model_are_known_before_it_is_fetched(home: Path) -> None:
    rows = rows_about(A14B, "--gpus", "1x24")
    assert ["126.2 GB to fetch; `svdq model convert` makes a copy of 69.0 GB."] in rows
    assert ["svdq worker --experts rounds", "33.3 GB", "-", "no"] in rows
    # 40 steps of 30.5 s, an encode of 0.3 steps and a decode of 0.5, 300 times, and 5% of loading.
    assert ["svdq worker --experts rounds --approximate int8", "19.8 GB", "-", "yes", "108 h"] in rows
    assert ["svdq worker --experts rounds --offload blocks", "12.4 GB", "44.0 GB", "yes", "108 h"] in rows


def test_a_model_file_changes_the_steps_and_the_guidance(home: Path) -> None:
    file = str(Path(__file__).parents[2] / "pipeline/models/presets/wan2.2-4step.toml")
    rows = rows_about(file, "--gpus", "2x24", "--videos", "100")
    assert [f"{file}: 832x480, 81 frames, 4 steps."] in rows
    assert [
        "126.2 GB and 2 files that the model file names to fetch; `svdq model convert` makes a copy of 69.0 GB."
    ] in rows
    command = "svdq worker --groups 2 --ranks 1 --experts rounds --approximate int8"
    assert [command, "19.8 GB", "-", "yes", "75 min"] in rows
    assert rows_about(file, "--gpus", "1x32")[-1][0].startswith("No time of a step on such a GPU is known")


def test_the_attention_of_larger_videos_costs_more_than_their_pixels(home: Path) -> None:
    for shape, time in (("832x480x81", "3 h 34 min"), ("1280x720x81", "13 h 25 min")):
        rows = rows_about(A14B, "--gpus", "1x48", "--step-ms", "1000", "--shape", shape)
        assert next(row[-1] for row in rows if row[0] == "svdq worker --experts rounds") == time


def test_a_model_that_does_not_fit_is_a_plain_no(home: Path) -> None:
    rows = rows_about(A14B, "--gpus", "1x16", "--shape", "1280x720x81")
    assert ["Nothing fits: choose a smaller --shape, or GPUs with more memory."] in rows
    assert not any("yes" in row for row in rows)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (f"--model {A14B}", "No GPU is visible here; name some with their memory, such as --gpus 1x24 or --gpus 4090."),
        (f"--model {A14B} --gpus 7", "--gpus 1x24 only"),
        (f"--model {A14B} --gpus 1x24 --deadline 8h", "With --model there are"),
        (f"--model {A14B} --gpus 1x24 --shape 100x100x81", "is not a shape"),
        ("--model someone/else --gpus 1x24", "The model someone/else is not on this machine"),
        ("--videos 5 --step-ms 50 --gpus 1x24", "are for --model"),
    ],
)
def test_wrong_questions_about_a_model_are_one_sentence(home: Path, capsys: Any, arguments: str, words: str) -> None:
    assert run(["plan", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "number", "gigabytes"),
    [("4090", 1, 24), ("2x4090", 2, 24), ("7xA5000", 7, 24), ("NVIDIA GeForce RTX 3060", 1, 12), ("1x24", 1, 24)],
)
def test_usual_cards_are_known_by_name(text: str, number: int, gigabytes: int) -> None:
    cards = Cards.parse(text)
    assert cards is not None
    assert (cards.number, cards.total_bytes) == (number, gigabytes * 2**30)


def test_a_card_that_is_not_known_is_refused(svdq: Cli) -> None:
    assert Cards.parse("8") is None
    answer = svdq("plan", "--model", "wan2.2-4step", "--gpus", "4091")
    assert (answer.returncode, "4091" in answer.stderr) == (2, True)
