"""`python -m tests.watch_campaign --files 2000 --kills 5`: kill `svdq watch` while photos are dropped, and count.

Photos are written as rsync does (under a hidden name, then renamed), from slow writers, and in folders that are made on
the way or moved in whole. Real processes, a real Redis, a real kernel; the photos themselves are tiny.
"""

import hashlib
import io
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
from PIL import Image

from svdq.producer.embedded_redis import stop_server
from svdq.producer.queue import SvdqQueue, read_job, session
from svdq.producer.settings_loader import load_settings
from tests.waiting import NeverCameError, wait_until

#: Photos that are there before the folder is first watched; svdq must not submit them.
NUM_OLD = 10
STABLE_FOR = "500ms"


def jpeg(text: str) -> bytes:
    """A whole photo that no other text gives."""
    file = io.BytesIO()
    Image.effect_noise((48, 32), 60).convert("RGB").save(file, "JPEG", comment=text)
    return file.getvalue()


class Dropper:
    """Drops photos in the ways that people's programs do, each from a thread of its own."""

    def __init__(self, inbox: Path, aside: Path, seed: int, pace_s: float) -> None:
        self._inbox = inbox
        self._aside = aside
        self._random = random.Random(seed)
        self._pace_s = pace_s
        self.names: set[str] = set()
        self.images: set[str] = set()
        self.num_bad = 0

    def drop(self, num_files: int) -> None:
        ways = itertools.cycle([self._rename, self._write_slowly, self._rename, self._into_new_folder, self._folder])
        with ThreadPoolExecutor(8) as pool:
            futures = []
            for number, way in zip(range(num_files), ways, strict=False):
                name, data = f"photo {number}.jpg", jpeg(str(number))
                self.names.add(Path(name).stem)
                self.images.add(hashlib.sha256(data).hexdigest())
                futures.append(pool.submit(way, name, data, self._random.random()))
                if number % 50 == 7:
                    self.num_bad += 1
                    (self._inbox / f"bad {number}.jpg").write_bytes(data[: len(data) // 2])
                time.sleep(self._pace_s * 2 * self._random.random())
            for future in futures:
                future.result()

    def _rename(self, name: str, data: bytes, _luck: float, folder: str = "") -> None:
        temporary = self._inbox / folder / f".{name}.Xq3Zt1"
        temporary.write_bytes(data)
        temporary.rename(self._inbox / folder / name)

    def _write_slowly(self, name: str, data: bytes, luck: float) -> None:
        with (self._inbox / name).open("wb", buffering=0) as file:
            for start in range(0, len(data), len(data) // 5):
                file.write(data[start : start + len(data) // 5])
                time.sleep(0.3 * luck)

    def _into_new_folder(self, name: str, data: bytes, luck: float) -> None:
        folder = f"day {round(30 * luck)}/roll {round(100 * luck)}"
        (self._inbox / folder).mkdir(parents=True, exist_ok=True)
        self._rename(name, data, luck, folder)

    def _folder(self, name: str, data: bytes, _luck: float) -> None:
        folder = self._aside / f"folder of {name}"
        folder.mkdir()
        (folder / name).write_bytes(data)
        folder.rename(self._inbox / folder.name)


class Watch:
    """`svdq watch`, started and ended again and again."""

    def __init__(self, inbox: Path, on_success: str, log: Path) -> None:
        self._command = [
            sys.executable,
            "-m",
            "svdq.cli",
            "watch",
            str(inbox),
            "--recursive",
            "--stable-for",
            STABLE_FOR,
        ]
        self._command += ["--on-success", on_success]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._num_before = 0

    def start(self) -> None:
        self._num_before = self._num_begun()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def wait_until_begun(self) -> None:
        wait_until(lambda: self._num_begun() > self._num_before, "the watcher begins")

    def end(self, number: int) -> int:
        """Send a signal and return the exit code."""
        assert self._process is not None
        if number == signal.SIGTERM:
            self.wait_until_begun()  # before that it ends as any process does, which is no test of ours
        self._process.send_signal(number)
        return self._process.wait(30)

    def _num_begun(self) -> int:
        return self._log.read_text().count("Watching") if self._log.exists() else 0


def campaign(
    folder: Path, *, num_files: int, num_kills: int, seconds: float, on_success: str, seed: int
) -> Iterator[str]:
    """Run one and yield what was wrong."""
    rng = random.Random(seed)
    inbox, aside = folder / "inbox", folder / "aside"
    for path in (inbox, aside):
        path.mkdir()
    for number in range(NUM_OLD):
        (inbox / f"old {number}.jpg").write_bytes(jpeg(f"old {number}"))
    settings = load_settings()
    dropper = Dropper(inbox, aside, seed, seconds / num_files)
    watch = Watch(inbox, on_success, folder / "log")
    watch.start()
    watch.wait_until_begun()
    dropping = threading.Thread(target=dropper.drop, args=(num_files,))
    dropping.start()
    for kill in range(num_kills):
        time.sleep(seconds / (num_kills + 1) * (0.4 + 0.8 * rng.random()))
        number = signal.SIGTERM if kill % 2 else signal.SIGKILL
        code = watch.end(number)
        if number == signal.SIGTERM and code != 0:
            yield f"exit code {code} after SIGTERM"
        time.sleep(rng.random())
        watch.start()
    dropping.join()

    def num_rejected() -> int:
        if on_success == "keep":
            return (folder / "log").read_text().count("cannot be decoded")
        return len(list((inbox / "rejected").glob("*.jpg")))

    with session(settings) as connection:
        queue = SvdqQueue(connection=connection)
        try:
            wait_until(lambda: queue.count >= num_files and num_rejected() >= dropper.num_bad, "all are taken", 60)
        except NeverCameError as error:
            yield f"{error}: {queue.count} jobs, {num_rejected()} rejected"
        time.sleep(1)  # for what would be too many
        if (code := watch.end(signal.SIGTERM)) != 0:
            yield f"exit code {code} at the end"
        jobs = [read_job(rq_job) for rq_job in queue.jobs]
    images = Counter(job.image.split("/")[1].split(".")[0] for job in jobs if job)
    names = Counter(job.name for job in jobs if job)
    if len(jobs) != num_files or {*images} != dropper.images or {*names} != dropper.names:
        lost, strange = dropper.names - {*names}, {*names} - dropper.names
        yield f"{len(jobs)} jobs for {num_files} photos; lost: {sorted(lost)}, strange: {sorted(strange)}"
    if twice := [name for name, times in names.items() if times > 1]:
        yield f"twice: {twice}"
    if num_rejected() != dropper.num_bad:
        yield f"{num_rejected()} files rejected, not {dropper.num_bad}"
    yield from _misplaced(inbox, on_success, dropper)


def _misplaced(inbox: Path, on_success: str, dropper: Dropper) -> Iterator[str]:
    """Find files that are not where they should be."""
    here = {path.stem for path in inbox.rglob("*") if path.is_file() and "rejected" not in path.parts}
    old = {f"old {number}" for number in range(NUM_OLD)}
    if on_success == "keep":
        bad = {name for name in here if name.startswith("bad")}
        wanted = dropper.names | old | bad
    elif on_success == "delete":
        wanted = old
    else:
        wanted = old
        target = inbox.parent / "done"
        moved = [path for path in target.rglob("*") if path.is_file()]
        if {path.stem for path in moved} != dropper.names or len(moved) != len(dropper.names):
            yield f"{len(moved)} files were moved, not {len(dropper.names)}"
    if here != wanted:
        yield f"in the folder, too many: {sorted(here - wanted)}, too few: {sorted(wanted - here)}"


@click.command()
@click.option("--files", "num_files", default=2000, show_default=True, help="Photos that are dropped.")
@click.option("--kills", "num_kills", default=5, show_default=True, help="Every second one is SIGTERM.")
@click.option("--seconds", default=60.0, show_default=True, help="Time in which they are dropped.")
@click.option("--on-success", type=click.Choice(["keep", "move", "delete"]), default="move", show_default=True)
@click.option("--seed", default=1, show_default=True, help="Of all that is random.")
def main(num_files: int, num_kills: int, seconds: float, on_success: str, seed: int) -> None:
    """Exit code 1: a photo was lost or doubled; then the folder with the log is kept."""
    for name in [name for name in os.environ if name.startswith("SVDQ_")]:
        del os.environ[name]
    folder = Path(tempfile.mkdtemp(prefix="svdq-watch-"))
    home = folder / "home"
    os.environ["SVDQ_HOME"] = str(home)
    started_s = time.monotonic()
    try:
        failures = list(
            campaign(
                folder,
                num_files=num_files,
                num_kills=num_kills,
                seconds=seconds,
                on_success="move:../done" if on_success == "move" else on_success,
                seed=seed,
            )
        )
    finally:
        stop_server(home)
    click.echo(f"{num_files} photos, {num_kills} kills, {time.monotonic() - started_s:.0f} s")
    for failure in failures:
        click.echo(failure)
    if failures:
        click.echo(f"See {folder}.")
    else:
        shutil.rmtree(folder)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
