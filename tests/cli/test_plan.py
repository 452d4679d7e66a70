"""`svdq plan` as a user runs it: models that are not here, model files, shapes, wrong input."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from svdq.cli.main import cli, run
from svdq.pipeline.models.model_name import PRESETS
from svdq.worker.cards import Cards
from tests.conftest import Cli

A14B = "Wan-AI/Wan2.2-I2V-A14B-Diffusers"


def rows_about(*arguments: str) -> list[list[str]]:
    result = CliRunner().invoke(cli, ["plan", "--model", *arguments], catch_exceptions=False)
    return [re.split(r"\s{2,}", line.rstrip()) for line in result.stdout.splitlines()]


def test_memory_and_disk_of_a_model_are_known_before_it_is_fetched(home: Path) -> None:
    rows = rows_about(A14B, "--gpus", "1x24")
    assert ["126.2 GB to fetch; `svdq model convert` makes a copy of 69.0 GB."] in rows
    assert ["svdq worker --experts rounds", "33.3 GB", "-", "no"] in rows
    # 40 steps of 30.5 s, an encode of 0.3 steps and a decode of 0.5, 300 times, and 5% of loading.
    assert ["svdq worker --experts rounds --approximate int8", "19.8 GB", "-", "yes", "109 h"] in rows
    assert ["svdq worker --experts rounds --offload blocks", "12.4 GB", "44.0 GB", "yes", "109 h"] in rows


def test_a_disk_without_room_for_what_is_to_be_fetched_is_said(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=58 * 10**9, total=10**12))
    assert any(row[0].startswith("The disk has only 58.0 GB free in ") for row in rows_about(A14B, "--gpus", "1x24"))
    assert not any("The disk" in row[0] for row in rows_about("wan2.2-4step", "--gpus", "1x24"))
    for model, level in ((A14B, "fail"), ("wan2.2-4step", "ok")):
        run(["doctor", "--model", model])
        [line] = [line for line in capsys.readouterr().out.splitlines() if " download " in line]
        assert (line.split()[0], "only 58.0 GB free in" in line) == (level, level == "fail")


def test_skipped_steps_take_no_time_and_some_memory(home: Path) -> None:
    for step_cache in ("0.06", "1.7x"):
        rows = rows_about(A14B, "--gpus", "1x48", "--step-ms", "1000", "--step-cache", step_cache)
        assert [f"{A14B}: 832x480, 81 frames, 23 of 40 steps computed."] in rows
        # 23 steps of a second, with encode and decode of 0.8, 300 times, and 5% of loading: 0.67 GB for residuals.
        assert next(row for row in rows if row[0] == "svdq worker --experts rounds")[1::3] == ["34.0 GB", "2 h 5 min"]


@pytest.mark.parametrize(
    ("model", "value", "words"),
    [
        (A14B, "9x", "9x is more than there is"),
        (A14B, "3", "--step-cache 3 is not allowed: it must be from 0 to 1."),
        (A14B, "many", "--step-cache 'many' is not allowed"),
        ("stabilityai/stable-video-diffusion-img2vid-xt", "0.06", "does not apply to Stable Video Diffusion"),
    ],
)
def test_a_step_cache_that_cannot_be_is_a_sentence(svdq: Cli, model: str, value: str, words: str) -> None:
    planned = svdq("plan", "--model", model, "--gpus", "1x24", "--step-cache", value)
    assert (planned.returncode, planned.stdout) == (2, "")
    assert words in planned.stderr


def test_a_model_file_changes_the_steps_and_the_guidance(home: Path) -> None:
    file = PRESETS["wan2.2-4step-bf16"]
    rows = rows_about(file, "--gpus", "2x24", "--videos", "100")
    assert [f"{file}: 832x480, 81 frames, 4 steps."] in rows
    assert ["127.6 GB to fetch; `svdq model convert` makes a copy of 69.0 GB."] in rows
    command = "svdq worker --groups 2 --ranks 1 --experts rounds --approximate int8"
    assert [command, "19.8 GB", "-", "yes", "77 min"] in rows
    assert rows_about(file, "--gpus", "1x32")[-1][0].startswith("No time of a step on such a GPU is known")


def test_the_attention_of_larger_videos_costs_more_than_their_pixels(home: Path) -> None:
    for shape, time in (("832x480x81", "3 h 35 min"), ("1280x720x81", "13 h 26 min")):
        rows = rows_about(A14B, "--gpus", "1x48", "--step-ms", "1000", "--shape", shape)
        assert next(row[-1] for row in rows if row[0] == "svdq worker --experts rounds") == time


def test_the_configured_model_is_meant_without_a_name(svdq: Cli) -> None:
    planned = svdq("plan", "--gpus", "1x24", SVDQ_MODEL=A14B)
    assert planned.stdout.startswith(f"{A14B}: 832x480, 81 frames, 40 steps.")


def test_a_model_that_does_not_fit_is_a_plain_no(home: Path) -> None:
    rows = rows_about(A14B, "--gpus", "1x16", "--shape", "1280x720x81")
    assert ["Nothing fits: choose a smaller --shape, or GPUs with more memory."] in rows
    assert not any("yes" in row for row in rows)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (f"--model {A14B}", "No GPU is visible here; name some with their memory, such as --gpus 1x24 or --gpus 4090."),
        (f"--model {A14B} --gpus 7", "--gpus '7' is not known"),
        (f"--model {A14B} --gpus 1x24 --step-ms nan", "'--step-ms': 'nan' is not a number"),
        (f"--model {A14B} --gpus 1x24 --shape 100x100x81", "is not a shape"),
        ("--model someone/else --gpus 1x24", "The model someone/else is not on this machine"),
        ("--gpus 1x24", "The model 'preview' needs no GPU; name another by --model or SVDQ_MODEL."),
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
