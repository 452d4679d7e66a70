"""Chains whose workers are killed in the middle of their links."""

from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.sources import PhotoRequest
from svdq.producer.submitting.submission import submit_all
from tests.faults.arena import PHOTO, Arena
from tests.faults.campaigns.kills import PATIENT, STEPS, again_and_again
from tests.faults.group import Group
from tests.faults.plan import FINISHED

LINKS = 3


def chains(arena: Arena) -> None:
    """kill -9 of a rank or of everything: each link is rendered once, with the frames of the chain up to it."""
    for _ in range(arena.size.num_jobs // LINKS):
        shape = {"steps": STEPS, "frames": 5, "width": 64, "height": 64}
        options = Draft(seed=arena.rng.getrandbits(31), **shape)
        spec = JobSpec(drafts=(options,), then=("",) * (LINKS - 1), force=True)
        for submission in submit_all(arena.settings, [PhotoRequest(path=arena.folder / PHOTO, spec=spec)]):
            arena.jobs[submission.id] = FINISHED

    def kill(group: Group) -> None:
        if arena.rng.random() < 0.5:
            group.kill_rank(arena.rng)
        else:
            group.kill_all()

    again_and_again(arena, kill, **PATIENT)
