"""`svdq bench` as a user runs it: a table, a JSON, a plot, a trace; wrong input in one sentence."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from svdq.cli import main
from svdq.pipeline.errors import InputError
from svdq.pipeline.models.wan.tiny import write_tiny_wan
from svdq.worker.bench.measure import BenchReport, write_results
from tests.faults.arena import faults_by_seed
from tests.waiting import PATIENCE_S, wait_until

QUICK = ["--steps", "6", "--step-ms", "2", "--frames", "2", "--size", "64x64", "--samples", "40"]


@pytest.mark.slow
def test_bench_writes_a_table_json_plot_and_trace(svdq, tmp_path) -> None:
    # Modules of the current folder are not imported.
    for module in ("grp", "random", "torch"):
        (tmp_path / f"{module}.py").write_text("raise RuntimeError('imported from the current folder')")
    paths = {name: tmp_path / f"out.{name}" for name in ("json", "png", "trace")}
    command = [Path(sys.executable).with_name("svdq"), "bench", "--ranks", "3", *QUICK]
    options = ["--segments", "2+4", "--json", paths["json"], "--plot", paths["png"], "--trace", paths["trace"]]
    result = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert result.returncode == 0, result.stderr
    # Matplotlib says so at its first start if that takes 5 s. Beside other tests, the clock and the work may disagree.
    assert re.fullmatch(
        r"(Matplotlib is building .*\n)?(A video took .* by the clock, and .* by the work done: .*\n)?", result.stderr
    )
    assert "efficiency" in result.stdout
    [run] = json.loads(paths["json"].read_text())["runs"]
    assert (run["ranks"], run["samples"]) == (3, 40)
    assert 0 < run["efficiency"] < 1.2
    check_bound(run["steps_per_rank"])
    assert len(run["busy_share"]) == len(run["rss_mb"]) == 3
    assert run["per_sample_p95_s"] >= run["per_sample_s"] > 0
    assert paths["png"].read_bytes().startswith(b"\x89PNG")
    events = json.loads(paths["trace"].read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2}
    assert any(event["name"].startswith("steps") for event in events)


@pytest.mark.slow
@pytest.mark.parametrize("through", ["loop", pytest.param("daemon", marks=pytest.mark.nightly)])
@pytest.mark.long
def test_a_rank_in_rounds_loads_each_expert_once_for_many_videos(svdq, tmp_path, through) -> None:
    trace = tmp_path / "out.trace"
    options = ["--segments", "2+4", "--experts", "rounds", "--load-ms", "5", "--through", through, "--trace", trace]
    result = svdq("bench", "--ranks", "1", *QUICK, *options, "--burst", "12")
    assert result.returncode == 0, result.stderr
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"]]
    assert names.count("steps 0-1") == names.count("steps 2-5") == 14
    # That of the first burst, and of the other at most two: the worker may see its first job before it sees the rest.
    assert 2 <= names.count("load simulated") == names.count("load simulated_2") <= 4


def check_bound(steps_per_rank: list[int]) -> None:
    """One rank does the two steps of the first expert, and the others those of the second."""
    assert (steps_per_rank[0], sum(steps_per_rank[1:])) == (2, 4)


@pytest.mark.long
def test_bound_ranks_do_only_the_steps_of_their_expert_in_the_daemon(svdq, tmp_path, monkeypatch) -> None:
    path = tmp_path / "out.json"
    # `svdq bench --through daemon` starts its own Redis server and must not use this one.
    (tmp_path / "svdq.toml").write_text('redis_url = "redis://127.0.0.1:1/0"\n')
    monkeypatch.chdir(tmp_path)
    options = ["--segments", "2+4", "--decode-ms", "2", "--through", "daemon", "--json", path]
    result = svdq("bench", "--ranks", "3", *QUICK, *options)
    assert result.returncode == 0, result.stderr
    [run] = json.loads(path.read_text())["runs"]
    check_bound(run["steps_per_rank"])
    assert 0 < run["efficiency"] < 1.2


@pytest.mark.slow
@pytest.mark.long
def test_skipped_steps_cost_nothing(svdq) -> None:
    steps = ["--steps", "40", "--step-ms", "5", "--skipped", "17", "--frames", "2", "--size", "64x64"]
    printed = svdq("bench", "--ranks", "2", *steps, "--burst", "3", "--json")
    assert json.loads(printed.stdout)["bursts"][-1]["bound_s"] == pytest.approx(1.5 * 23 * 0.005)


@pytest.mark.long
def test_steps_may_cost_differently(svdq) -> None:
    """As in two stages of LTX-2, of which `svdq plan` expects the same: 11 equal steps would take half as long."""
    options = ["--encode-ms", "2", "--decode-ms", "4", "--frames", "2", "--size", "64x64"]
    printed = svdq("bench", "--ranks", "2", "--step-ms", "1*8,4.14*3", *options, "--burst", "3", "--json")
    bound_s = json.loads(printed.stdout)["bursts"][-1]["bound_s"]
    assert bound_s == pytest.approx(1.5 * (8 * 1 + 3 * 4.14 + 2 + 4) / 1000)
    ltx = ("--model", "diffusers/LTX-2.3-Distilled-Diffusers", "--gpus", "2x80", "--step-ms", "1000")
    planned = svdq("plan", *ltx, "--videos", "3", "--json")
    assert json.loads(planned.stdout)["ways"][0]["time_s"] == pytest.approx(1000 * bound_s, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("through", ["loop", pytest.param("daemon", marks=pytest.mark.nightly)])
@pytest.mark.long
def test_bursts_are_compared_with_their_bound_and_replicas(svdq, tmp_path, through) -> None:
    paths = {name: tmp_path / f"out.{name}" for name in ("json", "png")}
    result = svdq(
        "bench", "--through", through, "--ranks", "2", "--burst", "1,3", "--warmup-samples", "2",
        "--steps", "6", "--step-ms", "10", "--encode-ms", "5", "--decode-ms", "20", "--frames", "2", "--size", "64x64",
        "--json", paths["json"], "--plot", paths["png"],
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "pipeline/replicas" in result.stdout
    document = json.loads(paths["json"].read_text())
    assert document["runs"] == []
    bursts = document["bursts"]
    assert [(burst["videos"], burst["is_first"]) for burst in bursts] == [(2, True), (1, False), (3, False)]
    assert [burst["bound_s"] for burst in bursts] == pytest.approx([0.085, 0.085, 0.1275])
    for burst in bursts:
        assert burst["wall_s"] >= 0.98 * burst["bound_s"]
        assert burst["replicas_s"] == pytest.approx(-(-burst["videos"] // 2) * 0.085)
    assert paths["png"].read_bytes().startswith(b"\x89PNG")


def error_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run `svdq bench` with wrong input, which measures nothing, and return its one sentence."""
    assert main.run(["bench", *map(str, arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    return printed.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", "9999"], "is not in the range"),
        (["--model", "nothere"], "There is no model folder 'nothere'"),
        (["--model", "simulated:foo=1"], "cannot be simulated"),
        (["--step-ms", "0"], "--step-ms"),
        (["--step-ms", "nan"], "'nan' is not a number"),
        (["--step-ms", "40*x"], "'40*x' is not milliseconds times a number of steps, such as 40*8"),
        (["--step-ms", "40*8,200*3", "--steps", "12"], "--step-ms of 11 steps needs the simulated model"),
        (["--burst", "1,x"], "list of positive numbers"),
        (["--rank-speed", "inf"], "list of positive numbers"),
        (["--rank-speed", "1,2"], "one number for each"),
        (["--size", "100x100"], "multiples of 64"),
        (["--samples", "5"], "too few"),
        (["--segments", "15"], "written like 15+25"),
        (["--segments", "15+25", "--ranks", "1"], "at least two ranks"),
        (["--segments", "15+25", "--steps", "1"], "a step for each expert"),
        (["--segments", "15+25", "--model", "preview"], "needs the simulated model"),
        (["--skipped", "5", "--model", "preview"], "needs the simulated model"),
        (["--skipped", "28", "--steps", "40"], "of 40 steps, 22 can be skipped"),
        (["--plot", "plot.jpg"], "ends in .png"),
        (["--json", "gone/x.json"], "There is no folder"),
        (["--trace", "."], "is a directory"),
        pytest.param(
            ["--device", "cuda"],
            "PyTorch cannot use a GPU here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_wrong_input_is_one_sentence(capsys, tmp_path: Path, monkeypatch, options: list[str], words: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in error_of(capsys, *options)


@pytest.mark.slow
def test_a_truncated_model_is_wrong_input(capsys, tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "tiny")
    [weights] = (tmp_path / "tiny" / "unet").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:5000])
    assert str(weights) in error_of(capsys, "--model", tmp_path / "tiny")


@pytest.mark.long
def test_a_rank_that_is_killed_is_one_sentence(svdq) -> None:
    """As by the kernel, when memory runs out."""
    faults = faults_by_seed("kill=1") | {"RANK": "0"}  # which says that a process is a rank
    result = svdq("bench", "--model", "simulated:step_ms=2", "--ranks", "2", *QUICK, **faults)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert re.search(r"^Error: Rank \d was ended by SIGKILL; ", result.stderr, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("through", ["loop", pytest.param("daemon", marks=pytest.mark.nightly)])
@pytest.mark.long
def test_a_model_is_measured_with_parameters_of_its_family(svdq, tmp_path: Path, through: str) -> None:
    write_tiny_wan(tmp_path / "flf2v", "flf2v-14b")
    path = tmp_path / "out.json"
    options = ["--ranks", "1", "--steps", "2", "--size", "64x48", "--frames", "5", "--samples", "7"]
    result = svdq("bench", "--model", tmp_path / "flf2v", *options, "--through", through, "--json", path)
    assert result.returncode == 0, result.stderr
    [run] = json.loads(path.read_text())["runs"]
    assert (run["samples"], run["steps_per_rank"]) == (7, [2])


def test_frames_that_a_model_of_wan_does_not_make_are_wrong_input(capsys, tiny_wan: Path) -> None:
    assert "frames 1 more than a multiple of 4" in error_of(capsys, "--model", tiny_wan, "--frames", 14)


#: Whether both ranks run, by the processes of the bench and the temporary folder.
RUNNING: dict[str, Callable[[int, Path], bool]] = {
    # They are children of the fork server.
    "loop": lambda pid, folder: any(len(child.children()) >= 2 for child in psutil.Process(pid).children()),
    "daemon": lambda pid, folder: any("Ready with" in log.read_text() for log in folder.glob("*/worker.log")),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("through", "number"), [("loop", signal.SIGINT), pytest.param("daemon", signal.SIGTERM, marks=pytest.mark.nightly)]
)
def test_a_signal_to_the_bench_alone_ends_all_of_it(tmp_path: Path, through: str, number: signal.Signals) -> None:
    options = ["--through", through, "--ranks", "2", "--step-ms", "500", "--frames", "2", "--size", "64x64"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    bench = subprocess.Popen([sys.executable, "-m", "svdq.cli", "bench", *options], env=environment)
    with bench:
        wait_until(lambda: RUNNING[through](bench.pid, tmp_path))
        processes = psutil.Process(bench.pid).children(recursive=True)
        bench.send_signal(number)
        assert bench.wait(PATIENCE_S) == main.EXIT_INTERRUPTED
    assert len(processes) >= 2
    assert psutil.wait_procs(processes, timeout=PATIENCE_S)[1] == []
    assert [each for each in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(each.info["cmdline"])] == []
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_after_all_is_one_sentence(tmp_path: Path) -> None:
    report = BenchReport(model="simulated", runs=[], bursts=[], logs=[])
    with pytest.raises(InputError, match=r"x\.json' cannot be written \(No such file or directory\)"):
        write_results(report, json_path=tmp_path / "gone" / "x.json", plot_path=None, trace_path=None)
