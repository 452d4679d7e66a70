"""Nobody else gets into a running group: it listens nowhere, and its files and sockets are for its user alone."""

import contextlib
import ipaddress
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from svdq.producer.connection import connect
from svdq.producer.settings_loader import load_settings
from tests.faults.group import Group
from tests.worker.conftest import Site

pytestmark = pytest.mark.slow

NOBODY = 65534

#: What another user tries: enter every folder, read and write every file, connect to every socket.
INTRUDER = f"""
import os, socket, stat, sys
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
for path in sys.stdin.read().split("\\0"):
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISSOCK(mode):
            with socket.socket(socket.AF_UNIX) as caller:
                caller.connect(path)
        elif stat.S_ISDIR(mode):
            os.listdir(path)
        else:
            open(path, "rb").close()
    except OSError:
        continue
    print(path)
"""


def family(group: Group) -> list[psutil.Process]:
    """The launcher, torchrun, the ranks and whatever else they have started."""
    launcher = psutil.Process(group.process.pid)
    return [launcher, *launcher.children(recursive=True)]


def listening(group: Group) -> list[tuple[str, str, int]]:
    """Name of the process, address and port of all that listens on a network."""
    found = []
    for process in family(group):
        with contextlib.suppress(psutil.Error):
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN or (connection.laddr and not connection.raddr):
                    found.append((process.name(), connection.laddr.ip, connection.laddr.port))
    return found


@pytest.fixture
def open_site(site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A site in a folder that everybody can enter, and in it a folder for temporary files."""
    folder = Path(tempfile.mkdtemp(prefix="svdq-test-"))
    folder.chmod(0o755)
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(folder / "tmp"))
    settings = load_settings(home=folder / "home")
    opened = Site(folder, settings, connect(settings), site.photo)
    yield opened
    opened.leave()
    shutil.rmtree(folder)


@pytest.mark.long
def test_a_group_listens_nowhere_and_leaves_nothing_behind(open_site: Site) -> None:
    seen = []
    group = open_site.start(2, "--groups", "2", model="simulated:step_ms=5", wait=False)
    while group.text.count("Ready with") < 2 and group.process.poll() is None:
        seen += listening(group)
    group.ready(times=2)
    assert [who for who in seen if not ipaddress.ip_address(who[1]).is_loopback] == [], "while it starts"
    assert len(family(group)) >= 7, "launcher, two torchruns, four ranks"
    assert listening(group) == []
    jobs = [open_site.submit(steps=9) for _ in range(4)]
    assert [view.status for view in open_site.wait(jobs)] == ["finished"] * 4

    # A rank that dies: the ranks connect again, and still nothing listens.
    group.ranks()[1].kill()
    group.ready(times=3)
    assert listening(group) == []

    group.process.terminate()
    assert group.end() == 0, group.text
    assert list((open_site.folder / "tmp").iterdir()) == [], "torchrun's folder for logs was left at each start"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.usefixtures("own_server")
@pytest.mark.long
def test_another_user_is_refused_and_modules_in_the_folder_of_the_user_are_not_imported(open_site: Site) -> None:
    planted = open_site.folder / "planted"
    for name in ("redis", "torch", "rq", "secrets"):
        (open_site.folder / f"{name}.py").write_text(f"open({str(planted)!r}, 'a').write('{name} ')")
    group = open_site.start(2, model="simulated:step_ms=5")
    assert open_site.wait([open_site.submit()])[0].status == "finished"
    assert not planted.exists()
    home = open_site.settings.home
    run_dirs = list((home / "run").iterdir())
    paths = [str(path) for folder in (*run_dirs, home / "redis") for path in (folder, *folder.rglob("*"))]
    paths += [
        connection.laddr
        for process in family(group)
        for connection in process.net_connections("unix")
        if connection.laddr and connection.laddr.startswith("/")
    ]
    assert any(path.endswith("/store") for path in paths)
    assert any(path.endswith(".sock") for path in paths)
    for_all = open_site.folder / "for all"
    for_all.touch()
    tried = subprocess.run(
        [sys.executable, "-c", INTRUDER],
        input="\0".join([*paths, str(for_all)]),
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
        check=True,
    )
    assert tried.stdout.splitlines() == [str(for_all)]
    group.process.terminate()
    assert group.end() == 0, group.text


def test_the_command_started_as_a_module_imports_nothing_planted_either(site: Site) -> None:
    (site.folder / "click.py").write_text("raise SystemExit('planted')")
    environment = {name: value for name, value in site.environment().items() if name != "PYTHONSAFEPATH"}
    command = [sys.executable, "-m", "svdq.cli", "--version"]
    done = subprocess.run(command, cwd=site.folder, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
