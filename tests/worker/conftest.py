"""A home with a real Redis and real `svdq worker` processes, for the worker's tests."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import redis
from PIL import Image
from rq.worker import WorkerStatus

from svdq.pipeline.models.video_model import ModelInfo
from svdq.pipeline.video_parameters import VideoParameters
from svdq.producer.connection import connect, server_url
from svdq.producer.embedded_redis import stop_server
from svdq.producer.settings import Settings
from svdq.producer.status.job_view import JobView, view, view_many
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.submission import submit
from svdq.worker import outages
from svdq.worker.intake.prefetcher import IntakeOptions
from svdq.worker.intake.source import Intake
from svdq.worker.memory_plan import MemoryPlan, RankInfo
from svdq.worker.queue.group_worker import GroupWorker
from tests import forks
from tests.faults.frames import read_frames
from tests.faults.group import Group
from tests.upscaling import torchvision, write_torchvision, write_upscaler
from tests.waiting import PATIENCE_S, wait_until

#: Where pip puts console scripts; not resolved, for a venv's python is a link out of it.
SCRIPTS = Path(sys.executable).parent


def with_frames(parameters: VideoParameters) -> VideoParameters:
    """Fill in nine frames."""
    return parameters.model_copy(update={"frames": parameters.frames or 9})


@dataclass
class Site:
    """A home of svdq's: settings, photos, jobs and worker groups."""

    folder: Path
    settings: Settings
    connection: redis.Redis
    photo: Path
    groups: list[Group] = field(default_factory=list)

    def environment(self, **more: str) -> dict[str, str]:
        """The user's environment."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SVDQ_")}
        server = {"SVDQ_REDIS_URL": self.settings.redis_url} if self.settings.redis_url else {}
        return {**clean, "SVDQ_HOME": str(self.settings.home), **server, **more}

    def run(self, program: str, *arguments: object, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Run a console script to its end."""
        if program == "svdq" and forks.can_fork(environment):
            return forks.run(*map(str, arguments), folder=self.folder, **self.environment(**environment))
        return subprocess.run(
            [str(SCRIPTS / program), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S * 2,
            cwd=self.folder,
            env=self.environment(**environment),
        )

    def start(
        self,
        ranks: int,
        *arguments: str,
        model: str = "preview",
        wait: bool = True,
        under: Sequence[str] = (),
        **environment: str,
    ) -> Group:
        """Start `svdq worker` on the processor, as a command of another program if one is given in `under`."""
        log = self.folder / f"worker{len(self.groups)}.log"
        settings = self.environment(SVDQ_MODEL=model, **environment)
        group = Group(["--ranks", ranks, *arguments], log, self.folder, settings, under)
        self.groups.append(group)
        return group.ready() if wait else group

    def submit(self, *, photo: Path | None = None, priority: str = "default", **options: object) -> str:
        """Submit a photo and return the job's id; small and quick unless asked otherwise."""
        options = {"frames": 2, "steps": 4, "width": 64, "height": 64, "formats": ("gif",), **options}
        return submit(self.settings, [photo or self.photo], Draft(**options), priority, force=True)[0].id

    def view(self, job_id: str) -> JobView:
        """Return the state of a job."""
        return view(self.connection, job_id)

    def states(self, job_ids: list[str]) -> list[str]:
        """How jobs stand."""
        views = {found.id: found.status for found in view_many(self.connection, job_ids)}
        return [views[job_id] for job_id in job_ids]

    def wait(self, job_ids: list[str]) -> list[JobView]:
        """Wait until jobs have ended."""
        wait_until(
            lambda: all(self.view(job_id).ended for job_id in job_ids),
            lambda: f"{self.states(job_ids)}\n{self.groups[-1].text if self.groups else ''}",
        )
        return [self.view(job_id) for job_id in job_ids]

    def frames(self, job_id: str) -> np.ndarray:
        """The frames of a finished job that was asked for as PNG: (F, H, W, 3), uint8."""
        found = self.view(job_id)
        assert found.status == "finished", found.error
        return read_frames(Path(found.outputs[0]))

    def sidecars(self, job_id: str = "") -> list[dict[str, Any]]:
        """The JSON files beside the videos of a job, or of all jobs."""
        outputs = Path(self.settings.storage) / "outputs"
        return [json.loads(path.read_text()) for path in outputs.glob(f"*{job_id}.json")]

    def queued(self) -> list[str]:
        """The ids that wait in the default queue, next one first."""
        return [job_id.decode() for job_id in self.connection.lrange("rq:queue:svdq-default", 0, -1)]

    def leave(self) -> None:
        """End what a failed test has left running."""
        for group in self.groups:
            if group.runs:
                group.kill_all()
        self.connection.close()
        stop_server(self.settings.home)


@pytest.fixture
def worker(connection: redis.Redis) -> Iterator[GroupWorker]:
    """A worker that is registered."""
    worker = GroupWorker(connection)
    worker.register_birth()
    worker.set_state(WorkerStatus.IDLE)
    yield worker
    worker.end()


@pytest.fixture
def dead(connection: redis.Redis) -> GroupWorker:
    """A worker whose name says that its process is gone."""
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        process.wait()
    worker = GroupWorker(connection)
    worker.name = worker.name.replace(f"-{os.getpid()}-", f"-{process.pid}-")
    worker.register_birth()
    return worker


@pytest.fixture
def site(tmp_path: Path, settings: Settings) -> Iterator[Site]:
    photo = tmp_path / "photo.jpg"
    Image.effect_noise((160, 100), 60).convert("RGB").save(photo)
    site = Site(tmp_path, settings, connect(settings), photo)
    yield site
    site.leave()


@pytest.fixture
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage that refuses is tried again at once."""
    monkeypatch.setattr(outages, "FIRST_DELAY_S", 0.01)


@pytest.fixture
def open_intake(site: Site) -> Iterator[Callable[..., Intake]]:
    """Start the intake of a group of ranks with room for everything, which the test takes requests of."""
    opened: list[tuple[Intake, redis.Redis]] = []

    def start(
        link: redis.Redis | None = None,
        checkpoints: Any = None,
        model: ModelInfo = ModelInfo(name="fake", notice=""),  # noqa: B008
        lease_connection: redis.Redis | None = None,
        storage: Storage | None = None,
        **options: Any,
    ) -> Intake:
        link = link or outages.connect(server_url(site.settings))
        unlimited = MemoryPlan([RankInfo(capacity=None, weights=0, device="cpu")], "float32")
        asked = IntakeOptions(**{"memory": unlimited, "complete": with_frames, **options})
        storage = storage or Storage(site.settings.storage)
        intake = Intake(link, storage, model, asked, checkpoints, lease_connection=lease_connection)
        opened.append((intake, link))
        intake.start()
        return intake

    yield start
    for intake, link in opened:
        intake.close(return_to_queue=True)
        for thread in threading.enumerate():
            if thread.name == "sweep":  # redis-py fails in it if its connection is closed meanwhile
                thread.join()
        link.connection_pool.disconnect()


@pytest.fixture
def no_processes_left() -> Callable[[list[psutil.Process]], None]:
    """Assert that processes are gone, or dead and only not collected by their parent."""

    def check(processes: list[psutil.Process]) -> None:
        assert processes
        alive = []
        for process in processes:
            with contextlib.suppress(psutil.Error):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
        assert alive == []

    return check


@pytest.fixture(scope="module")
def upscaler_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny upscaler."""
    with torchvision(tmp_path_factory.mktemp("torchvision")):
        return write_upscaler(tmp_path_factory.mktemp("upscaler") / "tiny.safetensors")


@pytest.fixture
def upscaler(upscaler_file: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of a worker with the upscaler."""
    return {"SVDQ_UPSCALER": str(upscaler_file), "PYTHONPATH": str(write_torchvision(tmp_path / "packages"))}
