"""Whether the process that wrote a name still runs: killed, not collected, hidden, on another host."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from svdq.producer import processes


def test_a_name_shows_whether_its_process_has_ended() -> None:
    name = processes.worker_name()
    assert not processes.is_gone(name)
    before, pid, place = name.rsplit("-", 2)
    assert processes.is_gone(f"{before}-{2**22 + 1}-{place}")
    reused = place.split(".")
    reused[1] = "1"  # the same number, started at another time
    assert processes.is_gone(f"{before}-{pid}-{'.'.join(reused)}")


@pytest.mark.parametrize("name", ["", "1", "svdq-a-b-c-d", f"svdq-{socket.gethostname()}-x-y.1.z", "a-1-x.2.c"])
def test_a_name_of_another_host_or_form_is_not_gone(name: str) -> None:
    assert not processes.is_gone(name)


def test_a_process_that_its_parent_has_not_collected_is_not_running() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert processes.is_running(process.pid) is False
    process.wait()
    assert processes.is_running(os.getpid())


def test_a_hidden_process_is_not_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with hidepid=invisible or ProtectProc=invisible, where a process of another user has no folder in /proc."""
    with subprocess.Popen(["sleep", "60"]) as process:
        before, _, place = processes.worker_name().rsplit("-", 2)
        name = f"{before}-{process.pid}-{place.split('.')[0]}.1.label"
        assert processes.is_gone(name)  # another process has its id
        monkeypatch.setattr(processes, "PROC", tmp_path)
        assert not processes.is_gone(name)
        assert processes.is_running(process.pid) is None
        process.kill()
        process.wait()
        assert processes.is_gone(name)
        assert processes.is_running(process.pid) is False


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a /proc that hides processes")
@pytest.mark.parametrize("hidepid", ["1", "2"])
def test_under_hidepid_a_worker_of_another_user_is_not_gone(hidepid: str) -> None:
    # It becomes the other user only after its imports: that user may be unable to read Python and svdq, as below /root.
    look = """
import os, sys
from svdq.producer import processes
processes.is_gone(sys.argv[1])  # loads codecs
processes.scope.cache_clear()
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
print(processes.is_gone(sys.argv[1]))
"""
    script = f'mount -t proc -o hidepid={hidepid} proc /proc && exec "$0" -c "$1" "$2"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, sys.executable, look, processes.worker_name()],
        capture_output=True,
        text=True,
    )
    if any(failed in done.stderr for failed in ("mount:", "unshare:")):
        pytest.skip(done.stderr)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_without_the_id_of_the_boot_nothing_is_certain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with systemd's ProcSubset=pid."""
    monkeypatch.setattr(processes, "PROC", tmp_path)
    processes.scope.cache_clear()
    try:
        scope = processes.scope()
        assert scope.startswith("x")
        assert processes.is_running(os.getpid(), "1", scope) is None
    finally:
        processes.scope.cache_clear()
