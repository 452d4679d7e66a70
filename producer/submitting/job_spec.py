"""The videos to make of a photo: their parameters, number, time and names; makes jobs of them."""

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import date, datetime
from itertools import product
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.known_model import NOT_KNOWN, Expected
from svdq.pipeline.models.model_name import model_stem
from svdq.pipeline.video_parameters import LoraChoice
from svdq.producer.job import Job
from svdq.producer.name_templates import (
    checked_folder,
    has_field,
    literal,
    read_folder,
    render_folder,
    render_name,
    template_values,
)
from svdq.producer.queue import check_priority
from svdq.producer.records import LINK_NOTE, LOCATION_NOTE, SOURCE_NOTE, TAKEN_NOTE
from svdq.producer.submitting.chain_jobs import check_first, further_links
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.entries import Entry
from svdq.producer.submitting.model_choice import check_last_frame, check_step_cache, threshold_for
from svdq.producer.submitting.new_job import known_for, make_job, seed_of
from svdq.producer.submitting.parameters import MAX_VIDEOS, WITH_PROMPTS, as_flag
from svdq.producer.submitting.photos import Photo, crop_warning

ANY_DAY = date(2000, 1, 1)  # in ids, which do not depend on the day
#: Placeholder for the storage key of a photo that is not checked yet.
ANY_PHOTO = f"inputs/{'0' * 64}.jpg"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """The videos to make of a photo."""

    drafts: tuple[Draft, ...] = (Draft(),)  # parameters of its videos: one set, or several for a sweep
    expected: Expected = NOT_KNOWN  # decides the family of videos whose parameters do not
    variations: int = 1  # number of videos for each set, each with its own seed
    priority: str = "default"
    name: str | None = None  # template for names; None means the stem of the photo's file name
    folder: str = ""  # template for the folder below outputs/, "" for outputs/ itself
    at: datetime | None = None  # when to queue the jobs, with a time zone; None means at once
    depends_on: tuple[str, ...] = ()  # ids of jobs, or prefixes of them, that are to have finished or failed first
    #: The prompts of further links, "" for none: each video begins a chain.
    then: tuple[str, ...] = ()
    #: The LoRAs of each further link that has its own; None: the video's.
    then_loras: tuple[tuple[LoraChoice, ...] | None, ...] = ()
    force: bool = False
    keep_location: bool = False  # whether videos say where their photo was taken
    request_key: str = ""  # part of the ids unless it is "", so that a request gets separate jobs
    notes: tuple[tuple[str, str], ...] = ()  # recorded with the jobs; they change neither the videos nor the ids
    owner: str = ""  # whose jobs they are; "" for nobody's
    notice: str = ""  # a sentence for who asked, about what could not be kept; "" for none

    @property
    def nonce(self) -> str:
        """What is part of the ids besides the video."""
        return self.request_key or (secrets.token_hex(8) if self.force else "")

    @property
    def num_jobs(self) -> int:
        """Number of jobs for one photo."""
        return self.variations * len(self.drafts) * self.num_links

    @property
    def num_links(self) -> int:
        """Number of jobs for each video: its links."""
        return 1 + len(self.then)

    @property
    def is_open(self) -> bool:
        """Whether nothing decides the family of one of its videos."""
        return any(self._family_of(draft) is None for draft in self.drafts)

    def _family_of(self, draft: Draft, spell: Callable[[str], str] = as_flag) -> str | None:
        """Return the family of videos, None if it is open; the prompts of further links decide it, too."""
        return draft.family_for(self.expected, spell) or (self.of_prompts if any(self.then) else None)

    @property
    def of_prompts(self) -> str:
        """The family of videos of which nothing is known but that they have prompts."""
        return next((name for name in WITH_PROMPTS if name in self.expected.families), WITH_PROMPTS[0])

    def with_output(self, text: str) -> "JobSpec":
        """Return it with a folder as a user writes it; without a name, a last part with a field names the files.

        Raises InputError as `read_folder`.
        """
        folder, _, last = text.rpartition("/")
        if self.name is None and has_field(last):
            return replace(self, folder=read_folder(folder), name=last)
        return replace(self, folder=read_folder(text))

    def below(self, folder: str) -> "JobSpec":
        """Return it for a photo in a subfolder, whose video gets the same one unless the template has `{folder}`."""
        if "{folder" in self.folder:
            return self
        return replace(self, folder=checked_folder(f"{self.folder}/{literal(folder)}".strip("/")))

    def with_prompt(self, prompt: str) -> "JobSpec":
        """Return it with a prompt for the videos that have none; itself if their families have no prompts."""

        def add(each: Draft) -> Draft:
            takes_one = each.prompt is None and self._family_of(each) in WITH_PROMPTS
            return replace(each, prompt=prompt) if takes_one else each

        drafts = tuple(map(add, self.drafts))
        return self if drafts == self.drafts else replace(self, drafts=drafts)

    def with_last_photo(self) -> "JobSpec":
        """Return it for photos that have another one for the last frame."""
        return replace(self, drafts=tuple(replace(each, last_image=ANY_PHOTO) for each in self.drafts))

    def check(self, spell: Callable[[str], str] = as_flag) -> None:
        """Raise InputError if a value is not allowed; `spell` returns the name of a parameter for it."""
        check_priority(self.priority)
        if self.at is not None and self.depends_on:
            raise InputError(
                f"{spell('at')} and {spell('depends_on')} cannot be combined; give one of them.", field="at"
            )
        if not 1 <= self.num_jobs <= MAX_VIDEOS:
            raise InputError(
                f"The variations and sweeps ask for {self.num_jobs:,} videos of a photo; ask for 1 to {MAX_VIDEOS:,}."
            )
        for draft in self.drafts:
            for variation in {0, self.variations - 1}:
                job = self._make(draft, variation, spell, image=ANY_PHOTO, name="photo")
                if self.then:
                    check_first(job, spell)
                first = Entry(job=job, job_id="0" * 20)
                *_, end = (first, *further_links(first, draft, self.then, self.then_loras, spell))
                check_step_cache(self.expected.model, job, self.at)
                check_last_frame(self.expected.model, end.job, self.at, spell)
            self.placed(job, "photo", "", 1)

    def example(self) -> Job:
        """Return the first job of any photo."""
        return self._make(self.drafts[0], 0, image=ANY_PHOTO, name="photo")

    def entries(self, photo: Photo, first_index: int) -> Iterator[Entry]:
        """Create the jobs of a photo; the first is number `first_index` of the submission, from 1."""
        for number, (draft, variation) in enumerate(product(self.drafts, range(self.variations))):
            draft = replace(draft, last_image=photo.last.key) if photo.last else draft
            index = first_index + number * self.num_links
            first = self._entry(photo, draft, variation)
            placed = self.placed(first.job, photo.name, photo.source, index, variation, taken=photo.capture.time)
            where = {"folder": placed.folder, "name": placed.name}
            for each in (first, *further_links(first, draft, self.then, self.then_loras)):
                yield replace(each, job=each.job.model_copy(update=where))

    def placed(
        self,
        job: Job,
        stem: str,
        source: str,
        index: int,
        variation: int = 0,
        *,
        day: date | None = None,
        taken: datetime | None = None,
    ) -> Job:
        """Return a job with the folder and the name of the templates; raises InputError as `render_name`.

        `stem`, `source` and `taken` are the photo's, `index` is the number of the job in the submission, from 1.
        """
        model = job.model or (model_stem(self.expected.model.name) if self.expected.model and not day else "")
        own = {"index": index, "n": index, "variation": variation + 1, "owner": self.owner}
        values = template_values(job, stem, source, model, day or date.today(), taken) | own
        name = job.name if self.name is None else render_name(self.name, values)
        folder = render_folder(self.folder, values) if "{" in self.folder or "}" in self.folder else self.folder
        return job.model_copy(update={"folder": folder, "name": name})

    def _make(self, options: Draft, variation: int, spell: Callable[[str], str] = as_flag, **photo: Any) -> Job:
        folder = "" if "{" in self.folder or "}" in self.folder else self.folder
        photo |= {"folder": folder, "chained": bool(self.then)}
        options = replace(options, family=self._family_of(options, spell))
        if isinstance(options.step_cache, str):
            plain = make_job(replace(options, step_cache=None), model=self.expected.model, spell=spell, **photo)
            threshold = threshold_for(self.expected.model, plain, self.at, options.step_cache, spell)
            options = replace(options, step_cache=threshold)
        job = make_job(options, model=self.expected.model, spell=spell, variation=variation, **photo)
        # The last frame is for the last link.
        return job.model_copy(update={"last_image": None}) if self.then and getattr(job, "last_image", None) else job

    def _entry(self, photo: Photo, draft: Draft, variation: int) -> Entry:
        """Create the first job of a video, in the folder by which its id is made."""
        job = self._make(draft, variation, image=photo.key, name=photo.name, photo_size=photo.size)
        drawn = draft.seed is None
        # The position in the submission and the day change each time, and a drawn seed follows from the id.
        same = job.model_copy(update={"seed": 0}) if drawn else job
        of_id = self.placed(same, photo.name, photo.source, 0, variation, day=ANY_DAY, taken=photo.capture.time)
        job = job.model_copy(update={"folder": of_id.folder})
        job_id = job.digest(
            seed_was_drawn=drawn,
            given_name="" if self.name is None else of_id.name,
            variation=variation if drawn else 0,
            nonce=self.nonce,
        )
        if drawn:
            job = job.model_copy(update={"seed": seed_of(job_id)})
        usual = known_for(self.expected.model, job.family).usual
        cropped = (crop_warning(each.size, job, (usual.width, usual.height)) for each in (photo, photo.last) if each)
        return Entry(
            job=job,
            job_id=job_id,
            photo=str(photo.path if photo.data is not None else photo.path.absolute()),
            warning=next(filter(None, cropped), ""),
            priority=self.priority,
            at=self.at,
            after=self.depends_on,
            notes=self._notes_of(photo),
            owner=self.owner,
        )

    def _notes_of(self, photo: Photo) -> dict[str, str]:
        known = {
            SOURCE_NOTE: photo.source,
            TAKEN_NOTE: photo.capture.time_text,
            LOCATION_NOTE: photo.capture.location_text if self.keep_location else "",
            LINK_NOTE: f"1 of {self.num_links}" if self.then else "",
        }
        return dict(self.notes) | {name: text for name, text in known.items() if text}


NO_OPTIONS = JobSpec()
