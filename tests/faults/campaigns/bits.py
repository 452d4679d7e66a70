"""Videos of real tensors, killed late: the same bits as undisturbed, and little done again."""

import math

from svdq.pipeline.models.svd.tiny import write_tiny_model
from tests.faults.arena import Arena
from tests.faults.frames import RecordedReference
from tests.faults.waiting import wait_until

STEPS = 60
#: The part of a video that is done when everything is killed.
LATE = 0.9


def bits(arena: Arena) -> None:
    """kill -9 of everything at 90% of every video of an untrained SVD; png files hold its bits."""
    model = arena.folder / "tiny"
    write_tiny_model(model)
    arena.model = str(model)
    seeds = [arena.rng.getrandbits(31) for _ in range(arena.size.num_jobs)]
    arena.reference = _undisturbed(arena, seeds)
    group = arena.start()
    for seed in seeds:
        job_id = arena.submit(steps=STEPS, seed=seed, formats=("png",), frames=3, width=128, height=128)

        def is_late(job_id: str = job_id) -> bool:
            return arena.step_of(job_id) >= LATE * STEPS or arena.all_ended()

        wait_until(is_late, "a video is nearly done")

        def strike() -> None:
            nonlocal group
            group.kill_all()
            group = arena.start()

        arena.strike(strike)
        wait_until(arena.all_ended, "the video is done")
    # A rank's share, and one step that turns make it more.
    arena.tally.most_steps_again = math.ceil(STEPS / arena.size.ranks) + 1


def _undisturbed(arena: Arena, seeds: list[int]) -> RecordedReference:
    """Make the same videos before any fault, and take note of their frames."""
    group = arena.start()
    job_ids = [
        arena.submit(steps=STEPS, seed=seed, formats=("png",), frames=3, width=128, height=128) for seed in seeds
    ]
    wait_until(arena.all_ended, "undisturbed videos are done")
    arena.stop(group)
    reference = RecordedReference()
    for job_id in job_ids:
        job = arena.job_of(job_id)
        reference.record(job, "png", arena.storage / "outputs" / f"{job.name}-{job_id}")
    return reference
