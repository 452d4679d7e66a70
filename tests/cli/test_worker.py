"""`svdq worker` refuses mistakes before any rank starts, also on a machine with the base install alone."""

import sys
from pathlib import Path

import pytest

from svdq.cli.main import run
from tests.conftest import Cli


def test_ffmpeg_that_does_not_run(svdq: Cli, home: Path) -> None:
    done = svdq("worker", "--ranks", "1", "--burst", IMAGEIO_FFMPEG_EXE="/no/such/ffmpeg")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    assert done.stderr.startswith("Error: ffmpeg does not run ")
    assert "IMAGEIO_FFMPEG_EXE" in done.stderr
    assert not home.exists(), "no Redis was started"


@pytest.mark.parametrize(
    ("options", "variables", "reason"),
    [
        (["--report", "/no/such/folder/night.json"], {}, "no folder '/no/such/folder'"),
        ([], {"SVDQ_TRACE": "/no/such/folder/t.json"}, "no folder '/no/such/folder'"),
        ([], {"SVDQ_TRACE": "/dev/null"}, "cannot be written"),
    ],
)
def test_a_file_that_could_not_be_written(
    svdq: Cli, home: Path, options: list[str], variables: dict[str, str], reason: str
) -> None:
    done = svdq("worker", "--ranks", "1", "--burst", *options, **variables)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert reason in done.stderr
    assert not home.exists()


def test_options_in_a_setting_need_not_be_typed(svdq: Cli, home: Path) -> None:
    home.mkdir()
    (home / "svdq.toml").write_text("worker_options = '--burst --ranks 1 --report \"/no such/folder/a.json\"'\n")
    assert "no folder '/no such/folder'" in svdq("worker").stderr
    assert "no folder '/other'" in svdq("worker", "--report", "/other/b.json").stderr
    assert "no folder '/third'" in svdq("worker", SVDQ_WORKER_OPTIONS="--report /third/c.json").stderr
    assert svdq("worker", "--help", SVDQ_WORKER_OPTIONS="--rnaks 2").returncode == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--rnaks 2", "No such option '--rnaks'"),
        ("--ranks many", "'many' is not a valid integer"),
        ("--burst now", "unexpected extra argument"),
        ("--report 'a", "No closing quotation"),
        ("--redis-url redis://:hidden@h:1/0", "redis_url is a setting of its own"),
    ],
)
def test_wrong_options_in_a_setting(svdq: Cli, options: str, reason: str) -> None:
    done = svdq("worker", SVDQ_WORKER_OPTIONS=options)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("Error: SVDQ_WORKER_OPTIONS (or worker_options in svdq.toml) ")
    assert reason in done.stderr
    assert "hidden" not in done.stderr + svdq("config", SVDQ_WORKER_OPTIONS=options).stdout


@pytest.mark.parametrize("command", ["worker --burst", "bench", "model tiny folder"])
def test_without_pytorch_there_is_a_sentence(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert run(command.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "needs PyTorch; to install it, run `pip install '.[worker]'`" in err


@pytest.mark.parametrize(
    ("module", "extra", "command"),
    [
        ("prometheus_client", "metrics", "worker --ranks 1 --burst --metrics-port 0"),
        ("apprise", "notify", "worker --ranks 1 --burst --notify ntfy://topic"),
        ("matplotlib", "plot", "bench --plot timeline.png"),
    ],
)
def test_without_the_package_of_an_extra_there_is_a_sentence(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    module: str,
    extra: str,
    command: str,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "svdq.worker.launcher.metrics", raising=False)
    assert run(command.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"needs {module}, which is not installed; run `pip install '.[{extra}]'`" in err
