"""Owners with three jobs beside one with three hundred, while ranks of two groups are killed."""

import time
from collections.abc import Mapping, Sequence

from svdq.producer.pauses import pause, resume
from tests.faults.arena import Arena
from tests.faults.campaigns.kills import LEAST_GAP_S, MOST_GAP_S, PATIENT
from tests.waiting import wait_until

STEPS = 14
FEW = 3  # jobs of an owner who has few
JOBS_A_KILL = 40


def owners(arena: Arena) -> None:
    """Owners take turns: those with three jobs do not wait behind three hundred, and everybody's order is kept.

    The three of the second owner, with one group and no kill, are among the first six to start. The three of a third
    one come while two groups work and are killed. A kill returns what a group has in flight to the front of the queue,
    and two groups do not end their jobs in the order in which they took them: so that many jobs may end earlier or
    later than by their turns.
    """
    groups = [arena.start(**PATIENT), arena.start(**PATIENT)]
    groups[1].pause()
    pause(arena.connection)
    ana = [arena.submit(steps=STEPS, owner="ana") for _ in range(max(FEW, arena.size.num_jobs - 2 * FEW))]
    ben = [arena.submit(steps=STEPS, owner="ben") for _ in range(FEW)]
    resume(arena.connection)
    wait_until(lambda: arena.num_ended() >= 2 * FEW, "six jobs have ended")
    places = _places(arena, "started_at")  # two that are written at the same time end in any order
    if (last := max(places.get(job_id, len(arena.jobs)) for job_id in ben)) > 2 * FEW:
        arena.tally.broken.append(f"the last of the three started as number {last}, with one group and no kill")

    groups[1].wake()
    num_before = arena.num_ended()
    carl = [arena.submit(steps=STEPS, owner="carl") for _ in range(FEW)]
    most_in_flight = 0
    while not arena.all_ended() and arena.tally.num_faults < max(1, arena.size.num_jobs // JOBS_A_KILL):
        until = time.monotonic() + arena.rng.uniform(LEAST_GAP_S, MOST_GAP_S)
        while time.monotonic() < until:
            most_in_flight = max(most_in_flight, sum(status == "started" for status, _ in arena.states().values()))
            time.sleep(0.02)
        group = arena.rng.choice(groups)
        arena.strike(lambda group=group: group.kill_rank(arena.rng))
    arena.settle()

    places = _places(arena, "ended_at")
    allowed = num_before + 2 * FEW + 2 * most_in_flight
    last = max(places.get(job_id, len(arena.jobs)) for job_id in carl)
    shift = max(_shift(ana, places), _shift(ben, places), _shift(carl, places))
    arena.tally.notes.append(
        f"the last of the three that came at {num_before} ended as number {last}; up to {most_in_flight} were in "
        f"flight, and jobs of an owner ended at most {shift} places from their order"
    )
    if last > allowed:
        arena.tally.broken.append(f"the last of the three ended as number {last}, not {allowed} or earlier")
    if shift > 2 * most_in_flight:
        arena.tally.broken.append(f"a job ended {shift} places from its order, more than twice {most_in_flight}")


def _places(arena: Arena, field: str) -> dict[str, int]:
    """Return the places of jobs in the order of a time that RQ has recorded of them, from 1, by id."""
    job_ids = list(arena.jobs)
    with arena.connection.pipeline(transaction=False) as pipeline:
        for job_id in job_ids:
            pipeline.hget(f"rq:job:{job_id}", field)
        times = zip(pipeline.execute(), job_ids, strict=True)
    return {job_id: place for place, (_, job_id) in enumerate(sorted(each for each in times if each[0]), 1)}


def _shift(submitted: Sequence[str], places: Mapping[str, int]) -> int:
    """Return how many places a job of one owner has ended from its order among them, at most."""
    ended = sorted((job_id for job_id in submitted if job_id in places), key=places.__getitem__)
    return max((abs(place - submitted.index(job_id)) for place, job_id in enumerate(ended)), default=0)
