"""Further links of chains: jobs that continue the video of the job before."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from svdq.pipeline.errors import InputError
from svdq.pipeline.video_parameters import LoraChoice
from svdq.producer.job import JOBS, Job, last_frame_key
from svdq.producer.records import LINK_NOTE
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.entries import Entry
from svdq.producer.submitting.new_job import seed_of, valid_job
from svdq.producer.submitting.parameters import WITH_PROMPTS, as_flag, shorten


def check_first(job: Job, spell: Callable[[str], str]) -> None:
    """Raise InputError if a video cannot be continued."""
    then = spell("then")
    for name in ("boomerang", "loop"):
        if getattr(job, name, None):
            raise InputError(
                f"{then} and {spell(name)} cannot be combined: the links of a chain must join.", field="then"
            )
    if job.formats != ("mp4",):
        raise InputError(f"{then} makes mp4 files only; leave out {spell('formats')}.", field="formats")
    if job.frames == 1:
        raise InputError(
            f"{then} needs at least 2 {spell('frames')}: links share a frame with the one before.", field="frames"
        )


def further_links(
    first: Entry,
    draft: Draft,
    then: Sequence[str],
    then_loras: Sequence[tuple[LoraChoice, ...] | None] = (),
    spell: Callable[[str], str] = as_flag,
) -> Iterator[Entry]:
    """Create the jobs that continue a video, one for each prompt of `then`; the id of the one before is part of an id.

    `then_loras` has the LoRAs of each link that has its own. Raises InputError.
    """
    entry, kind = first, JOBS[first.job.family]
    for number, prompt in enumerate(then, start=2):
        own = then_loras[number - 2] if then_loras else None
        loras = first.job.loras if own is None else own
        values = entry.job.model_dump() | {"image": last_frame_key(entry.job_id), "loras": loras}
        if first.job.family in WITH_PROMPTS:
            values |= {"prompt": prompt, "last_image": draft.last_image if number == len(then) + 1 else None}
        elif prompt:
            raise InputError(
                f"{spell('then')} {shorten(prompt)!r} does not apply to {kind.title}, which takes no prompts; "
                f"continue its videos with {spell('then')} ''.",
                field="then",
            )
        job = valid_job(kind, values, lambda _: spell("then"), field="then")
        job_id = job.digest(seed_was_drawn=draft.seed is None)
        if draft.seed is None:
            job = job.model_copy(update={"seed": seed_of(job_id)})
        notes = {**first.notes, LINK_NOTE: f"{number} of {len(then) + 1}"}
        after = (entry.job_id,)
        entry = replace(first, job=job, job_id=job_id, at=None, after=after, notes=notes, warning="")
        yield entry
