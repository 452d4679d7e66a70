"""An order for a photo: which videos, when and how many, and the jobs with their ids that result from it."""

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from datetime import datetime

from svdq.pipeline.errors import InputError
from svdq.producer.job import Job
from svdq.producer.queue import PRIORITIES
from svdq.producer.submitting.names import check_template, render_name
from svdq.producer.submitting.options import MAX_VIDEOS, SubmitOptions, as_flag, make_job
from svdq.producer.submitting.photos import Photo

#: Fields of name templates besides the parameters of the video.
OWN_FIELDS = ("stem", "index", "variation")
NAME_FIELDS = frozenset([*OWN_FIELDS, *(field.name for field in fields(SubmitOptions) if field.name != "formats")])

#: A placeholder photo, to check an order before its photo is known.
_ANY_PHOTO = {"image": f"inputs/{'0' * 64}.jpg", "name": "photo"}


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """What is to be made of a photo."""

    #: Parameters of its videos: one set, or several for a sweep.
    options: tuple[SubmitOptions, ...] = (SubmitOptions(),)
    #: Number of videos for each set, each with its own seed.
    variations: int = 1
    #: The priority, which selects the queue.
    priority: str = "default"
    #: Template for names; None means the stem of the photo's file name.
    name: str | None = None
    #: Folder below outputs/, "" for outputs/ itself.
    folder: str = ""
    #: When to queue the jobs, with a time zone; None means at once.
    at: datetime | None = None
    #: Ids of jobs that are to have finished or failed first.
    depends_on: tuple[str, ...] = ()
    #: Make new jobs although the same ones exist.
    force: bool = False

    @property
    def num_jobs(self) -> int:
        """Number of jobs for one photo."""
        return self.variations * len(self.options)

    def check(self, spell: Callable[[str], str] = as_flag) -> None:
        """Check the order, independent of the photo.

        Args:
            spell: returns the name of a parameter for errors.

        Raises:
            InputError: a value is not allowed.
        """
        if self.priority not in PRIORITIES:
            raise InputError(f"There is no priority {self.priority!r}; choose one of {', '.join(PRIORITIES)}.")
        if self.at is not None and self.depends_on:
            raise InputError("--at and --depends-on cannot be combined; give one of them.")
        if not 1 <= self.num_jobs <= MAX_VIDEOS:
            raise InputError(
                f"--variations and --sweep ask for more than {MAX_VIDEOS:,} videos of a photo, or for none; ask for "
                "fewer."
            )
        if self.name is not None:
            check_template(self.name, NAME_FIELDS)
        for options in self.options:
            for variation in {0, self.variations - 1}:
                job = make_job(options, spell=spell, variation=variation, folder=self.folder, **_ANY_PHOTO)
            if self.name is not None:
                _render(self.name, job, job.name, index=1, variation=0)

    def jobs(self, photo: Photo, first_index: int) -> Iterator[tuple[Job, str]]:
        """Create the jobs of a photo, each with its id.

        Args:
            photo: the photo.
            first_index: number of its first job in the submission, from 1.
        """
        number = first_index
        for options in self.options:
            for variation in range(self.variations):
                yield self._job(photo, options, variation, number)
                number += 1

    def _job(self, photo: Photo, options: SubmitOptions, variation: int, index: int) -> tuple[Job, str]:
        job = make_job(options, variation=variation, image=photo.key, name=photo.name, folder=self.folder)
        drawn = options.seed is None
        given_name = ""
        if self.name is not None:
            # A random seed and the position in the submission change each time, so they are not part of the id.
            same = job.model_copy(update={"seed": 0}) if drawn else job
            given_name = _render(self.name, same, photo.name, index=0, variation=variation)
            name = _render(self.name, job, photo.name, index=index, variation=variation)
            job = job.model_copy(update={"name": name})
        job_id = job.digest(
            seed_was_drawn=drawn,
            given_name=given_name,
            variation=variation if drawn else 0,
            nonce=secrets.token_hex(8) if self.force else "",
        )
        return job, job_id


def _render(template: str, job: Job, stem: str, *, index: int, variation: int) -> str:
    values = job.model_dump(include=set(NAME_FIELDS.difference(OWN_FIELDS)))
    return render_name(template, values | {"stem": stem, "index": index, "variation": variation + 1})
