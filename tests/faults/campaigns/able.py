"""Three workers of different abilities on one queue, whose jobs only some of them can make, while they are killed."""

import re
import time
from collections import Counter

from svdq.pipeline.models.lora_folder import digest_of
from svdq.pipeline.video_parameters import LoraChoice
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.sources import PhotoRequest
from svdq.producer.submitting.submission import submit_all
from tests.faults.arena import PHOTO, Arena
from tests.faults.campaigns.kills import LEAST_GAP_S, MOST_GAP_S, PATIENT
from tests.faults.group import Group
from tests.faults.plan import FINISHED

STEPS = 60  # long enough that the kills strike while jobs wait for each of the workers
NAMES = ("a", "b")  # the LoRAs; the first worker has none of them, the second one the first, the third one both
OWNERS = ("ana", "ben")
JOBS_A_KILL = 4
ENDED = re.compile(r"Job ([0-9a-f]{20}) finished")


def able(arena: Arena) -> None:
    """kill -9 of a rank, or of all of a worker, again and again: each job ends once, on a worker that can make it."""
    folders = [arena.folder / f"loras{number}" for number in range(len(NAMES) + 1)]
    for number, folder in enumerate(folders):
        folder.mkdir()
        for name in NAMES[:number]:
            (folder / f"{name}.safetensors").write_text(name)
    loras = tuple(LoraChoice(name=name, digest=digest_of(folders[-1] / f"{name}.safetensors")) for name in NAMES)
    started: list[tuple[int, Group]] = []  # the workers, each with the number of LoRAs that it has

    def start(number: int) -> Group:
        started.append((number, arena.start(wait=False, **PATIENT, SVDQ_LORAS=str(folders[number]))))
        return started[-1][1]

    groups = [start(number).ready() for number in range(len(folders))]
    needs: dict[str, int] = {}  # how many LoRAs each job has
    while len(arena.jobs) < arena.size.num_jobs:
        number = len(arena.jobs) % len(folders)
        if len(arena.jobs) % 4 == 3:
            needs |= _submit_chain(arena, loras[:number], loras)
        else:
            needs[arena.submit(steps=STEPS, owner=arena.rng.choice(OWNERS), loras=loras[:number])] = number

    def kill() -> None:
        number = arena.rng.randrange(len(groups))
        if arena.rng.random() < 0.75:
            groups[number].kill_rank(arena.rng)
            return
        groups[number].kill_all()
        time.sleep(arena.rng.uniform(0, MOST_GAP_S))  # its jobs wait meanwhile
        groups[number] = start(number)

    while not arena.all_ended() and arena.tally.num_faults < max(1, arena.size.num_jobs // JOBS_A_KILL):
        arena.breathe(LEAST_GAP_S, MOST_GAP_S)
        arena.strike(kill, kills=False)
    for group in groups:
        group.ready()
    arena.settle()

    made = {job_id: number for number, group in started for job_id in ENDED.findall(group.text)}
    if wrong := [job_id for job_id, number in made.items() if number < needs[job_id]]:
        arena.tally.broken.append(f"workers have made {len(wrong)} videos that they cannot make, such as {wrong[0]}")
    counted = Counter(made.values())
    each = ", ".join(str(counted[number]) for number in range(len(folders)))
    arena.tally.notes.append(f"videos of the workers with no LoRA, with one and with both: {each}")


def _submit_chain(arena: Arena, first: tuple[LoraChoice, ...], second: tuple[LoraChoice, ...]) -> dict[str, int]:
    """Submit a chain of two links with LoRAs of their own; return the number of LoRAs of each job."""
    draft = Draft(steps=STEPS, frames=5, width=64, height=64, seed=arena.rng.getrandbits(31), loras=first)
    spec = JobSpec(drafts=(draft,), then=("",), then_loras=(second,), force=True)
    made = [*submit_all(arena.settings, [PhotoRequest(path=arena.folder / PHOTO, spec=spec)])]
    arena.jobs |= dict.fromkeys((each.id for each in made), FINISHED)
    return {each.id: len(each.job.loras) for each in made}
