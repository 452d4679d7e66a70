"""The videos to make of a photo: their parameters, number, time and names; makes jobs of them."""

import hashlib
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date, datetime
from itertools import product
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from svdq.pipeline.errors import InputError, first_error
from svdq.pipeline.models.families import DEFAULT_FAMILY, FAMILIES, published_model
from svdq.pipeline.models.known_model import KnownModel
from svdq.pipeline.video_parameters import MAX_SIDE, LoraChoice
from svdq.producer.job import JOBS, Job, last_frame_key, model_stem
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
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.parameters import MAX_VIDEOS, SEED_BITS, WITH_PROMPTS, as_flag, shorten
from svdq.producer.submitting.photos import Photo, nearest_side, nearest_size

_AUTO_MULTIPLE = 32  # of sides that are chosen: Wan 2.2 TI2V-5B needs 32
_ANY_DAY = date(2000, 1, 1)  # in ids, which do not depend on the day
#: Placeholder for the storage key of a photo that is not checked yet.
ANY_PHOTO = f"inputs/{'0' * 64}.jpg"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """The videos to make of a photo."""

    options: tuple[Draft, ...] = (Draft(),)  # parameters of its videos: one set, or several for a sweep
    model: KnownModel | None = None  # decides the family of videos whose parameters do not
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
    owner: str = ""  # whose jobs they are; "" for the owner of the settings

    @property
    def num_jobs(self) -> int:
        """Number of jobs for one photo."""
        return self.variations * len(self.options) * self.num_links

    @property
    def num_links(self) -> int:
        """Number of jobs for each video: its links."""
        return 1 + len(self.then)

    @property
    def is_open(self) -> bool:
        """Whether nothing decides the family of one of its videos."""
        return any(self._family_of(options) is None for options in self.options)

    def _family_of(self, options: Draft) -> str | None:
        """Return the family of videos, None if it is open; the prompts of further links decide it, too."""
        return options.family_for(self.model) or (WITH_PROMPTS[0] if any(self.then) else None)

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

        options = tuple(map(add, self.options))
        return self if options == self.options else replace(self, options=options)

    def with_last_photo(self) -> "JobSpec":
        """Return it for photos that have another one for the last frame."""
        return replace(self, options=tuple(replace(each, last_image=ANY_PHOTO) for each in self.options))

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
        for options in self.options:
            for variation in {0, self.variations - 1}:
                job = self._make(options, variation, spell, image=ANY_PHOTO, name="photo")
                self._check_chain(job, spell)
                *_, (end, _) = [(job, ""), *self._links(job, "0" * 20, options, spell)]
                self._check_last_frame(end, spell)
                self._check_step_cache(job)
            if self.name is not None:
                render_name(self.name, self._values(job, "photo", index=1, variation=0))
            self._folder_of(self._values(job, "photo", index=1, variation=0))

    def usual_size(self, job: Job) -> tuple[int, int]:
        """Return width and height in pixels that the expected model chooses for a job that leaves them open."""
        usual = _known_for(self.model, job.family).usual
        return usual.width, usual.height

    def example(self) -> Job:
        """Return the first job of any photo."""
        return self._make(self.options[0], 0, image=ANY_PHOTO, name="photo")

    def jobs(self, photo: Photo, first_index: int) -> Iterator[tuple[Job, str]]:
        """Create the jobs of a photo, each with its id; the first is number `first_index` of the submission, from 1."""
        videos = product(self.options, range(self.variations))
        for number, (options, variation) in enumerate(videos):
            options = replace(options, last_image=photo.last.key) if photo.last else options
            job, job_id = self._job(photo, options, variation, first_index + number * self.num_links)
            index = first_index + number * self.num_links
            folder = self._folder_of(self._values(job, photo.name, photo.source, index=index, variation=variation))
            for each, each_id in [(job, job_id), *self._links(job, job_id, options)]:
                yield each.model_copy(update={"folder": folder}), each_id

    def finishing(self, made: Job, finished: str, stem: str, source: str, index: int) -> tuple[Job, str]:
        """Create the job that upscales a finished video, with its id; `finished` is as `Job.finishes`.

        Its files are beside the video's unless there is a template. `stem` and `source` are the photo's,
        and `index` is the number of the job in the submission, from 1. Raises InputError.
        """
        values = made.model_dump() | {"upscale": self.options[0].upscale, "chained": False, "finishes": finished}
        try:
            job = type(made).model_validate(values)
        except ValidationError as error:
            raise _as_input_error(error, type(made), values, as_flag) from error
        of_id, of_files = (
            self._placed(job, self._values(job, stem, source, index=index, variation=0, day=day))
            for index, day in ((0, _ANY_DAY), (index, None))
        )
        given_name = of_id.name if self.name is not None else ""
        nonce = secrets.token_hex(8) if self.force else ""
        return of_files, of_id.digest(seed_was_drawn=False, given_name=given_name, nonce=nonce)

    def _placed(self, job: Job, values: Mapping[str, Any]) -> Job:
        folder = self._folder_of(values) if self.folder else job.folder
        name = render_name(self.name, values) if self.name is not None else job.name
        return job.model_copy(update={"folder": folder, "name": name})

    def _folder_of(self, values: Mapping[str, Any]) -> str:
        return render_folder(self.folder, values) if "{" in self.folder or "}" in self.folder else self.folder

    def _values(
        self, job: Job, stem: str, source: str = "", *, index: int, variation: int, day: date | None = None
    ) -> dict[str, Any]:
        """Return the fields of templates; `source` is the photo's."""
        model = job.model or (model_stem(self.model.name) if self.model and not day else "")
        own = {"index": index, "n": index, "variation": variation + 1, "owner": self.owner}
        return template_values(job, stem, source, model, day or date.today()) | own

    def _make(self, options: Draft, variation: int, spell: Callable[[str], str] = as_flag, **photo: Any) -> Job:
        folder = "" if "{" in self.folder or "}" in self.folder else self.folder
        photo |= {"folder": folder, "chained": bool(self.then)}
        if options.family_for(self.model, spell) is None:
            options = replace(options, family=self._family_of(options))
        if isinstance(options.step_cache, str):
            plain = make_job(replace(options, step_cache=None), model=self.model, spell=spell, **photo)
            options = replace(options, step_cache=self._threshold(plain, options.step_cache, spell))
        job = make_job(options, model=self.model, spell=spell, variation=variation, **photo)
        # The last frame is for the last link.
        return job.model_copy(update={"last_image": None}) if self.then and getattr(job, "last_image", None) else job

    def _check_chain(self, job: Job, spell: Callable[[str], str]) -> None:
        if not self.then:
            return
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

    def _links(
        self, job: Job, job_id: str, options: Draft, spell: Callable[[str], str] = as_flag
    ) -> Iterator[tuple[Job, str]]:
        """Create the jobs that continue a chain, each with its id, which the id of the link before is part of."""
        of_video = job.loras
        for number, prompt in enumerate(self.then, start=2):
            own = self.then_loras[number - 2] if self.then_loras else None
            loras = of_video if own is None else own
            values = job.model_dump() | {"image": last_frame_key(job_id), "loras": loras}
            if job.family in WITH_PROMPTS:
                values |= {"prompt": prompt, "last_image": options.last_image if number == self.num_links else None}
            elif prompt:
                raise InputError(
                    f"{spell('then')} {shorten(prompt)!r} does not apply to {job.title}, which takes no prompts; "
                    f"continue its videos with {spell('then')} ''.",
                    field="then",
                )
            try:
                job = JOBS[job.family].model_validate(values)
            except ValidationError as error:
                raise _as_input_error(error, JOBS[job.family], values, lambda _: spell("then"), field="then") from error
            job_id = job.digest(seed_was_drawn=options.seed is None)
            if options.seed is None:
                job = job.model_copy(update={"seed": _seed_of(job_id)})
            yield job, job_id

    def _threshold(self, job: Job, speedup: str, spell: Callable[[str], str]) -> float:
        """Return the threshold with which the expected model makes a video as many times as fast as `1.5x` says."""
        model = self.model
        if model is None or model.is_assumed or not self._is_for(model, job):
            raise InputError(
                f"{spell('step_cache')} {speedup} needs the model, which is not known here; give a threshold, such as "
                "0.06.",
                field="step_cache",
            )
        assert model.family.threshold_for is not None, "other families have no step_cache"
        return model.family.threshold_for(job.parameters, model.facts, float(speedup.removesuffix("x")))

    def _check_step_cache(self, job: Job) -> None:
        model = self.model
        if getattr(job, "step_cache", 0.0) and model and not model.is_assumed and self._is_for(model, job):
            model.complete(job.parameters)

    def _is_for(self, model: KnownModel, job: Job) -> bool:
        """Return whether the expected model makes a job, as far as is known."""
        # Later there may be other workers, and the configured model decides only about its family.
        is_for_it = model.family.name == job.family if model.is_configured else self.at is None
        return is_for_it and job.model in (None, model_stem(model.name))

    def _check_last_frame(self, job: Job, spell: Callable[[str], str]) -> None:
        model = self.model
        if model is None or model.takes_last_photo or not getattr(job, "has_last_photo", False):
            return
        if self._is_for(model, job):
            is_loop = getattr(job, "loop", False)
            whose = f"configured model {model.name}" if model.is_configured else f"workers' model {model.name}".rstrip()
            raise InputError(
                f"{spell('loop' if is_loop else 'last_image')} does not apply to the {whose}, which takes no last "
                f"frame; leave it out, or use a model that takes one, such as {_takes_last_photo()}"
                f"{' (' + spell('boomerang') + ' works with all)' if is_loop else ''}.",
                field="loop" if is_loop else "last_image",
            )

    def _job(self, photo: Photo, options: Draft, variation: int, index: int) -> tuple[Job, str]:
        job = self._make(options, variation, image=photo.key, name=photo.name, photo_size=photo.size)
        drawn = options.seed is None
        given_name = ""
        # The position in the submission and the day change each time, and a drawn seed follows from the id.
        same = job.model_copy(update={"seed": 0}) if drawn else job
        values = self._values(same, photo.name, photo.source, index=0, variation=variation, day=_ANY_DAY)
        job = job.model_copy(update={"folder": self._folder_of(values)})
        if self.name is not None:
            given_name = render_name(self.name, values)
        job_id = job.digest(
            seed_was_drawn=drawn,
            given_name=given_name,
            variation=variation if drawn else 0,
            nonce=secrets.token_hex(8) if self.force else self.request_key,
        )
        if drawn:
            job = job.model_copy(update={"seed": _seed_of(job_id)})
        if self.name is not None:
            name = render_name(self.name, self._values(job, photo.name, photo.source, index=index, variation=variation))
            job = job.model_copy(update={"name": name})
        return job, job_id


