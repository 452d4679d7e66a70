"""The units in deploy/systemd: systemd accepts them, and their services start and stop."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from PIL import Image

from svdq.producer.status.job_view import view
from svdq.worker.launcher.launcher import STOP_S
from svdq.worker.launcher.torchrun import KILL_S

Cli = Callable[..., "subprocess.CompletedProcess[str]"]
Install = Callable[..., Path]
ROOT = Path(__file__).parents[2]
NAMES = {"svdq-redis.service", "svdq-worker.service", "svdq-night.service", "svdq-night.timer"}
OPTIONAL = {"svdq-watch.service", "svdq-serve.service"}
HARDENED = sorted(name for name in NAMES | OPTIONAL if name.endswith(".service"))

#: The units are for the embedded server.
pytestmark = pytest.mark.usefixtures("own_server")

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")


@pytest.fixture
def install(home: Path, tmp_path: Path) -> Install:
    """Install the units as docs/deploy.md does, for a user whose configuration is in <tmp_path>/config."""

    def call(scope: str = "user", **options: str) -> Path:
        folder = tmp_path / "config/systemd" / scope
        shutil.copytree(ROOT / "deploy/systemd", folder, ignore=lambda _, names: {"systemd.env"} & {*names})
        for path in folder.glob("svdq*.d/system*.conf") if scope == "user" else ():
            path.unlink()
        text = (ROOT / "deploy/systemd/systemd.env").read_text()
        values = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(home), "SVDQ_HOME": str(home)}
        values |= {"SVDQ_REDIS_URL": f"unix://{home}/redis/redis.sock"} | options
        for name, value in values.items():
            text = re.sub(f"^{name}=.*$", f'{name}="{value}"', text, flags=re.MULTILINE)
        (tmp_path / "config/svdq").mkdir()
        (tmp_path / "config/svdq/systemd.env").write_text(text)
        return folder

    return call


@needs_systemd
@pytest.mark.parametrize("scope", ["system", "user"])
def test_systemd_accepts_the_units(install: Install, tmp_path: Path, scope: str) -> None:
    folder = install(scope)
    units = [folder / name for name in sorted(NAMES | OPTIONAL)]

    def verify() -> str:
        command = ["systemd-analyze", "verify", "--man=no", f"--{scope}", *map(str, units)]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
        )
        return done.stdout + done.stderr

    assert verify() == ""
    with (folder / "svdq-.service.d/hardening.conf").open("a") as drop_in:
        drop_in.write("\n[Service]\nNoSuchSetting=yes\n")
    assert "NoSuchSetting" in verify()


@needs_systemd
@pytest.mark.parametrize("name", HARDENED)
def test_units_of_the_machine_are_hardened(install: Install, name: str) -> None:
    path = install("system") / name
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=25", "--no-pager", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-200:]


def test_programs_and_options_in_the_units_are_there(
    install: Install, supervise: Callable[[Path], Any], check_command: Callable[[list[str]], None]
) -> None:
    folder = install(INBOX="/srv/in box", WORKER_OPTIONS="--ranks 7 --warmup 1024x576x25")
    found = []
    for path in sorted(folder.glob("*.service")):
        unit = supervise(path)
        for line in [*unit.all("ExecStartPre"), *unit.all("ExecStart")]:
            program, *words = unit.command(line)
            assert os.access(program, os.X_OK)
            if program == "/usr/bin/env":
                svdq, *words = words
                assert shutil.which(svdq, path=unit.environment()["PATH"])
                check_command(words)
                found.append(words)
        if path.name in ("svdq-worker.service", "svdq-night.service"):
            assert int(unit.one("TimeoutStopSec")) > STOP_S + KILL_S
    assert len(found) == 6
    assert ["worker", "--ranks", "7", "--warmup", "1024x576x25"] in found
    assert any(words[:2] == ["watch", "/srv/in box"] for words in found)


def test_the_queue_and_the_watched_folder_run(
    svdq: Cli,
    install: Install,
    supervise: Callable[[Path], Any],
    photo: Path,
    tmp_path: Path,
    until: Callable[..., None],
) -> None:
    inbox = tmp_path / "in box"
    inbox.mkdir()
    folder = install(INBOX=str(inbox))
    server, watch = (supervise(folder / f"svdq-{name}.service") for name in ("redis", "watch"))

    # A server that a command has started makes room, and its jobs are in that of the unit.
    [first] = svdq("submit", photo).stdout.split()[:1]
    server.start()
    with redis.Redis.from_url(svdq("redis", "url").stdout.strip()) as connection:
        assert view(connection, first).status == "queued"
        watch.start()
        Image.effect_noise((96, 64), 60).convert("RGB").save(inbox / "second.png")
        until(lambda: connection.llen("rq:queue:svdq-default") == 2, watch.said)
        assert watch.stop() == 0, watch.said()

    # The queue outlives its server.
    server.stop()
    assert gone(server.processes())
    assert svdq("redis", "url").returncode == 1
    server.start()
    assert re.search("svdq-default +2 ", svdq("status").stdout)
    server.stop()


def test_the_web_page_runs(install: Install, supervise: Callable[[Path], Any], tmp_path: Path) -> None:
    folder = install()
    (tmp_path / "config/svdq/environment").write_text('SERVE_OPTIONS="--port 0"\n')
    redis_unit, unit = (supervise(folder / f"svdq-{name}.service") for name in ("redis", "serve"))
    redis_unit.start()
    unit.start()  # until it is ready
    assert "serve-token)" in unit.said()
    assert unit.stop() == 0, unit.said()
    assert gone(unit.processes())
    redis_unit.stop()


@pytest.mark.long
def test_the_worker_runs(
    svdq: Cli,
    install: Install,
    supervise: Callable[[Path], Any],
    photo: Path,
    tmp_path: Path,
    until: Callable[..., None],
) -> None:
    folder = install(WORKER_OPTIONS="--ranks 1 --device cpu")
    config = tmp_path / "config/svdq/environment"
    config.write_text("SVDQ_MODEL=simulated:step_ms=1000\n")
    server, worker = (supervise(folder / f"svdq-{name}.service") for name in ("redis", "worker"))
    server.start()
    [job_id] = svdq("submit", photo, "--frames", "2", "--size", "64x64", "--format", "gif").stdout.split()[:1]
    with redis.Redis.from_url(svdq("redis", "url").stdout.strip()) as connection:
        worker.start()
        until(lambda: view(connection, job_id).step > 0, worker.said)
        assert len(worker.processes()) >= 3  # the launcher, torchrun and a rank
        assert worker.stop() == 0, worker.said()
        assert gone(worker.processes())
        assert connection.llen("rq:queue:svdq-default") == 1, worker.said()
        assert view(connection, job_id).status == "queued"

    # Wrong settings are no reason to start it again and again.
    config.write_text("SVDQ_MODEL=/no/such/model\n")
    worker.start()
    assert str(worker.wait()) == worker.one("RestartPreventExitStatus") == "2"
    server.stop()


def gone(processes: list[psutil.Process]) -> bool:
    return not [process for process in processes if process.status() != psutil.STATUS_ZOMBIE]
