"""Videos of real tensors, killed after their first checkpoint: the same bits as undisturbed, and little done again."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from svdq.pipeline.models.ltx.tiny import write_tiny_ltx
from svdq.pipeline.models.svd.tiny import write_tiny_model
from svdq.pipeline.models.wan.tiny import write_tiny_wan
from tests.faults.arena import Arena
from tests.faults.frames import RecordedReference
from tests.waiting import wait_until

AFTER_S = 3.0  # seconds after the first checkpoint within which everything is killed
PATIENCE_S = 900.0  # seconds that a video may take on a busy machine


@dataclass(frozen=True, kw_only=True)
class _Videos:
    """The videos of a family."""

    write_model: Callable[[Path], None]  # writes the untrained model into a folder
    steps: int  # steps: so many that those after the first checkpoint take more than AFTER_S
    #: The most steps that a kill may cost: those of AFTER_S, with room for a machine that is suddenly less busy.
    most_steps_again: int
    options: Mapping[str, object]  # other parameters
    #: Options of the worker, undisturbed and under faults: the division among ranks makes no difference.
    undisturbed: Sequence[str] = ()
    disturbed: Sequence[str] = ()


VIDEOS = {
    # Saved after 5 s (`often`) and killed before 8 s: it takes longer unless a step takes less than 50 ms.
    "svd": _Videos(write_model=write_tiny_model, steps=160, most_steps_again=80, options={"frames": 3}),
    # The rank with the first expert saves a video when it passes it on.
    "wan": _Videos(
        write_model=write_tiny_wan,
        steps=400,
        most_steps_again=200,
        options={"family": "wan", "frames": 5, "prompt": "Ein Hund läuft."},
        undisturbed=("--experts", "resident"),
        disturbed=("--experts", "bound"),
    ),
    # Guided, in two stages: four passes a step.
    "ltx": _Videos(
        write_model=lambda folder: write_tiny_ltx(folder, "2.3-dev"),
        steps=160,
        most_steps_again=80,
        options={"family": "ltx", "frames": 9, "stages": 2, "prompt": "Ein Hund bellt."},
    ),
}


def bits(arena: Arena) -> None:
    """kill -9 of everything late in every video of an untrained model; png files hold its bits."""
    videos = VIDEOS[arena.size.family]
    model = arena.folder / "tiny"
    videos.write_model(model)
    arena.model = str(model)
    arena.tally.may_do_again = videos.most_steps_again
    arena.options = videos.undisturbed
    seeds = [arena.rng.getrandbits(31) for _ in range(arena.size.num_jobs)]
    arena.reference = _undisturbed(arena, seeds)
    arena.options = videos.disturbed
    group, _ = arena.start_with("often")
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
            group, _ = arena.start_with("often")

        arena.strike(strike)
        wait_until(arena.all_ended, "the video is done", PATIENCE_S)
        # It ended before the kill, or it started anew.
        if "resumed" not in json.loads(_output(arena, job_id, ".json").read_text()):
            arena.tally.broken.append(f"{job_id} did not continue from a checkpoint")


def _undisturbed(arena: Arena, seeds: list[int]) -> RecordedReference:
    """Make the same videos before any fault, and take note of their frames."""
    group = arena.start()
    reference = RecordedReference()
    job_ids = [_submit(arena, seed) for seed in seeds]
    wait_until(arena.all_ended, "the undisturbed videos are done", PATIENCE_S)
    for job_id in job_ids:
        reference.record(arena.job_of(job_id), "png", _output(arena, job_id))
    arena.stop(group)
    return reference


def _submit(arena: Arena, seed: int) -> str:
    videos = VIDEOS[arena.size.family]
    return arena.submit(steps=videos.steps, seed=seed, formats=("png",), width=256, height=256, **videos.options)


def _output(arena: Arena, job_id: str, suffix: str = "") -> Path:
    return arena.storage / "outputs" / f"{arena.job_of(job_id).name}-{job_id}{suffix}"
