"""`make gpu-check`: sections that fail, figures that are not as wanted, and what the report says of both."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(DEPLOY)
    import gpu_check

    return gpu_check


@pytest.fixture
def report(gpu_check: ModuleType, tmp_path: Path):
    return gpu_check.Report(tmp_path / "gpu-check.md", timeout_s=30)


def test_a_section_that_fails_says_so_and_the_others_go_on(report) -> None:
    report.section("First", lambda: report.run("svdq.cli", "bench", "--ranks", "none"))
    report.section("Second", lambda: report.judge("Speed", "2.0", "at least 1.3", True))
    assert report.finish() == 1
    text = report.path.read_text()
    first, second = text.index("## First"), text.index("## Second")
    assert "python -m svdq.cli bench --ranks none" in text[first:second]
    assert "'none' is not a list of numbers" in text[first:second]
    assert "**This section failed**: RuntimeError: exit code 2" in text[first:second]
    assert "| Speed | 2.0 | at least 1.3 | yes |" in text[second:]
    assert text.rstrip().endswith("Not as wanted: First (failed).")


def test_a_command_that_hangs_is_ended(gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hanging.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    report = gpu_check.Report(tmp_path / "gpu-check.md", timeout_s=5)
    report.section("Hanging", lambda: report.run("hanging"))
    assert report.finish() == 1
    assert "It was ended after 5 s.\nbegun" in report.path.read_text()


def test_figures_that_are_only_told_fail_nothing(report) -> None:
    report.section("Pace", lambda: report.judge("Encode", "0.2", "about 0.18", None))
    assert report.finish() == 0
    report.section("Pixels", lambda: report.judge("Difference", "3", "0", False))
    assert report.finish() == 1
    assert report.path.read_text().rstrip().endswith("Not as wanted: Difference.")


def test_a_later_run_of_some_sections_keeps_the_others(gpu_check: ModuleType, report) -> None:
    report.section("Step", lambda: report.judge("Speed", "1.0", "at least 1.3", False))
    report.section("Ends", lambda: report.judge("Decode", "4.4", "about 4.4", None))
    report.figures["parts"] = [{"part": "step"}]
    assert report.finish() == 1

    later = gpu_check.Report(report.path, where="2026-11-22: another card", keep=True)
    assert later.figures == {"parts": [{"part": "step"}]}
    later.section("Step", lambda: later.judge("Speed", "2.0", "at least 1.3", True))
    later.section("Burst", lambda: later.judge("Difference", "0", "0", True))
    assert later.finish() == 0
    text = report.path.read_text()
    assert text.index("## Step") < text.index("another card") < text.index("## Ends") < text.index("## Burst")
    for row in (
        "| Speed | 2.0 | at least 1.3 | yes |",
        "| Decode | 4.4 | about 4.4 |  |",
        "| Difference | 0 | 0 | yes |",
    ):
        assert row in text
    assert "| Speed | 1.0 |" not in text

    afresh = gpu_check.Report(report.path)
    afresh.section("Burst", lambda: None)
    assert "Decode" not in report.path.read_text()


def test_without_a_gpu_every_figure_says_that_there_was_none(gpu_check: ModuleType, tmp_path: Path) -> None:
    report = gpu_check.Report(tmp_path / "gpu-check.md", where="no GPU", trial=True)
    report.section("Step", lambda: report.judge("Speed", "2.0", "at least 1.3", None))
    text = report.path.read_text()
    assert "## Step\n\nno GPU\n" in text
    assert "| Speed (no GPU) | 2.0 |" in text
    assert "says nothing about GPUs" in text


def test_a_middle_rank_is_held_against_a_step_alone(gpu_check: ModuleType, report, tmp_path: Path) -> None:
    options = gpu_check._parse(["--device", "cpu"])
    check = gpu_check.Measured(report, "model", tmp_path, options)
    step = {"part": "step", "weight_bytes": 3000 * 2**20, "peak_bytes": 1000 * 2**20}

    def compare() -> None:
        check._memory([9000.0, 4100.0, 9000.0], step)
        check._memory([9000.0, 6000.0, 9000.0], step)
        check._memory([9000.0, 9000.0], step)

    report.section("Memory", compare)
    verdicts = report.sections["Memory"].verdicts
    assert [(one.measured, one.good) for one in verdicts] == [("4,100", True), ("6,000", False)]
    assert "compared with nothing" in report.path.read_text()


def test_what_a_worker_estimates_is_held_against_what_was_taken(gpu_check: ModuleType, report, tmp_path: Path) -> None:
    check = gpu_check.Measured(report, "model", tmp_path, gpu_check._parse(["--device", "cpu"]))
    decode = {"part": "decode", "dtype": "float16", "decode_chunk_size": 8, "estimated_bytes": 9_720_000_000}

    def compare() -> None:
        check._estimate(decode | {"peak_bytes": 10_000_000_000})
        check._estimate(decode | {"peak_bytes": 11_000_000_000})

    report.section("Ends", compare)
    verdicts = report.sections["Ends"].verdicts
    assert [(one.measured, one.good) for one in verdicts] == [("10.00", True), ("11.00", False)]


@pytest.mark.parametrize(
    ("step_ms", "gpus", "timeout_s", "steps", "samples"),
    [
        (760.0, 1, 3600, 25, 30),
        # 3 s a step on one card that seven ranks share: 30 videos would take 44 minutes of an hour's command.
        (3000.0, 1, 3600, 25, 24),
        (3000.0, 7, 3600, 25, 30),
        # Not even two rounds of whole videos: fewer steps, so that the pipeline is full all the same.
        (3000.0, 1, 1800, 18, 16),
    ],
)
def test_a_run_of_several_ranks_is_done_before_its_time_limit(
    gpu_check: ModuleType, step_ms: float, gpus: int, timeout_s: float, steps: int, samples: int
) -> None:
    from gpu_check_measured import plan_run

    one = {"steps": 25, "step_ms": step_ms, "encode_ms": 500.0, "decode_ms": 11_000.0}
    plan = plan_run(one, 7, gpus, samples=30, timeout_s=timeout_s)
    assert (plan.steps, plan.samples) == (steps, samples)
    taken_s = plan.samples * (plan.steps * step_ms + 11_500) / 1000 / min(gpus, 7)
    assert taken_s <= 0.6 * timeout_s
    assert plan.samples - plan.warmup > 7 + 1


def test_without_a_gpu_it_says_so(gpu_check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    path = tmp_path / "gpu-check.md"
    assert gpu_check.main(["--report", str(path)]) == 2
    assert "no GPU" in capsys.readouterr().err
    assert not path.exists()
    assert "gpu_check" in sys.modules
