"""`make gpu-check`: it goes on where it ended, stays within its time, says what failed, and runs on a processor."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(DEPLOY)
    import gpu_check

    return gpu_check


@pytest.fixture
def check(gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run the check on a processor with one section, a function."""

    def run(section: Callable[[Any], None], *options: str) -> int:
        monkeypatch.setattr(gpu_check, "SECTIONS", {"section": gpu_check.Section(section)})
        code: int = gpu_check.main(["--device", "cpu", "--scratch", str(tmp_path / "scratch"), *options])
        return code

    return run


def test_a_task_that_fails_says_so_and_the_others_go_on(check: Callable[..., int], tmp_path: Path) -> None:
    def section(run: Any) -> None:
        run.task("First", lambda: run.run("svdq.cli", "bench", "--ranks", "none"))
        run.task("Second", lambda: run.figure("Speed", "2.0", "at least 1.3", good=True))

    assert check(section) == 1
    table = (tmp_path / "scratch" / "results.md").read_text()
    assert "| First | failed: `svdq.cli` ended with exit code 2: " in table
    assert "'none' is not a valid integer range" in table
    assert "| Speed | 2.0 | at least 1.3 | yes |" in table
    assert "svdq.cli bench --ranks none" in (tmp_path / "scratch" / "log.txt").read_text()


def test_the_same_command_again_does_what_is_missing(
    check: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[str] = []
    works = {"second"}

    def section(run: Any) -> None:
        for name in ("first", "second"):

            def do(name: str = name) -> None:
                begun.append(name)
                run.figure(name, 1, 1, good=name in works)

            run.task(name, do)

    assert check(section, "--total-s", "0") == 0
    assert begun == []
    assert "No time is left: the same command again goes on" in capsys.readouterr().out
    assert [check(section), check(section)] == [1, 1]
    assert begun == ["first", "second"]
    works.add("first")
    assert [check(section, "--again"), check(section)] == [0, 0]
    assert begun == ["first", "second", "first"]
    figures = [task["figures"] for task in json.loads((tmp_path / "scratch" / "results.json").read_text()).values()]
    assert figures == [{name: {"measured": "1", "wanted": "1", "good": True}} for name in ("second", "first")]


@pytest.mark.nightly
def test_a_command_is_ended_with_the_time_and_begun_again(
    check: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hanging.py").write_text("import time\ntime.sleep(600)\n")

    def section(run: Any) -> None:
        run.task("Hanging", lambda: run.run("hanging"))

    started = time.monotonic()
    assert check(section, "--total-s", "1") == 0
    assert check(section, "--total-s", "1") == 0
    assert time.monotonic() - started < 60
    assert (tmp_path / "scratch" / "log.txt").read_text().count("-m hanging") == 2
    assert json.loads((tmp_path / "scratch" / "results.json").read_text()) == {}


@pytest.mark.nightly
def test_a_worker_that_the_time_ended_goes_on_with_its_queue(check: Callable[..., int], tmp_path: Path) -> None:
    from gpu_checks.check import PHOTO

    made: list[dict[str, Any]] = []
    jobs = [[PHOTO, "--size", "64x64", "--frames", 2, "--steps", 40, "--variations", 4]]

    def section(run: Any) -> None:
        run.task("Videos", lambda: made.extend(run.render("queue", "preview", jobs, "--ranks", 1, num_videos=4)))

    assert check(section, "--total-s", "4") == 0
    assert made == []
    assert check(section) == 0
    assert len({video["job_id"] for video in made}) == 4
    assert "svdq.cli worker" in (tmp_path / "scratch" / "log.txt").read_text()


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_script_runs_on_a_processor(gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Compiling takes minutes, and other tests cover it.
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    users = tmp_path / "users"
    monkeypatch.setenv("XDG_DATA_HOME", str(users))
    scratch = tmp_path / "scratch"
    assert gpu_check.main(["--device", "cpu", "--scratch", str(scratch)]) == 0, (scratch / "results.md").read_text()
    assert not users.exists(), "only homes in the scratch folder are used"
    tasks = json.loads((scratch / "results.json").read_text()).values()
    figures = {what: figure["measured"] for task in tasks for what, figure in task["figures"].items()}
    for same in (
        "Largest pixel difference of the tiny svd on 2 ranks to one rank",
        "Largest pixel difference of the tiny wan on bound ranks to one rank",
        "Largest pixel difference of the tiny wan on one rank in rounds to one rank",
        "Largest pixel difference of the tiny ltx on 2 ranks to one rank",
        "Largest pixel difference of videos with a kill -9 to others without",
    ):
        assert figures[same] == "0", same
    for seconds in ("Night, seconds to denoise a video", "fp8, seconds to denoise a video"):
        assert float(figures[seconds]) > 0, seconds
    assert "Q4_K_M, seconds to denoise a video" in figures
    assert "times as fast" in figures["wan-2, step, compiled"]
    for family in ("wan", "ltx"):
        for way in ("fp8, weights made", "fp8, native", "int8, weights made", "int8, native"):
            psnr = float(figures[f"{family}, narrow, {way}"].partition("PSNR ")[2].partition(" dB")[0])
            assert 30 < psnr < 60, (family, way)
        assert figures[f"{family}, narrow, int8 attention"].startswith("refused: ")
    assert figures["Steps skipped at 0: seconds of the steps, PSNR in dB"].endswith(", inf")


def test_without_a_gpu_it_says_so(gpu_check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu_check.main(["--scratch", str(tmp_path / "scratch")]) == 2
    assert "no GPU" in capsys.readouterr().err
    assert not (tmp_path / "scratch").exists()
