"""Processes that die or are told to end while jobs are in flight."""

import contextlib
import time
from collections.abc import Callable

import psutil

from svdq.producer.pauses import free, resume
from svdq.producer.status.ranks import read_groups
from tests.faults.arena import Arena
from tests.faults.group import Group
from tests.waiting import wait_until

STEPS = 20  # denoising steps of a job; long enough that a fault finds several in flight
#: Seconds between the recovery from one fault and the next.
LEAST_GAP_S, MOST_GAP_S = 0.5, 3.0
JOBS_A_FAULT = 4  # jobs for each fault: beyond that the rest is left in peace, so that a small campaign is short
#: Variables of workers whose ranks are killed every few seconds. Two kills in a row that strike a job in the same one
#: of its 20 steps are then no rarity, and svdq takes them for the job's fault; three in a row are rare.
PATIENT = {"SVDQ_MAX_ATTEMPTS": "3"}
#: The part of kills of a rank that strike while the group is still recovering from the one before.
DURING_RECOVERY = 0.25


def kill_rank(arena: Arena) -> None:
    """kill -9 of a random rank, again and again; torchrun starts the group anew."""
    arena.submit_all(steps=STEPS)

    def kill(group: Group) -> None:
        group.kill_rank(arena.rng)
        if arena.rng.random() < DURING_RECOVERY:
            time.sleep(arena.rng.uniform(0, MOST_GAP_S))
            group.kill_rank(arena.rng)
            arena.tally.num_faults += 1

    again_and_again(arena, kill, **PATIENT)


def kill_launcher(arena: Arena) -> None:
    """kill -9 of the launcher, which takes the group with it; someone starts it again."""
    arena.submit_all(steps=STEPS)
    again_and_again(arena, Group.kill_launcher)


def sigterm(arena: Arena) -> None:
    """SIGTERM in the middle of videos, as a reboot does; someone starts the worker again."""
    arena.submit_all(steps=STEPS)
    again_and_again(arena, arena.stop)


def kill_all(arena: Arena) -> None:
    """kill -9 of every process at once, as in a power cut; someone starts the worker again."""
    arena.submit_all(steps=STEPS)
    again_and_again(arena, Group.kill_all)


def pause_free(arena: Arena) -> None:
    """`svdq pause --free` at any time, a kill -9 of something meanwhile, and `svdq resume` when the GPUs are free."""
    arena.submit_all(steps=STEPS)
    group = arena.start(**PATIENT)
    free_after_s: list[float] = []

    def strike() -> float:
        nonlocal group
        began_at = time.monotonic()
        free(arena.connection)
        time.sleep(arena.rng.uniform(0, MOST_GAP_S))
        match arena.rng.choice(("nothing", "rank", "launcher", "all")):
            case "rank" if ranks := group.ranks():
                with contextlib.suppress(psutil.NoSuchProcess):
                    arena.rng.choice(ranks).kill()
            case "launcher":
                group.kill_launcher()
            case "all":
                group.kill_all()
        if not (survives := group.runs):
            group = arena.start(wait=False, **PATIENT)
        wait_until(lambda: _is_freed(arena, group), lambda: group.text)
        if survives:
            free_after_s.append(time.monotonic() - began_at)
        time.sleep(arena.rng.uniform(0, MOST_GAP_S))
        if len(group.family()) > 1:
            arena.tally.broken.append("a worker has ranks although its GPUs are to be free")
        resume(arena.connection)
        return time.monotonic()

    while not arena.all_ended() and arena.tally.num_faults < arena.size.num_jobs // JOBS_A_FAULT:
        arena.breathe(LEAST_GAP_S, MOST_GAP_S)
        arena.strike(strike)
    arena.tally.notes.append(f"the GPUs were free after {', '.join(f'{each:.1f}' for each in sorted(free_after_s))} s")


def _is_freed(arena: Arena, group: Group) -> bool:
    """Whether a worker says that its GPUs are free."""
    ranks = [rank for each in read_groups(arena.connection) for rank in each.ranks if rank.pid == group.process.pid]
    return bool(ranks) and all(rank.rest is not None and rank.rest.reason == "freed" for rank in ranks)


def again_and_again(arena: Arena, fault: Callable[[Group], None], **environment: str) -> None:
    """Start a worker and inject a fault every few seconds, once for each four jobs; start it again where it ends."""
    group = arena.start(**environment)

    def strike() -> None:
        nonlocal group
        fault(group)
        group = group if group.runs else arena.start(**environment)

    while not arena.all_ended() and arena.tally.num_faults < arena.size.num_jobs // JOBS_A_FAULT:
        arena.breathe(LEAST_GAP_S, MOST_GAP_S)
        arena.strike(strike)
