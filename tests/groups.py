"""What many worker groups cost one Redis: commands, processor time, connections, and how long readers wait meanwhile.

    python -m tests.groups                    500 groups of 7 ranks, 100,000 queued and as many finished jobs
    python -m tests.groups --groups 50 --jobs 2000 --seconds 20

Groups are simulated without torch, some in each of a few processes. What takes, renews and ends jobs is the code of the
worker (`GroupWorker`, `Recovery`); ranks send what `ProgressMonitor` sends. Each has its own connections, as in a real
group. `python -m tests.traffic` measures a real one, for comparison.
"""

import argparse
import heapq
import json
import multiprocessing
import os
import random
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import redis

from svdq.cli.serve.now import read_state
from svdq.pipeline.planning.costs import ShapeCosts
from svdq.producer import keys
from svdq.producer.settings_loader import load_settings
from svdq.producer.status import selection, snapshot
from svdq.producer.status.ranks import IntakeStatus, RankStatus
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.enqueue import CHUNK, enqueue_many
from svdq.worker.queue.group_worker import GroupWorker
from svdq.worker.queue.recovery import Recovery
from svdq.worker.queue.rq_worker import BEAT_S, MAINTENANCE_S, ActiveJob
from tests.scale import entries, finish, used
from tests.traffic import Meter, describe, redis_server

PORT = 17380
PROCESSES = 4
#: Ranks of a group, jobs in flight in a busy one, and the seconds of a step.
RANKS, IN_FLIGHT, STEP_S = 7, 14, 0.764
#: As in `worker/intake/source.py` and `worker/health/progress.py`, which need torch.
SLOW_POLL_S, DUE_S, INTERVAL_S, RECORD_S, IDLE_RECORD_S = 1.0, 1.0, 0.5, 1.0, 5.0
SAVE_META = "if redis.call('exists', KEYS[1]) == 1 then redis.call('hset', KEYS[1], 'meta', ARGV[1]) end"


class Group:
    """Rank 0's bookkeeping thread."""

    def __init__(self, port: int, video_s: float) -> None:
        self.connection = redis.Redis(port=port, socket_timeout=60)
        while True:
            try:
                self.worker = GroupWorker(self.connection, on_stop=print, on_shutdown=print)
                self.worker.start()
                break
            except ValueError:
                continue  # two of the random names of one process are equal
        self.recovery = Recovery(self.worker, 2)
        self.video_s = video_s
        self.active: list[ActiveJob] = []
        self.num_finished = 0

    def run(self, stopping: threading.Event) -> None:
        now = time.monotonic()
        beat_at = due_at = maintain_at = now
        done_at = now + random.uniform(0, self.video_s or 1)
        self.recovery.at_start([])
        while not stopping.wait(random.uniform(0.9, 1.1) * SLOW_POLL_S):
            now = time.monotonic()
            if now >= beat_at:
                self.worker.renew_leases(self.active)
                beat_at = now + BEAT_S
            if now >= done_at and self.active:
                self._finish()
                done_at = now + self.video_s
            if now >= due_at:
                self.worker.promote_due()
                due_at = now + DUE_S
            self._take()
            if now >= maintain_at:
                self.recovery.unknown({active.execution.id for active in self.active})
                self.recovery.expired()
                if self.connection.set(keys.MAINTAINED, self.worker.name, nx=True, px=int(MAINTENANCE_S * 1000)):
                    self.worker.maintain()
                maintain_at = now + MAINTENANCE_S

    def _finish(self) -> None:
        active = self.active.pop(0)
        assert self.worker.holds_lease(active)
        job_id = active.rq_job.id
        self.worker.succeed(active, {"outputs": [f"outputs/{job_id}.mp4", f"outputs/{job_id}.json"], "seconds": 20.1})
        self.num_finished += 1

    def _take(self) -> None:
        if self.video_s == 0:
            self.worker.pop()
            return
        while len(self.active) < IN_FLIGHT and (active := self.worker.pop()) is not None:
            self.worker.num_queued()
            self.active.append(active)
            if (job_id := self.worker.peek()) is not None:
                self.worker.fetch(job_id)


