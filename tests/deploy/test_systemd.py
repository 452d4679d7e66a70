"""`svdq deploy systemd`: units that systemd accepts, and that start, stop and are told apart as they are meant to."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from PIL import Image

from svdq.cli.main import run
from svdq.producer.settings import Settings
from svdq.producer.status.status import view
from svdq.worker.launcher.group_process import KILL_S
from svdq.worker.launcher.launch import STOP_S

Cli = Callable[..., "subprocess.CompletedProcess[str]"]
Deploy = Callable[..., tuple[int, str, str]]
NAMES = {"svdq-redis.service", "svdq-worker.service", "svdq-night.service", "svdq-night.timer", "svdq-watch.service"}
HARDENED = ["svdq-redis.service", "svdq-worker.service", "svdq-night.service", "svdq-watch.service"]

#: The units are for the embedded server.
pytestmark = pytest.mark.usefixtures("own_server")

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")


@pytest.fixture
def deploy(home: Path, capsys: pytest.CaptureFixture[str]) -> Deploy:
    """Run `svdq deploy systemd`: exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = run(["deploy", "systemd", *map(str, arguments)])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def install(deploy: Deploy, tmp_path: Path) -> Callable[..., Path]:
    """Install units into a folder of the test's."""

    def call(scope: str, *arguments: object) -> Path:
        folder = tmp_path / "units"
        code, _, error = deploy(scope, "--install", "--folder", folder, *arguments)
        assert (code, error) == (0, "")
        return folder

    return call


@needs_systemd
@pytest.mark.parametrize("scope", ["--system", "--user"])
def test_systemd_accepts_the_units(
    install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scope: str
) -> None:
    monkeypatch.setenv("SVDQ_HOME", "/srv/a home")
    folder = install(scope, "--watch", tmp_path / 'in $box, 100% "mine"', "--", "--warmup", "1024x576x25")
    units = sorted(folder.iterdir())
    assert {unit.name for unit in units} == NAMES

    def verify() -> str:
        command = ["systemd-analyze", "verify", "--man=no", f"--{scope[2:]}", *map(str, units)]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
        )
        return done.stdout + done.stderr

    assert verify() == ""
    with units[0].open("a") as unit:
        unit.write("\n[Service]\nNoSuchSetting=yes\n")
    assert "NoSuchSetting" in verify()


@needs_systemd
@pytest.mark.parametrize("name", HARDENED)
def test_units_of_the_machine_are_hardened(install: Callable[..., Path], name: str) -> None:
    path = install("--system", "--watch", "/srv/inbox") / name
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=25", "--no-pager", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-200:]


def test_programs_and_options_in_the_units_are_there(
    install: Callable[..., Path], check_command: Callable[[list[str]], None]
) -> None:
    folder = install("--system", "--watch", "/srv/inbox", "--", "--ranks", "7")
    lines = re.findall(r"^Exec\w+=(.*)$", "".join(path.read_text() for path in folder.iterdir()), re.MULTILINE)
    assert len(lines) == 5
    for line in lines:
        program, *words = shlex.split(line)
        assert os.access(program, os.X_OK)
        check_command(words)


@pytest.mark.parametrize("name", ["svdq-worker.service", "svdq-night.service"])
def test_a_stop_takes_less_time_than_systemd_grants(install: Callable[..., Path], name: str) -> None:
    text = (install("--user") / name).read_text()
    [granted_s] = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert int(granted_s) > STOP_S + KILL_S


