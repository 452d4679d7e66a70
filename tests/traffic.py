"""Redis commands of a real group of worker ranks: idle, and for each video.

    python -m tests.traffic                   seven ranks, steps of 400 ms: about 4 minutes
    python -m tests.traffic --ranks 2 --idle-s 10

It starts a Redis server and `svdq worker` with a simulated model, and compares INFO commandstats before and after.
Commands inside scripts count, too.
"""

import argparse
import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import redis
from PIL import Image

from svdq.producer.embedded_redis import find_binaries
from svdq.producer.job import SvdJob
from svdq.producer.queue import queue_of
from svdq.producer.status.ranks import read_groups
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.enqueue import Entry, enqueue_many

STEPS = 25
#: Costs of Stable Video Diffusion XT at 1024x576 on a fast GPU, halved.
MODEL = "simulated:step_ms=400,encode_ms=72,decode_ms=1760"


@contextlib.contextmanager
def redis_server(port: int, *options: str) -> Iterator[redis.Redis]:
    """Run a server on loopback, as a shared one would be, within a block."""
    with tempfile.TemporaryDirectory(prefix="svdq-redis-") as folder:
        command = [
            str(next(find_binaries())),
            "--port",
            str(port),
            "--dir",
            folder,
            "--bind",
            "127.0.0.1",
            "--save",
            "",
        ]
        process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
        connection = redis.Redis(port=port)
        try:
            while process.poll() is None:
                with contextlib.suppress(redis.ConnectionError):
                    connection.ping()
                    break
                time.sleep(0.05)
            yield connection
        finally:
            connection.close()
            process.terminate()
            process.wait()


class Meter:
    """Counts what Redis does between two moments."""

    def __init__(self, connection: redis.Redis) -> None:
        self._connection = connection
        self._before, self._cpu_s, self._at = self._read()

    def _read(self) -> tuple[Counter[str], float, float]:
        stats, cpu = self._connection.info("commandstats"), self._connection.info("cpu")
        calls = Counter({name.removeprefix("cmdstat_"): each["calls"] for name, each in stats.items()})
        # What this meter itself sends.
        del calls["info"]
        return calls, cpu["used_cpu_sys"] + cpu["used_cpu_user"], time.monotonic()

    def stop(self) -> tuple[Counter[str], float, float]:
        """Return the number of each command, the seconds of processor and the seconds that have passed."""
        calls, cpu_s, at = self._read()
        return calls - self._before, cpu_s - self._cpu_s, at - self._at


def describe(name: str, calls: Counter[str], per: float) -> None:
    """Print commands per video or second."""
    print(f"{name}: {calls.total() / per:,.1f} commands", flush=True)
    print("   ", ", ".join(f"{command} {number / per:,.2f}" for command, number in calls.most_common()))


@contextlib.contextmanager
def worker(home: Path, port: int, num_ranks: int) -> Iterator[None]:
    environment = os.environ | {
        "SVDQ_HOME": str(home),
        "SVDQ_STORAGE": str(home / "storage"),
        "SVDQ_MODEL": MODEL,
        "SVDQ_REDIS_URL": f"redis://127.0.0.1:{port}",
    }
    command = [sys.executable, "-m", "svdq.cli", "worker", "--device", "cpu", "--ranks", str(num_ranks)]
    with (home / "worker.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=7)
    parser.add_argument("--idle-s", type=float, default=60)
    parser.add_argument("--videos", type=int, default=10)
    parser.add_argument("--port", type=int, default=17379)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="svdq-traffic-") as folder, redis_server(options.port) as connection:
        home = Path(folder)
        picture = io.BytesIO()
        Image.new("RGB", (64, 64)).save(picture, "png")
        key = Storage(str(home / "storage")).put_input(picture.getvalue(), "png")

        def render(seeds: range) -> tuple[Counter[str], float, float]:
            meter = Meter(connection)
            entries = [
                Entry(
                    job=SvdJob(image=key, name="photo", seed=seed, steps=STEPS, width=64, height=64, frames=2),
                    job_id=f"{seed:020x}",
                )
                for seed in seeds
            ]
            enqueue_many(connection, entries)
            finished = queue_of(connection, "default").finished_job_registry.key
            while connection.zcard(finished) < seeds.stop:
                time.sleep(1)
            calls, cpu_s, seconds = meter.stop()
            del calls["zcard"]
            return calls, cpu_s, seconds

        with worker(home, options.port, options.ranks):
            while not any(group.is_whole for group in read_groups(connection)):
                time.sleep(1)
            time.sleep(10)
            clients = connection.client_list()
            print(f"{len(clients) - 1} connections; load {os.getloadavg()[0]:.1f}")
            meter = Meter(connection)
            time.sleep(options.idle_s)
            calls, cpu_s, seconds = meter.stop()
            describe(f"an idle group of {options.ranks}, each second ({cpu_s / seconds:.2%} of a core)", calls, seconds)
            calls, _, seconds = render(range(1))
            describe(f"one video in {seconds:.1f} s, each second", calls, seconds)
            calls, cpu_s, seconds = render(range(1, options.videos + 1))
            describe(
                f"{options.videos} videos in {seconds:.1f} s, each second ({cpu_s / seconds:.2%} of a core)",
                calls,
                seconds,
            )
            describe("each video", calls, options.videos)


if __name__ == "__main__":
    main()
