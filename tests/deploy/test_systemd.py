"""`svdq deploy systemd`: systemd accepts the units, and their services start and stop."""

import importlib.util
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

from svdq.cli.main import run
from svdq.producer.status.job_view import view
from svdq.worker.launcher.launcher import STOP_S
from svdq.worker.launcher.torchrun import KILL_S
from tests.conftest import Cli

Deploy = Callable[..., tuple[int, str, str]]
NAMES = {"svdq-redis.service", "svdq-worker.service", "svdq-night.service", "svdq-night.timer"}
OPTIONAL = {"svdq-watch.service", "svdq-serve.service"}
HARDENED = sorted(name for name in NAMES | OPTIONAL if name.endswith(".service"))

pytestmark = pytest.mark.usefixtures("own_server")  # the units are for the embedded server

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")


@pytest.fixture
def deploy(home: Path, capsys: pytest.CaptureFixture[str]) -> Deploy:
    """Run `svdq deploy systemd`: exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = run(["deploy", "systemd", *map(str, arguments)])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def install(deploy: Deploy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """Install the units of a user whose configuration is in <tmp_path>/config."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def call(*arguments: object) -> Path:
        code, _, error = deploy("--user", "--install", *arguments)
        assert (code, error) == (0, "")
        return tmp_path / "config/systemd/user"

    return call


@pytest.fixture
def unpack(deploy: Deploy, tmp_path: Path) -> Callable[..., Path]:
    """Write the files that are printed for the machine into a folder."""

    def call(*arguments: object) -> Path:
        for name, text in printed(deploy("--system", *arguments)[1]).items():
            path = tmp_path / "units" / name.removeprefix("/etc/systemd/system/").lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path / "units"

    return call


def printed(text: str) -> dict[str, str]:
    """The text of each printed file."""
    parts = re.split(r"^# (/\S+)\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.nightly
@needs_systemd
@pytest.mark.parametrize("scope", ["system", "user"])
def test_systemd_accepts_the_units(
    install: Callable[..., Path],
    unpack: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    scope: str,
) -> None:
    monkeypatch.setenv("SVDQ_HOME", "/srv/a home")
    put = unpack if scope == "system" else install
    inbox = tmp_path / 'in $box, 100% "mine"'
    inbox.mkdir()
    folder = put("--serve", "--watch", inbox, "--", "--warmup", "1024x576x25")
    units = [folder / name for name in sorted(NAMES | OPTIONAL)]

    def verify() -> str:
        command = ["systemd-analyze", "verify", "--man=no", f"--{scope}", *map(str, units)]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
        )
        return done.stdout + done.stderr

    assert verify() == ""
    with (folder / "svdq-.service.d/local.conf").open("a") as drop_in:
        drop_in.write("\n[Service]\nNoSuchSetting=yes\n")
    assert "NoSuchSetting" in verify()


@pytest.mark.nightly
@needs_systemd
@pytest.mark.parametrize("name", HARDENED)
def test_units_of_the_machine_are_hardened(unpack: Callable[..., Path], name: str) -> None:
    path = unpack("--watch", "/srv/inbox", "--serve") / name
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=25", "--no-pager", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-200:]


@pytest.mark.nightly
def test_programs_and_options_in_the_units_are_there(
    install: Callable[..., Path],
    supervise: Callable[[Path], Any],
    check_command: Callable[[list[str]], None],
    tmp_path: Path,
) -> None:
    inbox = tmp_path / 'in $box, 100% "mine"'
    inbox.mkdir()
    folder = install("--watch", inbox, "--serve", "--", "--ranks", "7", "--warmup", "1024x576x25")
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
    assert any(words[:2] == ["watch", str(inbox)] for words in found)


