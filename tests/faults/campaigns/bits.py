"""Videos of real tensors, killed after their first checkpoint: the same bits as undisturbed, and little done again."""

import json
from pathlib import Path

from svdq.pipeline.models.svd.tiny import write_tiny_model
from tests.faults.arena import Arena
from tests.faults.frames import RecordedReference
from tests.faults.waiting import wait_until

#: So many that a video takes more than the 30 s after which a rank saves it, unless a step takes less than 60 ms.
STEPS = 500
#: Seconds after the first checkpoint within which everything is killed.
AFTER_S = 5.0
#: The most steps that a kill may cost: those of AFTER_S, with room for a machine that is suddenly less busy.
MOST_STEPS_AGAIN = STEPS // 4
#: Seconds that a video may take on a busy machine.
PATIENCE_S = 900.0


def bits(arena: Arena) -> None:
    """kill -9 of everything late in every video of an untrained SVD; png files hold its bits."""
    model = arena.folder / "tiny"
    write_tiny_model(model)
    arena.model = str(model)
    arena.tally.most_steps_again = MOST_STEPS_AGAIN
    seeds = [arena.rng.getrandbits(31) for _ in range(arena.size.num_jobs)]
    arena.reference = _undisturbed(arena, seeds)
    group = arena.start()
    for seed in seeds:
        job_id = _submit(arena, seed)
        checkpoints = arena.settings.home / "checkpoints" / job_id

        def is_saved(checkpoints: Path = checkpoints) -> bool:
            return any(checkpoints.glob("*.safetensors")) or arena.all_ended()

        wait_until(is_saved, "a video has a checkpoint", PATIENCE_S)
        arena.breathe(0.0, AFTER_S)

        def strike() -> None:
            nonlocal group
            group.kill_all()
            group = arena.start()

        arena.strike(strike)
        wait_until(arena.all_ended, "the video is done", PATIENCE_S)
        # It ended before the kill, or it started anew.
        if "resumed" not in json.loads(_output(arena, job_id, ".json").read_text()):
            arena.tally.broken.append(f"{job_id} did not continue from a checkpoint")


def _undisturbed(arena: Arena, seeds: list[int]) -> RecordedReference:
    """Make the same videos before any fault, and take note of their frames."""
    group = arena.start()
    reference = RecordedReference()
    for seed in seeds:
        job_id = _submit(arena, seed)
        wait_until(arena.all_ended, "an undisturbed video is done", PATIENCE_S)
        reference.record(arena.job_of(job_id), "png", _output(arena, job_id))
    arena.stop(group)
    return reference


def _submit(arena: Arena, seed: int) -> str:
    return arena.submit(steps=STEPS, seed=seed, formats=("png",), frames=3, width=256, height=256)


def _output(arena: Arena, job_id: str, suffix: str = "") -> Path:
    return arena.storage / "outputs" / f"{arena.job_of(job_id).name}-{job_id}{suffix}"
