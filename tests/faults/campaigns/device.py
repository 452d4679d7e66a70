"""A GPU that fails for good while its group renders."""

import time

from tests.faults.arena import Arena
from tests.waiting import wait_until

STEPS = 28
#: A step as long as a short one on a GPU, which the model sleeps.
STEP_S = 0.05
FINISHED = 0.2  # the share of the jobs that is finished when the GPU fails
LOSS_S = 30.0  # seconds that the loss may cost, beyond what the other ranks need for the rest


def device(arena: Arena) -> None:
    """One of the GPUs fails for good: the others do its work, at their own pace, and people are told."""
    arena.submit_all(steps=STEPS)
    arena.options = ("--device", "cuda")
    names = [str(number) for number in range(arena.size.ranks)]
    group, folder = arena.start_with("device", CUDA_VISIBLE_DEVICES=",".join(names))
    wait_until(lambda: arena.num_ended() >= FINISHED * arena.size.num_jobs, "some videos are finished")
    broken = arena.rng.choice(names)

    arena.strike(lambda: (folder / broken).touch())
    failed_at = time.monotonic() - arena.tally.recoveries_s[-1]
    left = arena.size.num_jobs - arena.num_ended()
    arena.settle()
    took_s = time.monotonic() - failed_at
    ideal_s = left * STEPS * STEP_S / (arena.size.ranks - 1)
    arena.tally.notes.append(f"after the failure {took_s:.1f} s, at the pace of the other ranks {ideal_s:.1f} s")
    if took_s > ideal_s + LOSS_S:
        arena.tally.broken.append(f"the rest took {took_s:.1f} s, {took_s - ideal_s:.1f} s more than it may")
    if f"GPU {broken} has failed (it is broken)." not in group.text:
        arena.tally.broken.append("nobody was told which GPU had failed")
