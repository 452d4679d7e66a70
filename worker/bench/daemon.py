"""Bench runs through the whole daemon: real Redis, a real `svdq worker` and real files in a temporary home."""

import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from svdq.pipeline.bench.harness import Workload
from svdq.pipeline.bench.report import RankLog
from svdq.pipeline.errors import SvdqError
from svdq.producer.embedded_redis.server import stop_server
from svdq.producer.job import Job
from svdq.producer.queue import session
from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.enqueue import Entry, enqueue_many
from svdq.producer.untrusted_job import UntrustedJob
from svdq.worker.launcher.torchrun import environment_of


def run_daemon(workload: Workload) -> list[RankLog]:
    """Queue the workload's videos, render them with `svdq worker` and return the log of each rank.

    Raises:
        SvdqError: the worker failed.
    """
    with tempfile.TemporaryDirectory(prefix="svdq-bench-") as folder:
        settings = Settings.load(
            home=Path(folder), storage=str(Path(folder, "storage")), model=workload.models[0]
        ).model_copy(update={"redis_url": None})
        try:
            return _run(workload, settings, Path(folder))
        finally:
            stop_server(settings.home)


def _run(workload: Workload, settings: Settings, folder: Path) -> list[RankLog]:
    with session(settings) as connection:
        key = Storage(settings.storage).put_input(_noise(workload.parameters.width, workload.parameters.height), "png")
        entries = []
        for seed in range(workload.num_samples):
            values = workload.parameters.model_dump() | {"seed": seed, "image": key, "name": f"sample-{seed}"}
            job = Job.model_validate(values)
            entries.append(Entry(job=job, job_id=job.digest(seed_was_drawn=False)))
        enqueue_many(connection, entries)
        trace_path = folder / "trace.json"
        _render(workload, settings, folder / "worker.log", trace_path)
        ended = UntrustedJob.fetch_many([entry.job_id for entry in entries], connection)
    finished_s, failures = [], []
    for rq_job in ended:
        if rq_job is not None and rq_job.ended_at is not None and rq_job.is_finished:
            finished_s.append(rq_job.ended_at.timestamp())
        else:
            failures.append(f"job {rq_job and rq_job.id} did not finish")
    events = json.loads(trace_path.read_text(encoding="utf-8"))["traceEvents"]
    num_ranks = len(workload.models)
    return [
        _log(
            [event for event in events if event["pid"] == rank],
            finished_s=sorted(finished_s) if rank == num_ranks - 1 else [],
            failures=failures if rank == 0 else [],
        )
        for rank in range(num_ranks)
    ]


def _render(workload: Workload, settings: Settings, log_path: Path, trace_path: Path) -> None:
    """Run `svdq worker --burst` until the queue is empty."""
    shape = workload.parameters
    command = [sys.executable, "-m", "svdq.cli", "worker", "--burst"]
    command += ["--ranks", str(len(workload.models)), "--device", workload.device]
    command += ["--trace", str(trace_path)]
    command += ["--warmup", f"{shape.width}x{shape.height}x{shape.frames}"]
    with log_path.open("wb") as log:
        code = subprocess.run(command, env=environment_of(settings), stdout=log, stderr=log, check=False).returncode
    if code != 0:
        lines = log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise SvdqError(f"The worker of the bench ended with exit code {code}: {lines[-1] if lines else 'no output'}")


def _log(events: Sequence[dict[str, Any]], *, finished_s: list[float], failures: list[str]) -> RankLog:
    """Read a rank's log from its trace events."""
    usage = next(event["args"] for event in events if event["name"] == "usage")
    spans = [
        (event["name"], event["args"]["job"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for event in events
        if event["ph"] == "X"
    ]
    return RankLog(
        spans=spans,
        events=list(events),
        finished_s=finished_s,
        started_s=min((start for name, _, start, _ in spans if name == "encode"), default=None),
        failures=failures,
        cpu_s=usage["cpu_s"],
        rss_mb=[usage["rss_mb"]],
    )


def _noise(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((width, height), 64).convert("RGB").save(buffer, "png")
    return buffer.getvalue()