def test_settings_are_taken_over_but_for_secrets(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("SVDQ_MODEL", "/models/svd xt")
    monkeypatch.setenv("SVDQ_STORAGE", "s3://key:hidden-1@bucket/x")
    monkeypatch.setenv("SVDQ_REDIS_URL", "redis://:hidden-2@127.0.0.1:1/0")
    monkeypatch.setenv("SVDQ_SERVE_TOKEN", "hidden-3-of-the-tests")
    _, shown, _ = deploy("--user", "--install")
    files = {path.name: path.read_text() for path in (tmp_path / "config").rglob("*") if path.is_file()}
    assert "svdq-redis.service" not in files
    environment = files["systemd.env"]
    assert 'SVDQ_MODEL="/models/svd xt"\n' in environment
    assert "SVDQ_REDIS_URL" not in environment
    assert "SVDQ_STORAGE" not in environment
    assert "EnvironmentFile=-%E/svdq/environment\n" in files["svdq-worker.service"]
    assert f"# write SVDQ_REDIS_URL, SVDQ_STORAGE, SVDQ_SERVE_TOKEN into {tmp_path}/config/svdq/environment" in shown
    assert "hidden" not in shown + "".join(files.values())


def test_a_worker_beside_a_page_sleeps_unless_something_else_is_set(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "SVDQ_ON_DEMAND" not in deploy("--user")[1]
    assert "\nSVDQ_ON_DEMAND=10m\n" in deploy("--user", "--serve")[1]
    monkeypatch.setenv("SVDQ_ON_DEMAND", "off")
    assert "\nSVDQ_ON_DEMAND=off\n" in deploy("--user", "--serve")[1]


@pytest.mark.parametrize("name", ["models/svd", "models/other", "preview"])
def test_services_find_a_model_in_the_working_folder(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    Path("models/svd").mkdir(parents=True)
    monkeypatch.setenv("SVDQ_MODEL", name)
    model = str(Path(name).absolute()) if Path(name).exists() else name
    assert f"\nSVDQ_MODEL={model}\n" in deploy("--user")[1]


def test_only_what_it_writes_to_is_writable(deploy: Deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SVDQ_HOME", "/srv/svdq")
    monkeypatch.setenv("SVDQ_STORAGE", "/home/videos")
    files = printed(deploy("--system", "--watch", "/srv/inbox", "--run-as", "videos")[1])
    local = files["/etc/systemd/system/svdq-.service.d/local.conf"]
    assert "ReadWritePaths=-/srv/svdq -/home/videos -/srv/inbox\n" in local
    assert "RequiresMountsFor=/srv/svdq /home/videos /srv/inbox\n" in local
    assert "User=videos\n" in local
    # A folder below /home that is hidden could not be written to.
    assert "ProtectHome=read-only\n" in files["/etc/systemd/system/svdq-.service.d/system.conf"]


def test_a_changed_unit_is_not_written_over(deploy: Deploy, install: Callable[..., Path]) -> None:
    folder = install()
    before = {path.name: path.read_text() for path in folder.rglob("*") if path.is_file()}
    install()  # nothing differs
    (folder / "svdq-worker.service").write_text("mine")
    code, _, error = deploy("--user", "--install", "--", "--ranks", "2")
    assert code == 2
    assert "svdq-worker.service" in error
    assert "systemd.env" in error
    assert (folder / "svdq-worker.service").read_text() == "mine"
    assert deploy("--user", "--install", "--force")[0] == 0
    assert {path.name: path.read_text() for path in folder.rglob("*") if path.is_file()} == before


def test_wrong_options_of_the_worker_are_refused_before_writing(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    code, _, error = deploy("--user", "--install", "--", "--rnaks", "7")
    assert code == 2
    assert "--rnaks" in error
    code, _, error = deploy("--user", "--install", "--watch", "~nobody-here/x")
    assert (code, error.count("\n")) == (2, 1)
    assert "'~nobody-here/x'" in error
    code, _, error = deploy("--user", "--install", "--watch", str(tmp_path / "inbox"))
    assert (code, error.count("\n")) == (2, 1)
    assert f"no folder '{tmp_path / 'inbox'}'" in error
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, _, error = deploy("--user", "--install", "--serve")
    assert (code, error.count("\n")) == (2, 1)
    assert "[serve]" in error
    assert not (tmp_path / "config").exists()
    assert deploy()[0] == 2


@pytest.fixture
def systemctl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine that systemd runs: its systemctl lists its calls in this file, or fails as a file `fails` says."""
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(f"""#!/bin/sh
echo "$@" >> {tmp_path}/calls
test ! -e {tmp_path}/fails || {{ cat {tmp_path}/fails >&2; exit 1; }}
""")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("svdq.cli.units.BOOTED", tmp_path)
    return tmp_path / "calls"


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def test_what_was_installed_is_removed_and_nothing_else(
    deploy: Deploy, install: Callable[..., Path], systemctl: Path, home: Path, tmp_path: Path
) -> None:
    folder = install("--serve", "--", "--ranks", "2")
    own = ("svdq/environment", "systemd/user/svdq-worker.service.d/override.conf", "systemd/user/svdq-mine.service")
    for name in own:
        path = tmp_path / "config" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    wanted = folder / "timers.target.wants" / "svdq-night.timer"  # as without systemd, where nothing disables it
    wanted.parent.mkdir()
    wanted.symlink_to("../svdq-night.timer")
    home.mkdir()
    code, shown, error = deploy("--user", "--remove")
    assert (code, error) == (0, "")
    assert f"{folder / 'svdq-worker.service'}: removed\n" in shown
    assert "Kept: the queue, photos and videos" in shown
    assert files_in(tmp_path / "config") == sorted(own)
    assert not (folder / "svdq-.service.d").exists()
    assert home.is_dir()
    stopped = ["svdq-night.service", "svdq-night.timer", "svdq-redis.service", "svdq-serve.service"]
    assert systemctl.read_text().splitlines() == [
        f"--user disable --now {' '.join(stopped)} svdq-worker.service",
        "--user daemon-reload",
    ]
    assert deploy("--user", "--remove") == (0, f"There are no units of svdq in {folder}.\n", "")


def test_nothing_is_removed_that_may_not_be(
    deploy: Deploy, install: Callable[..., Path], systemctl: Path, tmp_path: Path
) -> None:
    folder = install()
    before = files_in(tmp_path / "config")

    def refused(reason: str, *options: str) -> None:
        code, shown, error = deploy("--user", "--remove", *options)
        assert (code, shown, error.count("\n")) == (2, "", 1)
        assert reason in error
        assert files_in(tmp_path / "config") == before

    refused("takes --user or --system and --force alone", "--install")
    (tmp_path / "fails").write_text("Failed to connect to bus\n")
    refused("(Failed to connect to bus)")
    (tmp_path / "fails").unlink()
    (folder / "svdq-worker.service").write_text("mine")
    refused("svdq-worker.service is not as this svdq writes it")
    assert deploy("--user", "--remove", "--force")[0] == 0
    assert files_in(tmp_path / "config") == []


def test_a_program_that_the_user_cannot_enter_is_named(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a private home: the units would fail again and again."""
    monkeypatch.setattr("svdq.cli.units.config_folder", lambda scope: tmp_path / "etc")
    monkeypatch.setattr(sys, "executable", "/usr/bin/env")
    program = tmp_path / "ana" / "venv" / "bin" / "svdq"
    program.parent.mkdir(parents=True)
    (tmp_path / "ana").chmod(0o750)
    monkeypatch.setattr("svdq.cli.deploy.installed_program", lambda: program)
    code, shown, _ = deploy("--system", "--install")
    assert code == 0
    assert f"svdq cannot enter {tmp_path / 'ana'}: install svdq where it can, such as in /opt/svdq" in shown
    monkeypatch.setattr("svdq.cli.deploy.installed_program", lambda: Path("/usr/bin/env"))
    assert "cannot enter" not in deploy("--system", "--install")[1]


@pytest.mark.parametrize("name", ["", "a b", "x\nUser=root", "%i"])
def test_the_name_of_no_user_is_refused(deploy: Deploy, name: str) -> None:
    code, shown, error = deploy("--system", "--run-as", name)
    assert (code, shown, error.count("\n")) == (2, "", 1)
    assert "--run-as" in error


@pytest.mark.nightly
def test_the_queue_and_the_watched_folder_run(
    svdq: Cli,
    install: Callable[..., Path],
    supervise: Callable[[Path], Any],
    photo: Path,
    tmp_path: Path,
    until: Callable[..., None],
) -> None:
    inbox = tmp_path / "in box"
    inbox.mkdir()
    folder = install("--watch", inbox)
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


@pytest.mark.nightly
def test_the_web_page_runs(install: Callable[..., Path], supervise: Callable[[Path], Any], tmp_path: Path) -> None:
    folder = install("--serve")
    (tmp_path / "config/svdq/environment").write_text('SERVE_OPTIONS="--port 0"\n')
    redis_unit, unit = (supervise(folder / f"svdq-{name}.service") for name in ("redis", "serve"))
    redis_unit.start()
    unit.start()  # until it is ready
    assert "serve-token)" in unit.said()
    assert unit.stop() == 0, unit.said()
    assert gone(unit.processes())
    redis_unit.stop()


@pytest.mark.nightly
def test_the_worker_runs(
    svdq: Cli,
    install: Callable[..., Path],
    supervise: Callable[[Path], Any],
    photo: Path,
    tmp_path: Path,
    until: Callable[..., None],
) -> None:
    folder = install("--", "--ranks", "1", "--device", "cpu")
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