class Rank:
    """The progress thread of a rank; many are driven by one thread here."""

    def __init__(self, group: Group, port: int, number: int) -> None:
        self._group = group
        self._connection = redis.Connection(port=port, socket_timeout=60)
        self._number = number
        self._written_step = -1
        self._record_at = 0.0
        name = group.worker.name

        def record(active: Sequence[ActiveJob], now: float) -> RankStatus:
            job = active[number % len(active)].rq_job.id if active else None
            costs = ShapeCosts(
                frames=25, width=1024, height=576, guided=True, step_s=(STEP_S,) * RANKS, encode_s=0.14, decode_s=3.4
            )
            return RankStatus(
                group=name,
                rank=number,
                num_ranks=RANKS,
                host="render-1",
                pid=4711,
                device=f"cuda:{number}",
                device_name="NVIDIA RTX A5000",
                model="stabilityai/stable-video-diffusion-img2vid-xt",
                started_at=now,
                at=now,
                activity="denoising" if job else "idle",
                job_id=job,
                steps=25 if job else None,
                step=7 if job else None,
                step_s=STEP_S,
                busy_share=1.0,
                rss_bytes=10**9,
                gpu_bytes=10**10,
                gpu_total_bytes=25 * 10**9,
                num_steps=700,
                steps_s=99.9,
                intake=IntakeStatus(
                    worker=name, in_flight=tuple(each.rq_job.id for each in active), pace_s=20.0, costs=(costs,)
                )
                if number == 0
                else None,
            )

        self._record = record

    def write(self) -> float:
        """Write what a rank writes; return the seconds until it writes again."""
        now, active = time.time(), list(self._group.active)
        pipeline = redis.Redis().pipeline(transaction=False)
        if active:
            mine = active[self._number % len(active)]
            pipeline.smembers(keys.CANCELED)
            pipeline.zscore(mine.queue.started_job_registry.key, mine.execution.composite_key)
            if (step := int(now / STEP_S)) != self._written_step:
                self._written_step = step
                meta = {"step": step % 25, "rank": self._number, "boundaries": [0, 4, 8, 11, 15, 18, 22, 25]}
                used = {"width": 1024, "height": 576, "frames": 25, "fps": 7, "steps": 25, "decode_chunk_size": 13}
                pipeline.eval(SAVE_META, 1, mine.rq_job.key, json.dumps(meta | {"used": used, "notice": ""}))
        if now >= self._record_at + (RECORD_S if active else IDLE_RECORD_S):
            self._record_at = now
            self._record(active, now).save(pipeline)
        commands = [arguments for arguments, _ in pipeline.command_stack]
        if commands:
            self._connection.send_packed_command(self._connection.pack_commands(commands))
            for _ in commands:
                self._connection.read_response()
        return INTERVAL_S if active else IDLE_RECORD_S


def drive(ranks: Sequence[Rank], stopping: threading.Event) -> None:
    """Let ranks write at their times."""
    due = [(time.monotonic() + random.uniform(0, 1), number) for number in range(len(ranks))]
    heapq.heapify(due)
    while not stopping.is_set():
        at, number = due[0]
        if stopping.wait(max(0.0, at - time.monotonic())):
            return
        heapq.heapreplace(due, (max(at, time.monotonic() - 1) + ranks[number].write(), number))


def run_groups(number: int, video_s: float, ready: Any, done: Any) -> None:
    """Simulate groups in this process, from `ready`, a barrier, to `done`, an event."""
    groups = [Group(PORT, video_s) for _ in range(number)]
    ranks = [Rank(group, PORT, rank) for group in groups for rank in range(RANKS)]
    stopping = threading.Event()
    threads = [threading.Thread(target=group.run, args=(stopping,)) for group in groups]
    threads.append(threading.Thread(target=drive, args=(ranks, stopping)))
    for thread in threads:
        thread.start()
    ready.wait()
    done.wait()
    stopping.set()
    for thread in threads:
        thread.join()
    os._exit(0)  # the listeners of RQ wait for a minute


