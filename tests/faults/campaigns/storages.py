"""Storages and servers that part: an older Redis, two of them on one storage, a disk or a video that is away."""

import shutil
import subprocess
import time
from pathlib import Path

import redis

from svdq.pipeline.errors import UnavailableError
from svdq.producer.embedded_redis import ensure_server, stop_server
from svdq.producer.settings_loader import load_settings
from svdq.producer.status.job_view import view_many
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.sources import PhotoRequest
from svdq.producer.submitting.submission import submit, submit_all
from tests.faults.arena import PHOTO, Arena
from tests.faults.plan import FINISHED, Expected
from tests.waiting import wait_until

STEPS = 12
AWAY_S = 10.0  # seconds for which a disk is not mounted


def redis_restored(arena: Arena) -> None:
    """Redis goes back to a copy of its data from before: what was finished since then is not rendered again."""
    data, copy = arena.settings.home / "redis", arena.folder / "copy"
    arena.submit_all(steps=STEPS)
    arena.redis.stop()
    shutil.copytree(data, copy, ignore=shutil.ignore_patterns("*.sock", "*.lock", "*.pid"))
    arena.redis.start()
    group = arena.start()
    wait_until(lambda: arena.num_ended() >= len(arena.jobs) // 2, "half of the jobs have ended")
    arena.stop(group)
    arena.redis.stop()
    for folder in data.iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)
            shutil.copytree(copy / folder.name, folder)
    arena.redis.start()
    arena.forget_ends()
    arena.tally.num_faults += 1
    arena.start()


def two_servers(arena: Arena) -> None:
    """Submit the same photos from a second Redis server that shares the storage: no video is made twice."""
    options = [Draft(steps=STEPS, seed=seed, frames=2, width=64, height=64) for seed in range(arena.size.num_jobs)]
    made = {submit(arena.settings, [arena.folder / PHOTO], each)[0].id: each for each in options}
    arena.jobs |= dict.fromkeys(made, FINISHED)
    arena.start()
    wait_until(arena.all_ended, "all have ended")
    home = arena.folder / "second"
    home.mkdir()
    url, before = ensure_server(home), arena.publications.counts().copy()
    try:
        settings = load_settings(home=home, model=arena.model, redis_url=url, storage=arena.settings.storage)
        for each in made.values():
            submit(settings, [arena.folder / PHOTO], each)
        arena.start(SVDQ_HOME=str(home), SVDQ_REDIS_URL=url)
        with redis.Redis.from_url(url) as connection:
            wait_until(
                lambda: all(view.ended for view in view_many(connection, made)), "the second server's have ended"
            )
            views = view_many(connection, made)
        arena.tally.lost += [f"{view.id} is {view.status} at the second server" for view in views if view.error]
        again = [name for name in arena.publications.counts() - before if not name.startswith(".")]
        arena.tally.duplicated += [f"{name} was published again for the second server" for name in again]
        arena.tally.num_faults += 1
    finally:
        for group in arena.groups:
            arena.stop(group)
        stop_server(home)


def disk_away(arena: Arena) -> None:
    """The storage's disk is not mounted for a while, and somebody submits: refused, and all goes on when it is back."""
    arena.submit_all(steps=STEPS)
    if arena.disk is None or not arena.disk.mounted:
        arena.tally.notes.append("no disk could be mounted: nothing was tried")
        arena.start()
        return
    arena.start()
    wait_until(lambda: arena.num_ended() >= 1, "the first video is there")

    def strike() -> float:
        parked = arena.folder / "parked"
        parked.mkdir()
        subprocess.run(["mount", "--bind", str(arena.storage), str(parked)], check=True)
        arena.disk.unmount()
        until, num_refused = time.monotonic() + (arena.size.hold_s or AWAY_S), 0
        while time.monotonic() < until:
            try:
                submit(arena.settings, [arena.folder / PHOTO], Draft(steps=STEPS, seed=1), force=True)
            except UnavailableError:
                num_refused += 1
            time.sleep(1)
        below = sorted(str(path.relative_to(arena.storage)) for path in arena.storage.rglob("*"))
        subprocess.run(["mount", "--bind", str(parked), str(arena.storage)], check=True)
        subprocess.run(["umount", "--lazy", str(parked)], check=True)
        if not num_refused or below:
            arena.tally.broken.append(f"{num_refused} were refused, and {below} written below the mount point")
        return time.monotonic()

    arena.strike(strike, kills=False)


def link_deleted(arena: Arena) -> None:
    """The video of a link is away when the next one needs it: that link alone fails, and says how to go on."""
    options = {"steps": STEPS, "frames": 5, "width": 64, "height": 64}
    second_of = {}
    for _ in range(arena.size.num_jobs // 2):
        spec = JobSpec(drafts=(Draft(seed=arena.rng.getrandbits(31), **options),), then=("",))
        request = PhotoRequest(path=arena.folder / PHOTO, spec=spec)
        first, second = [submission.id for submission in submit_all(arena.settings, [request])]
        arena.jobs |= {first: FINISHED, second: FINISHED}
        second_of[first] = second
    group = arena.start()
    wait_until(lambda: arena.num_ended() >= len(second_of) // 2, "some links have ended")
    group.kill_all()
    states = {job_id: state for job_id, (state, _) in arena.states().items()}
    waiting = [
        first for first, second in second_of.items() if (states[first], states[second]) == ("finished", "queued")
    ]
    away = {}
    for view in view_many(arena.connection, waiting):
        video = Path(view.outputs[0])
        away[video] = video.rename(arena.folder / video.name)
        arena.jobs[second_of[view.id]] = Expected(
            states=("failed",), reason=f"`svdq retry --force {view.id}` renders both"
        )
    arena.tally.num_faults += 1 + len(away)  # the kill, and each video, which is published again when it is back
    arena.tally.notes.append(f"the videos of {len(away)} links were away")
    arena.start()
    wait_until(arena.all_ended, "all have ended")
    for video, place in away.items():
        place.rename(video)
