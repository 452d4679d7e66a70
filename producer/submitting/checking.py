"""Checks requests: their photos, the prompts beside these, and what is asked of each, before anything is stored."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeGuard

import redis

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.families import published_model
from svdq.pipeline.models.known_model import Expected
from svdq.producer.settings import Settings
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.loras import KnownLoras
from svdq.producer.submitting.parameters import WITH_PROMPTS
from svdq.producer.submitting.photos import Photo, check_photos, source_path
from svdq.producer.submitting.sources import PhotoRequest, prompt_path, read_prompt, usable_prompt


class BadPhotosError(InputError):
    """Some photos cannot be used; nothing was stored or enqueued. `skip_bad` names the option that leaves them out."""

    def __init__(self, reasons: Sequence[str], num_photos: int, skip_bad: str) -> None:
        #: The reason for each photo, if the message does not contain it.
        self.reasons = tuple(reasons) if len(reasons) > 1 else ()
        number = f"{len(reasons):,} of {num_photos:,} photos cannot be used, so nothing was submitted"
        super().__init__(
            f"{number}; correct or remove them, or leave them out with {skip_bad}."
            if self.reasons
            else f"{reasons[0]} Nothing was submitted; {skip_bad} leaves it out."
        )


class Observer:
    """Receives the progress of a submission; this base class ignores it."""

    def begin(self, work: str, total: int) -> None:
        """Begin a phase, such as `checking`, of `total` photos or jobs."""

    def advance(self) -> None:
        """Count one of them as done."""

    def leave_out(self, reason: str) -> None:
        """Record a bad photo that is left out."""

    def note(self, text: str) -> None:
        """Show a sentence."""


def specs_of(requests: Iterable[PhotoRequest | InputError]) -> Iterable[JobSpec]:
    """Return each spec once: many photos share one."""
    return {id(request.spec): request.spec for request in requests if isinstance(request, PhotoRequest)}.values()


def with_family_of_prompts(requests: Sequence[PhotoRequest | InputError]) -> Sequence[PhotoRequest | InputError]:
    """Choose a family with prompts for videos whose family is open if one of their photos has a prompt."""
    specs = {
        id(spec): replace(spec, expected=Expected(model=published_model(spec.of_prompts)))
        for spec in specs_of(requests)
        if spec.is_open
    }

    def is_open(request: PhotoRequest | InputError) -> TypeGuard[PhotoRequest]:
        return isinstance(request, PhotoRequest) and id(request.spec) in specs

    if not any(each.photo is None and usable_prompt(each.path) for each in filter(is_open, requests)):
        return requests
    return [replace(each, spec=specs[id(each.spec)]) if is_open(each) else each for each in requests]


def check_requests(
    settings: Settings,
    requests: Sequence[PhotoRequest | InputError],
    connection: redis.Redis | None,
    *,
    skip_bad: bool,
    observer: Observer,
    spell: Callable[[str], str],
) -> list[PhotoRequest]:
    """Return requests with their photos, prompts and LoRAs; raises InputError or BadPhotosError."""
    known = KnownLoras(settings, connection)

    @cache  # many photos share a spec
    def look_up(spec: JobSpec) -> JobSpec:
        found = known.looked_up(spec)
        found.check(spell)
        return found

    for spec in specs_of(request for request in requests if isinstance(request, PhotoRequest) and not request.where):
        look_up(spec)  # raises once for what is wrong with all photos
    paths = [request.path for request in requests if isinstance(request, PhotoRequest) and request.photo is None]
    files = (request.last for request in requests if isinstance(request, PhotoRequest))
    last_paths = list(dict.fromkeys(filter(None, files)))  # several photos may have the same one
    observer.begin("checking", len(paths) + len(last_paths))
    results = iter(check_photos(paths, settings.max_pixels, observer.advance))
    lasts: dict[Path, Photo | InputError] = dict(
        zip(last_paths, check_photos(last_paths, settings.max_pixels, observer.advance), strict=True)
    )
    prompts = PromptFiles(spell)
    checked, reasons = list[PhotoRequest](), list[InputError]()
    for request in requests:
        if isinstance(request, InputError):
            reasons.append(request)
            continue
        try:
            photo = request.photo or _checked(next(results), "image")
            last = _checked(lasts[request.last], "last_image") if request.last else photo.last
            spec = look_up(request.spec if request.photo else prompts.spec_for(request.spec, request.path))
        except InputError as error:
            reasons.append(InputError(f"{request.where}{error}", field=error.field))
        else:
            folder = "" if request.photo else request.path.absolute().parent.name
            source = request.source or source_path(folder, request.path.name)
            checked.append(replace(request, photo=replace(photo, source=source, last=last), spec=spec))
    if reasons and (not skip_bad or not checked):
        if len(requests) == 1:
            raise reasons[0]
        raise BadPhotosError([*map(str, reasons)], len(requests), spell("skip_bad"))
    for reason in reasons:
        observer.leave_out(str(reason))
    if prompts.num_without and len(checked) > 1:
        observer.note(
            f"{prompts.num_without:,} of {len(checked):,} photos have no prompt; write one into a .txt beside each, or "
            f"give {spell('prompt')}."
        )
    if prompts.num_ignored:
        observer.note(
            f"Prompts (.txt) that are ignored, because this family of models takes none: {prompts.num_ignored:,}; "
            f"give --family {' or '.join(WITH_PROMPTS)} if the workers' model takes them."
        )
    return checked


def _checked(result: Photo | InputError, field: str) -> Photo:
    if isinstance(result, InputError):
        raise InputError(str(result), field=field)
    return result


@dataclass
class PromptFiles:
    """The prompts in text files beside photos."""

    spell: Callable[[str], str]  # returns the name of a parameter for errors
    num_ignored: int = 0  # number of text files beside photos whose videos take no prompt
    num_without: int = 0  # number of photos whose videos take a prompt, and have none

    def spec_for(self, spec: JobSpec, photo: Path) -> JobSpec:
        """Add the prompt beside a photo to a spec without one, if its family takes prompts."""
        path = prompt_path(photo)
        if path is None or all(draft.prompt is not None for draft in spec.drafts):
            return spec
        if spec.with_prompt("") is spec:
            self.num_ignored += os.path.isfile(path)  # unlike `Path.is_file`, it refuses no name
            return spec
        prompt = read_prompt(path)
        if prompt is None:
            self.num_without += 1
            return spec
        spec = spec.with_prompt(prompt)
        spec.check(lambda field: f"The prompt in {str(path)!r}:" if field == "prompt" else self.spell(field))
        return spec
