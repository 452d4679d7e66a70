"""A storage that is full or slow while videos are written."""

import time
from functools import partial
from pathlib import Path

import psutil

from tests.faults.arena import Arena
from tests.faults.group import Group
from tests.waiting import wait_until

STEPS = 12
FULL_S = 20.0  # seconds for which nothing can be written
#: Frames and side of videos on the slow storage: large enough that a heap of them would be seen.
SLOW_FRAMES, SLOW_SIDE = 14, 256
FLAT_BYTES = 64 * 2**20  # bytes by which the ranks may grow while videos wait
#: Jobs that may be in flight for each rank (computed, received ahead, on its way out), and besides: one taken ahead,
#: two waiting to be written, one being written, one not acknowledged yet.
JOBS_A_RANK, JOBS_BESIDES = 3, 5


def storage_full(arena: Arena) -> None:
    """ENOSPC for a while: from a small disk of its own where we may mount one, else put into the ranks' writes."""
    arena.submit_all(steps=STEPS)
    hold_s = arena.size.hold_s or FULL_S
    if arena.disk is not None and arena.disk.mounted:
        disk = arena.disk
        arena.start()
        fill = partial(disk.fill, hold_s)
    else:
        arena.tally.notes.append("no disk could be mounted: ENOSPC was put into the ranks' writes")
        _, controls = arena.start_with("full")
        fill = partial(_switch, controls / "on", hold_s)

    def strike() -> float:
        before = arena.num_ended()
        fill()
        arena.tally.notes.append(f"{arena.num_ended() - before} jobs ended while nothing could be written")
        return time.monotonic()  # the recovery counts from its end

    wait_until(lambda: arena.num_ended() >= 1, "the first video is there")
    arena.strike(strike, kills=False)


def storage_slow(arena: Arena) -> None:
    """Every write takes two seconds: intake slows down with it, and memory does not grow."""
    arena.submit_all(steps=STEPS, frames=SLOW_FRAMES, width=SLOW_SIDE, height=SLOW_SIDE)
    group, controls = arena.start_with("slow")
    wait_until(lambda: arena.num_ended() >= 2, "the first videos are there")
    (controls / "on").touch()
    arena.tally.num_faults += 1
    before, most = _memory_bytes(group), 0
    most_in_flight = 0
    while not arena.all_ended():
        most = max(most, _memory_bytes(group))
        in_flight = sum(status == "started" for status, _ in arena.states().values())
        most_in_flight = max(most_in_flight, in_flight)
        time.sleep(0.5)
    arena.tally.notes.append(f"memory grew by {(most - before) / 2**20:.0f} MiB, {most_in_flight} jobs were in flight")
    if most - before > FLAT_BYTES:
        arena.tally.broken.append(f"the ranks' memory grew by {(most - before) / 2**20:.0f} MiB")
    allowed = JOBS_A_RANK * arena.size.ranks + JOBS_BESIDES
    if most_in_flight > allowed:
        arena.tally.broken.append(f"{most_in_flight} jobs were in flight at once, more than {allowed}")


def _switch(switch: Path, hold_s: float) -> None:
    """Have a trouble that is put into the ranks last for a while."""
    switch.touch()
    time.sleep(hold_s)
    switch.unlink()


def _memory_bytes(group: Group) -> int:
    try:
        return sum(process.memory_info().rss for process in group.ranks())
    except psutil.Error:
        return 0
