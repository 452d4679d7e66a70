"""`svdq advise` on a bench's JSON and on live groups."""

import json
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner

from svdq.cli.main import cli, run
from svdq.producer.status.ranks import Condition, IntakeStatus, ShapeCosts
from tests.cli.test_plan import bench_json
from tests.producer.status.test_ranks import rank, save

COSTS = ShapeCosts(frames=2, width=64, height=64, guided=True, step_s=(0.5, 0.5), encode_s=0.1, decode_s=0.1)


def advised(*arguments: object) -> list[dict[str, Any]]:
    result = CliRunner().invoke(cli, ["advise", *map(str, arguments), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_the_figures_of_a_bench(home: Path) -> None:
    (found,) = advised(bench_json(Path("bench.json")))
    assert found["best"]["text"].startswith("Halving the time of a step")
    assert found["time"] == "The ranks were busy 97% of the time (96% to 98%), and idle 3% for other reasons."
    text = CliRunner().invoke(cli, ["advise", "bench.json"]).stdout
    assert f"This would help most: {found['best']['text']}" in text


def test_live_groups(connection: redis.Redis) -> None:
    busy = IntakeStatus(worker="w", in_flight=("a", "b"), costs=(COSTS,), pace_s=2.6)
    bored = IntakeStatus(worker="v", in_flight=("c",), costs=(COSTS,), pace_s=2.6)
    condition = Condition(effect="Videos wait", reason="Full.", since=1.0, attempts=2, job_ids=("d",))
    held = IntakeStatus(worker="u", in_flight=("d", "e"), costs=(COSTS,), pace_s=2.6)
    save(
        connection,
        *(rank(number, "a-busy", busy_share=1.0, steps=10, intake=busy if number == 0 else None) for number in (0, 1)),
        *(rank(number, "b-bored", busy_share=0.4, intake=bored if number == 0 else None) for number in (0, 1)),
        rank(0, "c-held", busy_share=0.2, intake=held),
        rank(1, "c-held", busy_share=0.2, conditions=(condition,)),
        rank(0, "d-new", intake=IntakeStatus(worker="t")),
        rank(1, "d-new"),
    )
    found = advised()
    assert [one["source"].split(",")[0] for one in found] == ["Group a-busy", "Group b-bored", "Group c-held"]
    assert found[0]["time"] == "The ranks were busy 100% of the time (100% to 100%)."
    assert found[1]["best"]["text"].startswith("Keep the queue full: ranks were idle 60% of the time")
    assert found[1]["best"]["factor"] == pytest.approx(2.5)
    assert found[2]["best"]["text"].startswith("Make writing faster")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "No running group has finished a video"),
        (["none.json"], "does not exist"),
        (["run.trace"], "has no run of a group in it (runs: Field required); give a file of svdq bench --json"),
        (["text"], "(Invalid JSON: "),
    ],
)
def test_wrong_input_is_one_sentence(home: Path, capsys: Any, arguments: list[str], words: str) -> None:
    Path("run.trace").write_text('{"traceEvents": []}')
    Path("text").write_text("text")
    assert run(["advise", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
