"""Where a campaign takes place: a home with Redis, jobs with what is expected of them, workers, and faults counted."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import redis
from PIL import Image
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from svdq.producer.job import Job
from svdq.producer.queue import ENDED, fetch, read_job
from svdq.producer.settings_loader import load_settings
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.submission import submit
from tests.faults.bucket import Bucket
from tests.faults.frames import Reference, SimulatedReference
from tests.faults.group import STOP_S, Group
from tests.faults.plan import FINISHED, Expected, Size, Tally
from tests.faults.publications import Publications
from tests.faults.redis_process import RedisProcess
from tests.faults.small_disk import SmallDisk
from tests.waiting import PATIENCE_S, NeverCameError, wait_until

INJECTION = Path(__file__).parent / "injection"  # folder on the PYTHONPATH of workers into whose ranks faults are put


def faults_by_seed(seeds: str) -> dict[str, str]:
    """Return the environment of ranks in which videos of some seeds do harm, such as `kill=13,nan=5`."""
    return {"PYTHONPATH": str(INJECTION), "FAULTS_AT": "seeds", "FAULTS_SEEDS": seeds}


#: A job of LTX-2, distilled, in two stages.
LTX = {"family": "ltx", "steps": 11, "stages": 2, "frames": 9, "fps": 24, "prompt": "Ein Hund bellt."}
PHOTO = "photo.jpg"  # the photo of most jobs; the simulated model does not look at it


class Arena:
    """One campaign's world, in a temporary folder of its own."""

    def __init__(self, *, size: Size, seed: int, model: str, own_disk: bool = False, in_bucket: bool = False) -> None:
        """Build it and start its Redis.

        Args:
            size: how large the campaign is.
            seed: of everything that is random here.
            model: the workers' SVDQ_MODEL.
            own_disk: put the storage on a small disk of its own, if that is allowed.
            in_bucket: put the storage into a bucket, which is copied to `storage` at the end.
        """
        self.size = size
        self.rng = Random(seed)
        self.model = model
        #: More options of workers that are started from now on.
        self.options: Sequence[str] = ()
        self.folder = Path(tempfile.mkdtemp(prefix="svdq-faults-"))
        home = self.folder / "home"
        self.tmp = self.folder / "tmp"
        for folder in (home, self.tmp, reference := self.folder / "reference"):
            folder.mkdir()
        self.redis = RedisProcess(home)
        self.settings = load_settings(home=home, model=model, redis_url=self.redis.url)
        self.storage = Path(self.settings.storage)
        self.bucket = Bucket() if in_bucket else None
        if self.bucket is not None:
            self.settings = self.settings.model_copy(update={"storage": self.bucket.url})
        self.storage.mkdir()
        self.disk = SmallDisk(self.storage) if own_disk else None
        (self.storage / "outputs").mkdir()
        self.publications = Publications(self.storage / "outputs")
        self.reference: Reference = SimulatedReference(reference, self.job_of)
        # The harness outlives every fault: it asks for a minute.
        self.connection = redis.Redis.from_url(self.redis.url, retry=Retry(ConstantBackoff(0.1), 600))
        self.jobs: dict[str, Expected] = {}
        #: Status and worker of jobs that have ended.
        self._ended: dict[str, tuple[str, str]] = {}
        self.groups: list[Group] = []
        self.tally = Tally()
        self.photo(PHOTO)

    # Photos, jobs and workers.

    def photo(self, name: str) -> Path:
        """Make a photo of its own content."""
        path = self.folder / name
        Image.effect_noise((96, 64), 60).convert("RGB").save(path)
        return path

    def submit(
        self,
        *,
        steps: int,
        photo: str = PHOTO,
        seed: int | None = None,
        expected: Expected = FINISHED,
        owner: str = "",
        **more: object,
    ) -> str:
        """Submit a small job, for this user or for another owner; return its id."""
        settings = self.settings.model_copy(update={"owner": owner or self.settings.owner})
        seed = self.rng.getrandbits(31) if seed is None else seed
        options = {"frames": 2, "width": 64, "height": 64, "formats": ("mp4",), **more}
        submitted = submit(settings, [self.folder / photo], Draft(steps=steps, seed=seed, **options), force=True)
        self.jobs[submitted[0].id] = expected
        return submitted[0].id

    def submit_next(self, **more: Any) -> str:
        """Submit a job that is to finish: of the simulated model each third one is of LTX-2."""
        is_ltx = self.model.startswith("simulated") and "frames" not in more and len(self.jobs) % 3 == 1
        return self.submit(**more | (LTX if is_ltx else {}))

    def submit_all(self, **more: Any) -> None:
        """Submit as many jobs as the campaign has."""
        for _ in range(self.size.num_jobs):
            self.submit_next(**more)

    def may_name_hosts(self) -> bool:
        """Return whether this user may give processes another host name; if not, the campaign fails and says so."""
        is_refused = subprocess.run(["unshare", "--uts", "hostname", "host0"], capture_output=True).returncode != 0
        if is_refused:
            self.tally.broken.append("no right to give processes another host name")
        return not is_refused

    def start(self, *, embedded: bool = False, host: str | None = None, wait: bool = True, **environment: str) -> Group:
        """Start a worker and wait until it takes jobs.

        Args:
            embedded: the workers take the server for their own, and start it again when it is gone.
            host: another host name, for a worker that shares nothing but Redis and the storage.
            wait: whether to wait for that.
            environment: more variables.
        """
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SVDQ_")}
        own = {
            "SVDQ_HOME": str(self.settings.home),
            "SVDQ_STORAGE": self.settings.storage,
            "SVDQ_MODEL": self.model,
            "TMPDIR": str(self.tmp),
        }
        if not embedded:
            own["SVDQ_REDIS_URL"] = self.redis.url
        under: Sequence[str] = ()
        if host is not None:
            under = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host)
            own["SVDQ_HOME"] = str(self.settings.home / host)
        log = self.folder / f"worker{len(self.groups)}.log"
        group = Group(["--ranks", self.size.ranks, *self.options], log, self.folder, clean | own | environment, under)
        self.groups.append(group)
        return group.ready() if wait else group

    def start_with(self, where: str, **environment: str) -> tuple[Group, Path]:
        """Start a worker into whose ranks faults are put; return it and the folder that controls them."""
        folder = self.folder / where
        folder.mkdir(exist_ok=True)
        return self.start(PYTHONPATH=str(INJECTION), FAULTS_AT=where, FAULTS_FOLDER=str(folder), **environment), folder

    # How jobs stand.

    def states(self) -> dict[str, tuple[str, str]]:
        """Give status and worker of every job; those that have ended are not asked about again before the end."""
        self.publications.counts()
        asked = [job_id for job_id in self.jobs if job_id not in self._ended]
        with self.connection.pipeline(transaction=False) as pipeline:
            for job_id in asked:
                pipeline.hmget(f"rq:job:{job_id}", "status", "worker_name")
            answers = pipeline.execute()
        states = dict(self._ended)
        for job_id, (status, worker) in zip(asked, answers, strict=True):
            states[job_id] = ((status or b"gone").decode(), (worker or b"").decode())
        self._ended = {job_id: state for job_id, state in states.items() if state[0] in ENDED}
        return states

    def forget_ends(self) -> None:
        """Ask again about every job: what Redis says of them has changed."""
        self._ended.clear()

    def num_ended(self) -> int:
        """Count the jobs that have ended."""
        return sum(status in ENDED for status, _ in self.states().values())

    def all_ended(self) -> bool:
        """Whether every job has."""
        return self.num_ended() == len(self.jobs)

    def step_of(self, job_id: str) -> int:
        """Give the step at which a job was seen last."""
        return int(fetch(self.connection, job_id).meta.get("step", 0))

    def job_of(self, job_id: str) -> Job:
        """Give the parameters of a job as they were submitted."""
        job = read_job(fetch(self.connection, job_id))
        assert job is not None
        return job

    # Faults.

    def breathe(self, least_s: float, most_s: float) -> None:
        """Let the workers work for a random time, less when all jobs have ended."""
        until = time.monotonic() + self.rng.uniform(least_s, most_s)
        while time.monotonic() < until and not self.all_ended():
            time.sleep(0.1)

    def strike(self, fault: Callable[[], float | None], *, kills: bool = True) -> None:
        """Inject a fault while jobs are in flight, and wait until the workers have recovered from it.

        Args:
            fault: does it; may return the moment from which the recovery counts, if not from its beginning.
            kills: whether the jobs in flight must be taken by another worker; else it is enough that any job moves.
        """
        wait_until(lambda: self._in_flight() or self.all_ended(), "a job is in flight", PATIENCE_S)
        before = self.states()
        in_flight = [job_id for job_id, (status, _) in before.items() if status == "started"]
        if not in_flight:
            return
        began_at = time.monotonic()
        began_at = fault() or began_at
        self.tally.num_faults += 1
        if self.all_ended():
            return  # it was outlived: nothing is left to recover
        if not kills:
            before = self.states()

        def recovered() -> bool:
            now = self.states()
            if kills:  # taken again, or ended
                return all(
                    now[job_id][0] in ENDED or _is_taken_anew(before[job_id], now[job_id]) for job_id in in_flight
                )
            return now != before

        try:
            wait_until(recovered, "jobs in flight at a fault are in work again")
            self.tally.recoveries_s.append(time.monotonic() - began_at)
        except NeverCameError as error:
            self.tally.broken.append(str(error))

    def _in_flight(self) -> bool:
        return any(status == "started" for status, _ in self.states().values())

    # The end.

    def settle(self) -> None:
        """Wait until all jobs have ended or nothing moves any more, and have the workers end in order."""
        before, since = -1, time.monotonic()
        while (ended := self.num_ended()) < len(self.jobs) and time.monotonic() - since < PATIENCE_S:
            if ended != before:
                before, since = ended, time.monotonic()
            time.sleep(0.1)
        for group in self.groups:
            if group.runs:
                self.stop(group)
        if self.bucket is not None:
            self.bucket.copy_to(self.storage)

    def published(self) -> Counter[str]:
        """Count how often each file was published."""
        return self.publications.counts() if self.bucket is None else self.bucket.counts()

    def stop(self, group: Group, number: signal.Signals = signal.SIGTERM) -> None:
        """Have a worker end in order: exit code 0 within what an init system grants."""
        code, took_s = group.stop(number)
        if code != 0 or took_s > STOP_S:
            self.tally.broken.append(f"on {number.name} a worker ended with {code} after {took_s:.1f} s")

    def leave(self, *, keep: bool) -> None:
        """End what is left, and remove the folder unless it is to be looked at."""
        for group in self.groups:
            if group.runs:
                with contextlib.suppress(AssertionError):
                    group.kill_all()
        self.connection.close()
        self.publications.close()
        self.redis.stop()
        if self.bucket is not None:
            self.bucket.stop()
        if self.disk is not None:
            self.disk.unmount()
        if not keep:
            shutil.rmtree(self.folder, ignore_errors=True)


def _is_taken_anew(before: tuple[str, str], now: tuple[str, str]) -> bool:
    return now[0] == "started" and now[1] != before[1]
