"""Bench runs through the whole daemon: real Redis, a real `svdq worker` and real files in a temporary home."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis
from PIL import Image

from svdq.pipeline.errors import SvdqError
from svdq.pipeline.trace import Span
from svdq.producer.connection import session
from svdq.producer.embedded_redis import ensure_server, stop_server
from svdq.producer.job import parse_job
from svdq.producer.processes import die_with_parent
from svdq.producer.queue import queue_of
from svdq.producer.settings import Settings
from svdq.producer.settings_loader import absolute_model, load_settings
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.enqueue import enqueue_many
from svdq.producer.submitting.entries import Entry
from svdq.producer.untrusted_job import UntrustedJob
from svdq.worker.bench.figures import RankMeasurements
from svdq.worker.bench.loop_runs import IDLE_S, Workload


def run_daemon(workload: Workload) -> list[RankMeasurements]:
    """Render the workload with `svdq worker`; return the measurements of each rank, or raise an SvdqError."""
    with tempfile.TemporaryDirectory(prefix="svdq-bench-") as folder:
        model = absolute_model(workload.models[0].name)
        settings = load_settings(home=Path(folder), storage=str(Path(folder, "storage")), model=model)
        try:
            # The worker of a bench takes no jobs of the user, notifies nobody, and never starts this server.
            ours = {
                "redis_url": ensure_server(settings.home),
                "notify": (),
                "webhook_url": None,
                "trace": settings.home / "trace.json",
            }
            return _run(workload, settings.model_copy(update=ours), Path(folder))
        finally:
            stop_server(settings.home)


def _run(workload: Workload, settings: Settings, folder: Path) -> list[RankMeasurements]:
    shape = workload.parameters
    photo = io.BytesIO()
    Image.effect_noise((shape.width, shape.height), 64).convert("RGB").save(photo, "png")
    with session(settings) as connection:
        key = Storage(settings.storage).put_input(photo.getvalue(), "png")
        values = [{"seed": seed, "image": key, "name": f"sample-{seed}"} for seed in range(sum(workload.bursts))]
        jobs = [parse_job(shape.model_dump() | each) for each in values]
        entries = [Entry(job=job, job_id=job.digest(seed_was_drawn=False)) for job in jobs]
        num_queued = workload.bursts[0]
        enqueue_many(connection, entries[:num_queued])
        with _worker(workload, settings, folder / "worker.log") as worker:
            _wait(connection, num_queued, worker)
            for size in workload.bursts[1:]:
                time.sleep(IDLE_S)
                enqueue_many(connection, entries[num_queued : num_queued + size])
                num_queued += size
                _wait(connection, num_queued, worker)
        ended = UntrustedJob.fetch_many([entry.job_id for entry in entries], connection)
    finished_s = [job.ended_at.timestamp() for job in ended if job is not None and job.is_finished and job.ended_at]
    failures = ["a job did not finish"] * (len(ended) - len(finished_s))
    assert settings.trace is not None
    events = json.loads(settings.trace.read_text(encoding="utf-8"))["traceEvents"]
    usage = {event["pid"]: event["args"] for event in events if event["name"] == "usage"}
    num_ranks = len(workload.models)
    return [
        RankMeasurements(
            spans=_spans(events, rank),
            finished_s=sorted(finished_s) if rank == num_ranks - 1 else [],
            failures=failures if rank == 0 else [],
            rss_mb=usage[rank]["rss_mb"],
        )
        for rank in range(num_ranks)
    ]


@contextlib.contextmanager
def _worker(workload: Workload, settings: Settings, log_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    shape, num_ranks = workload.parameters, len(workload.models)
    command = [sys.executable, "-m", "svdq.cli", "worker", "--device", workload.device]
    command += ["--ranks", str(num_ranks)]
    command += ["--warmup", f"{shape.width}x{shape.height}x{shape.frames}"]
    if workload.components:
        command += ["--experts", "bound"]
    if workload.in_rounds:
        command += ["--experts", "rounds"]
    with log_path.open("wb") as log:
        # Not in the folder of the caller: a `notify` in its svdq.toml counts where the variable is empty.
        worker = subprocess.Popen(
            command,
            cwd=settings.home,
            env=os.environ | settings.environment() | {"PYTHONSAFEPATH": "1"},
            stdout=log,
            stderr=log,
            preexec_fn=die_with_parent(),
        )
        try:
            yield worker
            worker.send_signal(signal.SIGINT)
            code = worker.wait()
        finally:
            worker.terminate()
            worker.wait()
    if code != 0:
        lines = log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise SvdqError(f"The worker of the bench ended with exit code {code}: {lines[-1] if lines else 'no output'}")


def _wait(connection: redis.Redis, num_videos: int, worker: subprocess.Popen[bytes]) -> None:
    """Wait until so many videos are finished, one has failed, or the worker has ended."""
    queue = queue_of(connection, "default")
    finished, failed = queue.finished_job_registry.key, queue.failed_job_registry.key
    while connection.zcard(finished) < num_videos and not connection.zcard(failed) and worker.poll() is None:
        time.sleep(0.2)


def _spans(events: list[dict[str, Any]], rank: int) -> list[Span]:
    return [
        Span(event["name"], event["args"]["job"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6, event["tid"])
        for event in events
        if event["ph"] == "X" and event["pid"] == rank
    ]
