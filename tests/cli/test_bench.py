"""`svdq bench` as a user runs it: a table, a JSON, a plot, a trace; wrong input in one sentence."""

import json

import pytest

QUICK = ["--steps", "6", "--step-ms", "2", "--frames", "2", "--size", "64x64", "--samples", "30"]


def test_bench_writes_a_table_json_plot_and_trace(svdq, tmp_path) -> None:
    paths = {name: tmp_path / f"out.{name}" for name in ("json", "png", "trace")}
    result = svdq(
        "bench", "--ranks", "1,3", *QUICK, "--compare", "replicas",
        "--json", paths["json"], "--plot", paths["png"], "--trace", paths["trace"],
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "efficiency" in result.stdout
    assert "replicas" in result.stdout
    runs = json.loads(paths["json"].read_text())["runs"]
    assert [(run["ranks"], run["through"]) for run in runs] == [
        (1, "loop"), (1, "replicas"), (3, "loop"), (3, "replicas"),
    ]  # fmt: skip
    for run in runs:
        assert run["samples"] == 30
        assert 0 < run["efficiency"] < 1.2
        assert len(run["busy_share"]) == len(run["rss_mb"]) == run["ranks"]
        assert run["per_sample_p95_s"] >= run["per_sample_s"] > 0
    assert paths["png"].read_bytes().startswith(b"\x89PNG")
    events = json.loads(paths["trace"].read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2}
    assert any(event["name"].startswith("steps") for event in events)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", "0"], "list of numbers above 0"),
        (["--rank-speed", "1,2"], "one number for each"),
        (["--size", "100x100"], "multiples of 64"),
        (["--samples", "5"], "too few"),
    ],
)
def test_wrong_input_is_one_sentence(svdq, options, words) -> None:
    result = svdq("bench", *QUICK, *options)
    assert result.returncode != 0
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