def _takes_last_photo() -> str:
    """Return the hub id of a model that takes a photo of the last frame."""
    return next(
        name
        for family in FAMILIES
        for name, model in family.models.items()
        if family.takes_last_photo(model.facts) and not family.needs_last_photo(model.facts)
    )


def _known_for(model: KnownModel | None, family: str) -> KnownModel:
    return model if model is not None and model.family.name == family else published_model(family)


def _seed_of(job_id: str) -> int:
    """Draw the seed of a job: the same for the same submission, also when Redis has forgotten the job."""
    return int.from_bytes(hashlib.sha256(job_id.encode()).digest()[: SEED_BITS // 8])


def make_job(
    options: Draft,
    *,
    model: KnownModel | None = None,
    spell: Callable[[str], str] = as_flag,
    variation: int = 0,
    photo_size: tuple[int, int] | None = None,
    **others: Any,
) -> Job:
    """Create a job; the seed is random if none is given, and variation n adds n to a given seed.

    `photo_size`, in pixels, is for `auto_size`; `others` are the fields that are not in `options`. Raises InputError.
    """
    family = options.family_for(model, spell) or DEFAULT_FAMILY
    fields = JOBS[family].model_fields
    known = _known_for(model, family)
    # Those that may be left open are filled in by the worker.
    defaults = known.facts.get("defaults", {})
    values = {name: value for name, value in defaults.items() if fields[name].default is not None}
    values |= options.given() | others | {"family": family}
    if options.seed is None:
        values["seed"] = secrets.randbits(SEED_BITS)
    elif isinstance(options.seed, int):  # others are refused by the job
        values["seed"] = options.seed + variation
    is_auto = values.pop("auto_size", None)
    try:
        job = JOBS[family](**values)
        if is_auto and photo_size:
            usual = known.usual
            area = job.width * job.height if job.width and job.height else usual.width * usual.height
            multiple = max(job.side_multiple, _AUTO_MULTIPLE)
            width, height = nearest_size(photo_size, max(area, multiple**2), multiple)
            job = JOBS[family](**values | {"width": width, "height": height})
        return job
    except ValidationError as error:
        raise _as_input_error(error, JOBS[family], values, spell) from error


def _as_input_error(
    error: ValidationError, job: type[Job], values: dict[str, Any], spell: Callable[[str], str], field: str = ""
) -> InputError:
    """Return the sentence about the first value that is not allowed, with the parameter that it is about."""
    first = first_error(error)
    # A rule about several parameters names them itself.
    named = (word for word in re.findall(r"\w+", first["msg"]) if word in job.model_fields)
    own = str(first["loc"][0]) if first["loc"] else next(named, "")
    own = "size" if own in ("width", "height") else own
    return InputError(_sentence(first, job, values, spell), field=field or own)


def _sentence(first: ErrorDetails, job: type[Job], values: dict[str, Any], spell: Callable[[str], str]) -> str:
    field = str(first["loc"][0]) if first["loc"] else ""
    if field in ("width", "height"):
        given = {side: values.get(side, job.model_fields[side].default) for side in ("width", "height")}
        given = {side: value for side, value in given.items() if value is not None}
        sides, called = list(given.values()), "size" if len(given) > 1 else field
        shown = "x".join(map(shorten, sides))
        multiple, hint = job.side_multiple, ""
        if all(isinstance(side, int) for side in sides):
            hint = f"; the nearest such size is {'x'.join(str(nearest_side(side, multiple)) for side in sides)}"
        return (
            f"{spell(called)} {shown} is not allowed: both sides must be multiples of {multiple} from {multiple} to "
            f"{MAX_SIDE}{hint}."
        )
    allowed = first["msg"].removeprefix("Input should be ")
    if not field:  # a rule about several parameters, which names them itself
        allowed = re.sub(r"\w+", lambda word: spell(word[0]) if word[0] in job.model_fields else word[0], allowed)
        return f"{allowed}; change one of them."
    if first["type"] in ("string_too_short", "too_short"):
        allowed = "at least one"
    if first["type"] == "string_too_long":
        allowed = f"at most {first['ctx']['max_length']:,} characters, and has {len(first['input']):,}"
    if first["type"] == "string_unicode":
        allowed = "valid text, in the encoding of the terminal"
    value = first["input"]
    # Quotes show that the value is text, such as "7".
    shown = repr(value) if isinstance(value, str) and (first["type"].endswith("_type") or not value) else value
    return f"{spell(field)} {shorten(shown)} is not allowed: it must be {allowed}."