def look(connection: redis.Redis, home: Path, seconds: float) -> dict[str, list[float]]:
    """Read what commands and pages read, once a second; return the milliseconds of each."""
    settings, storage = load_settings(home=home, storage=str(home)), Storage(str(home))
    times: dict[str, list[float]] = {}

    def timed(name: str, read: Callable[[], object]) -> object:
        started = time.perf_counter()
        answer = read()
        times.setdefault(name, []).append((time.perf_counter() - started) * 1000)
        return answer

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        started = time.monotonic()
        taken = timed("svdq status, svdq top", lambda: snapshot.take(connection))
        assert isinstance(taken, snapshot.Snapshot)
        timed("a look of the page, besides", partial(read_state, connection, settings, storage, taken))
        timed("the newest 50 videos", lambda: selection.read_page(connection, 50))
        time.sleep(max(0.0, started + 1 - time.monotonic()))
    return times


def measure(connection: redis.Redis, home: Path, options: argparse.Namespace, video_s: float) -> None:
    """Run the groups, and print what they cost."""
    ready, done = multiprocessing.Barrier(PROCESSES + 1), multiprocessing.Event()
    share = -(-options.groups // PROCESSES)
    processes = [
        multiprocessing.Process(target=run_groups, args=(share, video_s, ready, done), daemon=True)
        for _ in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    ready.wait()
    time.sleep(options.settle)
    number = share * PROCESSES
    clients = connection.info("clients")
    print(f"{number} groups, {'a video in ' + str(video_s) + ' s each' if video_s else 'idle'}: "
          f"{clients['connected_clients']} connections, load {os.getloadavg()[0]:.1f}")  # fmt: skip
    meter = Meter(connection)
    time.sleep(options.seconds)
    calls, cpu_s, seconds = meter.stop()
    print(f"Redis: {cpu_s / seconds:.1%} of a core, {calls.total() / seconds:,.0f} commands/s, "
          f"{cpu_s / calls.total() * 1e6:.1f} us each, {used(connection) / 1e9:.2f} GB")  # fmt: skip
    describe("a group, each second", calls, seconds * number)
    meter = Meter(connection)
    for name, times in look(connection, home, options.seconds).items():
        ordered = sorted(times)
        worst = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
        print(f"{name}: median {statistics.median(ordered):,.0f} ms, p99 {worst:,.0f} ms of {len(ordered)}")
    _, cpu_s, seconds = meter.stop()
    print(f"Redis with these readers: {cpu_s / seconds:.1%} of a core", flush=True)
    done.set()
    for process in processes:
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=500)
    parser.add_argument("--jobs", type=int, default=100_000, help="queued jobs, and as many finished ones")
    parser.add_argument("--video-s", type=float, default=20, help="seconds between two videos of a busy group")
    parser.add_argument("--seconds", type=float, default=30, help="how long each measurement takes")
    parser.add_argument("--settle", type=float, default=30, help="seconds for groups to take their first jobs")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with tempfile.TemporaryDirectory() as folder, redis_server(PORT, "--stream-node-max-bytes", "512") as connection:
        measure(connection, Path(folder), options, 0)
        for first in range(0, 2 * options.jobs, CHUNK):
            chunk = entries(first, min(CHUNK, 2 * options.jobs - first))
            enqueue_many(connection, chunk)
            if first < options.jobs:
                finish(connection, chunk)
        measure(connection, Path(folder), options, options.video_s)
        connection.bgrewriteaof()
        while connection.info("persistence")["aof_rewrite_in_progress"]:
            time.sleep(1)
        print(f"A fork took {connection.info('stats')['latest_fork_usec'] / 1000:.1f} ms.")


if __name__ == "__main__":
    main()
