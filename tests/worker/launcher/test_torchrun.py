"""A group that a plain torchrun has started, without `svdq worker`: it takes jobs, recovers, and stops in order."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from svdq.producer import keys

pytestmark = pytest.mark.long

TORCHRUN = Path(sys.executable).parent / "torchrun"


class Torchrun:
    """A running torchrun with two ranks."""

    def __init__(self, site) -> None:
        self._log = site.folder / "torchrun.log"
        command = [TORCHRUN, "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
        command += ["--max-restarts", "3", "-m", "svdq.worker", "--device", "cpu"]
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=site.folder,
                env=site.environment(SVDQ_MODEL="simulated:step_ms=50"),
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self._log.read_text()

    def ranks(self) -> list[psutil.Process]:
        found = []
        for process in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                found.append((int(process.environ()["RANK"]), process))
        return [process for _, process in sorted(found, key=lambda pair: pair[0])]


@pytest.fixture
def torchrun(site) -> Iterator[Torchrun]:
    started = Torchrun(site)
    yield started
    if started.process.poll() is None:
        for process in [*psutil.Process(started.process.pid).children(recursive=True), started.process]:
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                process.kill()
        started.process.wait()


@pytest.mark.parametrize("who_is_told", ["ranks", "torchrun"])
def test_a_group_without_a_launcher(site, torchrun: Torchrun, until, no_processes_left, who_is_told: str) -> None:
    until(lambda: "Ready with 2 ranks" in torchrun.text, lambda: torchrun.text)
    if who_is_told == "ranks":
        jobs = [site.submit(steps=40) for _ in range(3)]
        until(lambda: site.states(jobs).count("started") >= 2)
        torchrun.ranks()[1].kill()
        assert [view.status for view in site.wait(jobs)] == ["finished"] * 3
        assert torchrun.text.count("Ready with 2 ranks") == 2
        assert {site.connection.hget(f"rq:job:{job_id}", "retries_left") for job_id in jobs} == {b"3"}

    left = [site.submit(steps=600) for _ in range(3)]
    until(lambda: site.states(left).count("started") >= 2)
    ranks = torchrun.ranks()
    for process in ranks if who_is_told == "ranks" else [torchrun.process]:
        process.send_signal(signal.SIGTERM)
    until(lambda: torchrun.process.poll() is not None, lambda: torchrun.text)
    # Told itself, torchrun ends its ranks in order and then with an error of its own, whatever they did.
    assert torchrun.process.returncode == (0 if who_is_told == "ranks" else 1)
    assert "went back to the queue" in torchrun.text
    assert "exitcode" not in torchrun.text.rpartition("went back to the queue")[2], "each of them ended with 0"
    no_processes_left(ranks)
    assert site.queued() == left
    assert site.states(left) == ["queued"] * 3
    # A turn to clean up expires in seconds; the id of the database, the storages it has claimed and the owners stay.
    kept = {keys.DATABASE_ID.encode(), keys.STORAGES.encode(), keys.OWNERS.encode()}
    kept |= {keys.ABILITIES.encode(), *site.connection.scan_iter(f"{keys.ABILITY}*")}  # jobs may wait for it
    until(lambda: {*site.connection.scan_iter(f"{keys.PREFIX}*")} <= kept)
    assert site.connection.zcard("rq:wip:svdq-default") == 0
