"""`make gpu-check`: sections that fail, figures that are not as wanted, and what the report says of both."""

import json
import re
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from svdq.pipeline.models import compute_options

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(DEPLOY)
    import gpu_check

    return gpu_check


@pytest.fixture
def report(gpu_check: ModuleType, tmp_path: Path):
    return gpu_check.Report(tmp_path / "gpu-check.md", section_s=30)


def test_a_section_that_fails_says_so_and_the_others_go_on(report) -> None:
    report.section("First", lambda: report.run("svdq.cli", "bench", "--ranks", "none"))
    report.section("Second", lambda: report.judge("Speed", "2.0", "at least 1.3", True))
    assert report.finish() == 1
    text = report.path.read_text()
    first, second = text.index("## First"), text.index("## Second")
    assert "python -m svdq.cli bench --ranks none" in text[first:second]
    assert "'none' is not a valid integer range" in text[first:second]
    assert "**This section failed**: RuntimeError: exit code 2" in text[first:second]
    assert "| Speed | 2.0 | at least 1.3 | yes |" in text[second:]
    assert text.rstrip().endswith("Not as wanted: First (failed).")


def test_a_command_that_hangs_is_ended_with_its_section(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hanging.py").write_text("import time\nprint('begun')\ntime.sleep(600)\n")
    report = gpu_check.Report(tmp_path / "gpu-check.md", section_s=5)

    def hang_twice() -> None:
        with pytest.raises(RuntimeError, match="ended after the time of a section"):
            report.run("hanging")
        report.run("hanging")  # no time is left

    started = time.monotonic()
    report.section("Hanging", hang_twice)
    assert time.monotonic() - started < 60
    assert report.finish() == 1
    text = report.path.read_text()
    assert "begun" in text
    assert "**This section failed**: RuntimeError: it was ended after the time" in text


def test_output_of_a_command_is_in_the_report_before_it_ends(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is taken back in the middle of a command leaves all that was printed by then."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "gpu-check.md"
    code = f"""
import pathlib, time
print("first row")
report = pathlib.Path({str(path)!r})
while not report.exists() or "first row" not in report.read_text():
    time.sleep(0.05)
print("and it was there")
"""
    (tmp_path / "rows.py").write_text(code)
    report = gpu_check.Report(path, section_s=60)
    report.section("Rows", lambda: report.add(f"said: {report.run('rows').splitlines()}"))
    assert report.finish() == 0
    assert "said: ['first row', 'and it was there']" in path.read_text()


@pytest.fixture
def measure_candidates(gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Measure the candidates of a section with a tiny model; return the rows."""
    from gpu_checks import speedups

    monkeypatch.setattr(compute_options, "BACKEND", "eager")  # a compiler takes minutes, and other tests cover it
    path = tmp_path / "rows.json"

    def run(model: Path, section: str, size: str) -> list[dict[str, Any]]:
        common = ["--model", str(model), "--size", size, "--frames", "5", "--device", "cpu", "--repeats", "1"]
        monkeypatch.setattr(sys, "argv", ["speedups.py", *common, "--section", section, "--json", str(path)])
        speedups.main()
        rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        return rows

    return run


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
@pytest.mark.parametrize(("model", "size"), [("tiny_model", "64x64"), ("tiny_wan", "64x48")])
def test_candidates_compute_what_diffusers_does(
    measure_candidates: Any, request: pytest.FixtureRequest, model: str, size: str
) -> None:
    rows = measure_candidates(request.getfixturevalue(model), "compile", size)
    assert rows
    assert [row["failure"] for row in rows] == [""] * len(rows)
    assert all(row["speedup"] > 0 and row["difference"] < 1e-4 for row in rows)


def test_candidates_that_an_earlier_run_measured_are_not_measured_again(
    measure_candidates: Any, tiny_wan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gpu_checks import speedups

    names = list(speedups.CANDIDATES["decode"]["wan"]["decode"])
    rows = [{"part": "decode", "candidate": name, "failure": ""} for name in names]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    assert measure_candidates(tiny_wan, "decode", "64x48") == rows
    assert "| decode |" not in capsys.readouterr().out


def test_a_later_run_adds_its_sections(gpu_check: ModuleType, report) -> None:
    report.section("Step", lambda: report.judge("Speed", "1.0", "at least 1.3", False))
    assert report.finish() == 1
    later = gpu_check.Report(report.path, where="2026-11-22: another card")
    later.section("Step", lambda: later.judge("Speed", "2.0", "at least 1.3", True))
    assert later.finish() == 0
    text = report.path.read_text()
    assert (
        text.index("| Speed | 1.0 |") < text.index("another card") < text.index("| Speed | 2.0 | at least 1.3 | yes |")
    )


def test_the_same_command_again_does_what_is_missing(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    works = {"model"}

    def section(name: str):
        def run(check) -> None:
            begun.append(name)
            check.report.judge(name, "1", "1", name in works)

        return name, run

    monkeypatch.setattr(
        gpu_check, "SECTIONS", dict(zip(("runs", "model"), map(section, ("runs", "model")), strict=True))
    )
    common = ["--device", "cpu", "--scratch", str(tmp_path / "scratch"), "--report", str(tmp_path / "report.md")]
    assert gpu_check.main([*common, "--total-s", "0"]) == 0
    assert begun == []
    assert "There is no time left for `runs`" in (tmp_path / "report.md").read_text()
    assert [gpu_check.main(common), gpu_check.main(common)] == [1, 1]
    works.add("runs")
    assert [gpu_check.main(common), gpu_check.main(common)] == [0, 0]
    assert begun == ["runs", "model", "runs", "runs"]
    assert (tmp_path / "report.md").read_text().count("## runs") == 3


STEP = {
    "part": "step", "decode_chunk_size": None, "weight_bytes": 3000 * 2**20, "peak_bytes": 1000 * 2**20,
    "failure": "",
}  # fmt: skip


def test_a_middle_rank_is_compared_with_a_step_alone(gpu_check: ModuleType, report, tmp_path: Path) -> None:
    check = gpu_check.Check(report, tmp_path, gpu_check.parse(["--device", "cpu"]))
    memory_of_ranks = gpu_check.groups.memory_of_ranks

    def compare() -> None:
        memory_of_ranks(check, [9000.0, 4100.0, 9000.0])
        (tmp_path / "model.json").write_text(json.dumps({"rows": [STEP]}))
        memory_of_ranks(check, [9000.0, 4100.0, 9000.0])
        memory_of_ranks(check, [9000.0, 6000.0, 9000.0])
        memory_of_ranks(check, [9000.0, 9000.0])

    report.section("Memory", compare)
    assert report.finish() == 1
    text = report.path.read_text()
    assert re.findall(r"^\| Memory of a middle rank, MiB \| ([0-9,]+) .* (\S+) \|$", text, re.M) == [
        ("4,100", "yes"),
        ("6,000", "**no**"),
    ]
    assert text.count("compared with nothing") == 2


@pytest.mark.parametrize(
    ("step_ms", "gpus", "steps"),
    [
        (76.0, 1, 25),
        # 3 s a step on one card that seven ranks share: 16 videos of 25 steps would take 20 minutes.
        (3000.0, 1, 4),
        (3000.0, 7, 25),
        (60_000.0, 1, 1),
    ],
)
def test_several_ranks_are_done_before_their_section_ends(
    gpu_check: ModuleType, step_ms: float, gpus: int, steps: int
) -> None:
    one = {"steps": 25, "step_ms": step_ms, "encode_ms": 500.0, "decode_ms": 5_000.0}
    assert gpu_check.groups.steps_in_time(one, 7, gpus, 16, 570) == steps


def test_hand_overs_are_the_gaps_between_the_steps_of_a_video(gpu_check: ModuleType) -> None:
    def event(name: str, job: str, rank: int, start_ms: float, stop_ms: float) -> dict[str, object]:
        ts, dur = start_ms * 1000, (stop_ms - start_ms) * 1000
        return {"ph": "X", "name": name, "pid": rank, "ts": ts, "dur": dur, "args": {"job": job}}

    events = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 0"}},
        event("steps 2-3", "a", 1, 120, 200),
        event("steps 0-1", "a", 0, 0, 100),
        event("decode", "a", 1, 205, 300),
        event("steps 0-1", "b", 0, 100, 195),
        event("steps 2-3", "b", 1, 200, 280),
    ]
    assert gpu_check.groups.hand_overs_ms(events) == [20.0, 5.0]


@pytest.mark.parametrize(
    ("row", "gigabytes"),
    [
        ({"part": "encode", "dtype": "bf16"}, 1.08),
        ({"part": "step", "dtype": "fp16"}, 8.32),
        ({"part": "decode", "dtype": "fp16", "decode_chunk_size": 8}, 13.62),
    ],
)
def test_peaks_are_compared_with_the_estimates_of_the_documentation(
    gpu_check: ModuleType, row: dict[str, object], gigabytes: float
) -> None:
    from svdq.pipeline.models.svd.family import FAMILY

    shape = {"width": 1024, "height": 576, "frames": 25, "decode_chunk_size": None}
    assert gpu_check.parts.estimate(FAMILY, shape | row) / 1e9 == pytest.approx(gigabytes, abs=0.005)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_script_runs_on_a_processor(gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from svdq.pipeline.models.svd.tiny import write_tiny_model

    # Compiling takes minutes, and other tests cover it.
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    users = tmp_path / "users"
    monkeypatch.setenv("XDG_DATA_HOME", str(users))
    write_tiny_model(tmp_path / "tiny")
    report = tmp_path / "gpu-check.md"
    small = ["--size=64x64", "--frames=2", "--steps=2", "--repeats=1", "--parity-size=64x64", "--ranks=2"]
    small += ["--section-s=1800"]  # of the test: other tests may run beside it
    common = ["--device", "cpu", "--model", str(tmp_path / "tiny"), "--scratch", str(tmp_path / "scratch")]
    assert gpu_check.main([*common, *small, "--report", str(report)]) == 0, report.read_text()
    assert not users.exists(), "only homes in the scratch folder are used"
    # Names without what is in parentheses.
    rows = dict(re.findall(r"^\| ([^|]+?)(?: \([^|]*)? \| ([^|]+) \|", report.read_text(), re.M))
    for same in (
        "Largest pixel difference of the tiny SVD on 2 ranks to one rank",
        "Largest pixel difference of the tiny Wan on bound ranks to one rank",
        "Largest pixel difference of the tiny Wan in rounds to one rank",
        "Largest pixel difference of the tiny ti2v-5b on 1 rank to diffusers, of 255",
        "Largest pixel difference of the model on 2 ranks to one rank, of 255",
        "Largest pixel difference of a tiny Wan in rounds to one whose experts stay",
        "Largest pixel difference of a tiny Wan in int8 in rounds to one whose experts stay",
        "Largest pixel difference of videos with a kill -9 to those in reverse order without",
    ):
        assert rows[same] == "0", same
    assert rows["Ranks killed with kill -9"] == "1"
    for measured in (
        "Speed of the step of svd with compiled blocks",
        "Speed of the decode of wan with compiled decoder",
        "Speed of a video of 2 steps over eager, with the best of each part",
        "Videos an hour of 2 ranks which share a card over those of one",
        "Text encoder of Wan: seconds of a prompt",
    ):
        assert float(rows[measured]) > 0, measured
    for guidance in ("with", "without"):
        what = f"Seconds of a step of Wan 2.2 I2V-A14B {guidance} guidance at 64x64x5, from 2 and 4 of 40 layers"
        assert what in rows


def test_without_a_gpu_it_says_so(gpu_check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    path = tmp_path / "gpu-check.md"
    assert gpu_check.main(["--report", str(path)]) == 2
    assert "no GPU" in capsys.readouterr().err
    assert not path.exists()
    assert "gpu_check" in sys.modules
