"""`svdq plan` as a user runs it: the reference tables, a deadline, a recording, a live group, wrong input."""

import json
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
    one = {
        "ranks": 1,
        "through": "loop",
        "per_sample_mean_s": 1.33,
        "efficiency": 1.32 / 1.33,
        "steps_per_rank": [24.0],
    }
    four = {
        "ranks": 4,
        "through": "loop",
        "per_sample_mean_s": 0.34,
        "efficiency": 0.33 / 0.34,
        "steps_per_rank": [5.8, 6.6, 6.6, 5.0],
    }
    replicas = {**four, "through": "replicas", "ranks": 8}
    path.write_text(json.dumps({"runs": [{**common, **run, **changes} for run in (one, four, replicas)]}))
    return path


def test_the_reference_table_is_printed() -> None:
    arguments = ["--videos", "50", "--one-gpu-s", "31.96", "--fill-s", "35.30", "--pace-s", "4.39", "--gpus", "7"]
    result = CliRunner().invoke(cli, ["plan", *arguments], catch_exceptions=False)
    rows = [line.split() for line in result.stdout.splitlines()]
    for row in (
        ["1", "31.96", "35.30", "0.91"],
        ["2", "63.92", "39.69", "1.61"],
        ["5", "159.80", "52.86", "3.02"],
        ["10", "319.60", "74.81", "4.27"],
        ["50", "1598.00", "250.41", "6.38"],
    ):
        assert row in rows
    assert "Break-even with one GPU is at 1.12 videos (pipeline of 7)." in result.stdout


def test_a_deadline_a_price_and_a_picture(tmp_path: Path) -> None:
    arguments = ["--videos", "500", "--deadline", "1h", "--step-ms", "764", "--encode-ms", "140", "--decode-ms", "3383"]
    arguments += ["--gpu-hour-price", "2.5", "--watts", "700", "--plot", str(tmp_path / "plan.png")]
    result = CliRunner().invoke(cli, ["plan", *arguments], catch_exceptions=False)
    assert "4 GPUs are enough for 500 videos in 60 min" in result.stdout
    assert "One pipeline of 4 is enough; replicas need 4." in result.stdout
    assert "A group is useful with up to 7 ranks: beyond it the last rank only decodes." in result.stdout
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_costs_from_a_bench(tmp_path: Path) -> None:
    path = bench_json(tmp_path / "bench.json")
    found = planned("--videos", 100, "--from", path)
    one, pipeline, replicas = found["rows"]
    assert (one["time_s"], one["gpus"]) == (pytest.approx(132.0), 1)
    # 10 ms of the measured pace are hand-overs.
    assert (pipeline["gpus"], pipeline["pace_s"]) == (4, pytest.approx(0.34))
    assert pipeline["first_s"] == pytest.approx(1.32 + 4 * 0.01)
    assert replicas["time_s"] == pytest.approx(25 * 1.32)
    # Twice the steps, with the same costs otherwise.
    assert planned("--videos", 1, "--from", path, "--steps", 48)["rows"][0]["time_s"] == pytest.approx(2.52)


def test_a_slow_gpu_shows_in_a_bench(tmp_path: Path) -> None:
    # Three ranks of 50 ms and one of 100: 24 steps in 24 / 70 s, whatever the encode.
    fair_s = 24 / 70
    path = bench_json(
        tmp_path / "bench.json",
        encode_ms=0.0,
        decode_ms=0.0,
        per_sample_mean_s=fair_s,
        efficiency=1.0,
        steps_per_rank=[fair_s / 0.05, fair_s / 0.1, fair_s / 0.05, fair_s / 0.05],
    )
    found = planned("--videos", 100, "--from", path)
    assert found["rows"][1]["pace_s"] == pytest.approx(fair_s)
    assert found["lost_to_slower"] == pytest.approx(1 - 0.3 / fair_s)


def test_costs_from_a_live_group(connection: redis.Redis) -> None:
    intake = IntakeStatus(worker="w", costs=(LARGE, SMALL))
    save(connection, rank(0, intake=intake), rank(1))
    latest = planned("--videos", 10, "--from", "live", "--steps", 8)
    assert "64x64x2" in latest["source"]
    assert latest["rows"][0]["first_s"] == pytest.approx(0.1 + 8 * 0.25 + 2.0)
    assert latest["gpus"] == 2
    large = planned("--videos", 10, "--from", "live", "--steps", 8, "--shape", "1024x576x25")
    assert large["rows"][0]["first_s"] == pytest.approx(8.0)
    with pytest.raises(Exception, match="there is 1024x576x25, 64x64x2"):
        planned("--videos", 10, "--from", "live", "--shape", "512x512x14")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "--videos"),
        ("--videos 5", "in one way"),
        ("--videos 5 --step-ms 50 --from live", "in one way"),
        ("--videos 5 --one-gpu-s 3 --fill-s 4", "belong together"),
        ("--videos 5 --from none.json", "none.json cannot be read (No such file"),
        ("--videos 5 --from other.json", "other.json is no recording"),
        ("--videos 5 --from runs.json", "record it again"),
        ("--videos 5 --step-ms 50 --deadline soon", "--deadline 'soon' is not a time"),
        ("--videos 5 --step-ms 0", "0.0 is not in the range"),
        ("--videos 5 --step-ms nan", "'nan' is not a finite number"),
        ("--videos 5 --from live", "No live group has measured any video"),
        ("--videos 5 --step-ms 50 --plot none/plan.png", "cannot be written"),
    ],
)
def test_wrong_input_is_one_sentence(home: Path, capsys: Any, arguments: str, words: str) -> None:
    Path("other.json").write_text("[]")
    Path("runs.json").write_text('{"runs": [{"ranks": 2}]}')
    assert run(["plan", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