def test_a_home_of_its_own_for_the_machine(deploy: Deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SVDQ_HOME")
    _, units, _ = deploy("--system", "--run-as", "videos")
    assert "# /etc/systemd/system/svdq-worker.service\n[Unit]" in units
    assert "Environment=SVDQ_HOME=/var/lib/svdq\n" in units
    assert "StateDirectory=svdq\n" in units
    assert "User=videos\n" in units
    assert "svdq-watch" not in units


def test_settings_are_taken_over_but_for_secrets(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SVDQ_MODEL", "/models/svd xt")
    monkeypatch.setenv("SVDQ_STORAGE", "s3://key:hidden-1@bucket/x")
    monkeypatch.setenv("SVDQ_REDIS_URL", "redis://:hidden-2@127.0.0.1:1/0")
    _, printed, _ = deploy("--system")
    assert 'Environment="SVDQ_MODEL=/models/svd xt"\n' in printed
    assert "svdq-redis" not in printed
    assert "SVDQ_REDIS_URL" not in printed
    assert "SVDQ_STORAGE" not in printed
    assert "EnvironmentFile=-%E/svdq/environment\n" in printed
    _, told, _ = deploy("--system", "--install", "--folder", tmp_path)
    assert "# write SVDQ_REDIS_URL, SVDQ_STORAGE into /etc/svdq/environment" in told
    assert "hidden" not in printed + told + "".join(path.read_text() for path in tmp_path.glob("svdq-*"))


def test_what_it_writes_to_is_writable_and_no_more(deploy: Deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SVDQ_HOME", "/srv/svdq")
    monkeypatch.setenv("SVDQ_STORAGE", "/home/videos")
    _, printed, _ = deploy("--system", "--watch", "/srv/inbox")
    units = [unit for unit in printed.split("# /etc/systemd/system/") if ".service\n" in unit]
    writable = {unit.partition("\n")[0]: re.findall("ReadWritePaths=(.*)", unit) for unit in units}
    assert writable == {
        "svdq-redis.service": ["/srv/svdq"],
        "svdq-worker.service": ["/srv/svdq /home/videos"],
        "svdq-night.service": ["/srv/svdq /home/videos"],
        "svdq-watch.service": ["/srv/svdq /home/videos /srv/inbox"],
    }
    # A folder below /home that is hidden could not be written to.
    assert all("\nProtectHome=read-only\n" in unit for unit in units)


def test_a_changed_unit_is_not_written_over(deploy: Deploy, install: Callable[..., Path]) -> None:
    folder = install("--user")
    before = {path.name: path.read_text() for path in folder.iterdir()}
    install("--user")  # nothing differs
    (folder / "svdq-worker.service").write_text("mine")
    arguments = ["--user", "--install", "--folder", folder]
    code, _, error = deploy(*arguments, "--", "--ranks", "2")
    assert code == 2
    assert "svdq-worker.service" in error
    assert (folder / "svdq-worker.service").read_text() == "mine"
    assert (folder / "svdq-night.service").read_text() == before["svdq-night.service"]
    assert deploy(*arguments, "--force")[0] == 0
    assert {path.name: path.read_text() for path in folder.iterdir()} == before


def test_wrong_options_of_the_worker_are_told_before_anything_is_written(deploy: Deploy, tmp_path: Path) -> None:
    folder = tmp_path / "units"
    code, _, error = deploy("--user", "--install", "--folder", folder, "--", "--rnaks", "7")
    assert code == 2
    assert "--rnaks" in error
    assert not folder.exists()
    assert deploy()[0] == 2


@pytest.mark.long
def test_units_run(
    svdq: Cli,
    install: Callable[..., Path],
    supervise: Callable[[Path], Any],
    photo: Path,
    tmp_path: Path,
    until: Callable[..., None],
) -> None:
    config = tmp_path / "config/svdq/environment"
    config.parent.mkdir(parents=True)
    config.write_text("SVDQ_MODEL=simulated:step_ms=1000\n")
    inbox = tmp_path / "in box"
    inbox.mkdir()
    folder = install("--user", "--watch", inbox, "--", "--ranks", "1", "--device", "cpu")
    server, worker, watch = (supervise(folder / f"svdq-{name}.service") for name in ("redis", "worker", "watch"))

    # A server that a command has started makes room, and its jobs are in that of the unit.
    parameters = ["--frames", "2", "--size", "64x64", "--format", "gif"]
    [first] = svdq("submit", photo, *parameters).stdout.split()[:1]
    server.start()
    with redis.Redis.from_url(svdq("redis", "url").stdout.strip()) as connection:
        assert view(connection, first).status == "queued"

        watch.start()
        Image.effect_noise((96, 64), 60).convert("RGB").save(inbox / "second.png")
        until(lambda: connection.llen("rq:queue:svdq-default") == 2, watch.said)

        worker.start()
        until(lambda: view(connection, first).step > 0, worker.said)
        assert len(worker.processes()) >= 3  # the launcher, torchrun and a rank
        assert worker.stop() == 0, worker.said()
        assert gone(worker.processes())
        assert connection.llen("rq:queue:svdq-default") == 2, worker.said()
        assert view(connection, first).status == "queued"
        assert watch.stop() == 0, watch.said()

    # The queue outlives its server.
    server.stop()
    assert gone(server.processes())
    assert svdq("redis", "url").returncode == 1
    server.start()
    assert "svdq-default  2 " in svdq("status").stdout

    # Wrong settings are no reason to start it again and again.
    config.write_text("SVDQ_MODEL=/no/such/model\n")
    worker.start()
    assert str(worker.wait()) == worker.one("RestartPreventExitStatus") == "2"
    server.stop()


@pytest.mark.long
def test_a_night(
    svdq: Cli, install: Callable[..., Path], supervise: Callable[[Path], Any], settings: Settings, photo: Path
) -> None:
    folder = install("--user", "--", "--ranks", "1", "--device", "cpu")
    server, night = (supervise(folder / f"svdq-{name}.service") for name in ("redis", "night"))
    server.start()
    assert svdq("submit", photo, "--frames", "2", "--size", "64x64", "--name", "the-photo").returncode == 0
    night.start()
    assert night.wait() == 0, night.said()
    assert gone(night.processes())
    assert "1 finished, 0 failed" in night.said()
    assert "the-photo" in (settings.home / "last-night.json").read_text()
    server.stop()


def gone(processes: list[psutil.Process]) -> bool:
    return not [process for process in processes if process.status() != psutil.STATUS_ZOMBIE]
