"""`svdq plan` as a user runs it: a deadline, a recording, a live group, wrong input."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner

from svdq.cli.main import cli, run
from svdq.producer.status.ranks import IntakeStatus, ShapeCosts
from tests.producer.status.test_ranks import rank, save

SMALL = ShapeCosts(frames=2, width=64, height=64, guided=True, step_s=(0.5, 0.25), encode_s=0.1, decode_s=2.0)
LARGE = ShapeCosts(frames=25, width=1024, height=576, guided=True, step_s=(1.0, 1.0), encode_s=0.0, decode_s=0.0)


def planned(*arguments: object) -> dict[str, Any]:
    result = CliRunner().invoke(cli, ["plan", *map(str, arguments), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def bench_json(path: Path, **changes: object) -> Path:
    """What `svdq bench --json` writes of one rank and of four; only what is read of it."""
    common = {"model": "simulated", "steps": 24, "step_ms": 50.0, "encode_ms": 40.0, "decode_ms": 80.0, "samples": 80}
    one = {"ranks": 1, "through": "loop", "per_sample_mean_s": 1.33, "busy_share": [0.99]}
    four = {"ranks": 4, "through": "loop", "per_sample_mean_s": 0.34, "busy_share": [0.96, 0.97, 0.97, 0.98]}
    path.write_text(json.dumps({"runs": [{**common, **run, **changes} for run in (one, four)]}))
    return path


def test_a_deadline_and_a_price() -> None:
    arguments = "plan --videos 5000 --deadline 8h --step-ms 764 --encode-ms 140 --decode-ms 3383 --gpu-hour-price 2.5"
    result = CliRunner().invoke(cli, arguments.split(), catch_exceptions=False)
    assert "As given: 25 steps of 764 ms, encode 140 ms, decode 3.383 s." in result.stdout
    assert "4 GPUs are enough for 5,000 videos in 8 h" in result.stdout
    rows = [re.split(r"\s{2,}", line) for line in result.stdout.splitlines()]
    assert ["pipeline of 4", "4", "5.656 s", "637", "7 h 51 min", "yes", "78.55", "0.0157"] in rows


def test_the_example_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs/internals/capacity.md").read_text(encoding="utf-8")
    found = re.search(r"`svdq (plan [^`]+)`:\n\n```\n(.*?)```", page, re.DOTALL)
    assert found is not None
    result = CliRunner().invoke(cli, found[1].split(), catch_exceptions=False)
    at = re.compile(r"at \d\d:\d\d")
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
    assert "As given: 40 steps of 5 s, encode 1 s, decode 5 s, experts 15 + 25." in result.stdout
    rows = [re.split(r"\s{2,}", line) for line in result.stdout.splitlines()]
    assert ["pipeline of 3 + 4", "7", "32.5 s", "111", "28 min"] in rows
    assert ["7 replicas", "7", "29.43 s", "122", "27 min"] in rows
    # Four steps, as of a distilled model, are divided in proportion.
    assert "experts 2 + 2" in CliRunner().invoke(cli, [*arguments.split(), "--steps", "4"]).stdout


def test_costs_from_a_bench(tmp_path: Path) -> None:
    path = bench_json(tmp_path / "bench.json")
    found = planned("--videos", 100, "--from", path)
    one, pipeline, replicas = found["rows"]
    assert (one["time_s"], one["gpus"]) == (pytest.approx(132.0), 1)
    assert (pipeline["gpus"], pipeline["pace_s"]) == (4, pytest.approx(0.33))
    assert replicas["time_s"] == pytest.approx(25 * 1.32)
    bound = planned("--videos", 100, "--from", bench_json(tmp_path / "bound.json", segments=[9, 15]))
    assert bound["rows"][1]["pace_s"] == pytest.approx(max(9 * 0.05 + 0.04, 15 * 0.05 + 0.08) / 2)
    # Twice the steps, with the same costs otherwise.
    assert planned("--videos", 1, "--from", path, "--steps", 48)["rows"][0]["time_s"] == pytest.approx(2.52)


def test_costs_from_a_live_group(connection: redis.Redis) -> None:
    intake = IntakeStatus(worker="w", costs=(LARGE, SMALL))
    save(connection, rank(0, intake=intake), rank(1))
    latest = planned("--videos", 10, "--from", "live", "--steps", 8)
    assert "64x64x2" in latest["source"]
    assert latest["rows"][0]["pace_s"] == pytest.approx(0.1 + 8 * 0.25 + 2.0)
    assert latest["gpus"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "--videos"),
        ("--videos 5", "in one way"),
        ("--videos 5 --step-ms 50 --from live", "in one way"),
        ("--videos 5 --from none.json", "none.json cannot be read (No such file"),
        ("--videos 5 --from other.json", "other.json has no run of a group in it (Input should be an object)"),
        ("--videos 5 --from runs.json", "(runs.0.steps: Field required)"),
        ("--videos 5 --step-ms 50 --deadline soon", "--deadline 'soon' is not a duration"),
        ("--videos 5 --step-ms 0", "0.0 is not in the range"),
        ("--videos 5 --step-ms 50 --segments 15", "written like 15+25"),
        ("--videos 5 --step-ms 50 --segments 0+40", "written like 15+25"),
        ("--videos 5 --step-ms nan", "'nan' is not a finite number"),
        ("--videos 5 --from live", "No running group has finished a video"),
    ],
)
def test_wrong_input_is_one_sentence(home: Path, capsys: Any, arguments: str, words: str) -> None:
    Path("other.json").write_text("[]")
    Path("runs.json").write_text('{"runs": [{"ranks": 2}]}')
    assert run(["plan", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
