"""The job model: a photo in storage, the parameters of its video and the requested files.

A job is stored as JSON in the keyword arguments of an RQ job. Its id is a hash of its content, so that submitting it
again finds the existing job.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from operator import not_
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, SerializeAsAny, field_validator, model_validator

from svdq.pipeline.models.families import PARAMETERS, class_for
from svdq.pipeline.models.model_name import model_stem
from svdq.pipeline.video_parameters import MAIN, MAX_FPS, Fit, Format, LoraChoice, VideoParameters
from svdq.producer.records import LINK_NOTE, LOCATION_NOTE, REPLACED_NOTE, SOURCE_NOTE, TAKEN_NOTE, Record

MAX_NAME_BYTES = 255  # of a file or a folder, on every usual file system
MAX_FOLDER_LENGTH = 1000  # in characters

#: The id of a job: svdq's own, or the UUID of one that another program has enqueued through RQ.
ID = "[0-9a-f]{20}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_ID_AT_END = re.compile(rf"-({ID})$")
#: Of a photo, and of the last frame of a link of a chain.
INPUT_KEY = re.compile(r"inputs/(?:[0-9a-f]{64}\.[a-z0-9]{1,5}|[0-9a-f]{20}\.png)")
_SOUND_SO_FAR = re.compile(r"inputs/[0-9a-f]{20}\.wav")
_LAST_FRAME = re.compile(r"inputs/([0-9a-f]{20})\.png")


class Job(VideoParameters):
    """One photo to one video, by a family of models that adds its parameters; frozen, refuses unknown fields."""

    image: str  # storage key: inputs/<sha256>.<ext>, or the last frame of the link before
    #: Stem of the original file's name, which names the outputs.
    name: str = Field(min_length=1, max_length=200)
    formats: Annotated[
        tuple[Format, ...],
        Field(min_length=1, strict=False, title="File type", description="File to write", json_schema_extra=MAIN),
    ] = ("mp4",)
    fit: Fit = Field(
        default="crop", title="Photos of another shape", description="How a photo of another aspect ratio is fitted"
    )
    #: Folder below outputs/ for its files, such as `holiday/day 1`; "" is outputs/ itself.
    folder: str = Field(default="", max_length=MAX_FOLDER_LENGTH)
    # Left out of the JSON unless they are given, because the ids of earlier jobs were made without them.
    interpolate: int | None = Field(
        default=None,
        ge=2,
        le=MAX_FPS,
        exclude_if=lambda value: value is None,
        title="Smooth motion",
        description="Frames a second of the files, reached by interpolating frames; takes some 10 s of a core for "
        "81 frames at 832x480",
    )
    boomerang: bool = Field(
        default=False, exclude_if=not_, title="Forward and back", description="Play the video forward and back"
    )
    mark: bool = Field(
        default=True,
        exclude_if=bool,
        title="Mark files as made by a model",
        description="Mark the files as made by a model, where photo libraries and platforms look for it",
    )
    #: The last part of its name; None for any model of the family.
    model: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        exclude_if=lambda value: value is None,
        description="Model that makes the video, by the last part of its name, where workers run several",
    )
    #: A link of a chain: its last frame is kept, and its file begins with the chain up to it.
    chained: bool = Field(default=False, exclude_if=not_)
    #: The finished video that it upscales, without denoising: its path below outputs/, without an extension.
    finishes: str = Field(default="", max_length=MAX_FOLDER_LENGTH + MAX_NAME_BYTES, exclude_if=not_)

    @field_validator("image", "last_image", check_fields=False)  # not all families have the latter
    @classmethod
    def _photos_are_inputs(cls, key: str | None) -> str | None:
        return key if key is None else check_input_key(key)

    @field_validator("name")
    @classmethod
    def _name_is_a_file_name(cls, name: str) -> str:
        if not name.isprintable() or "/" in name or "\\" in name or name.startswith("."):
            raise ValueError("a name that a file may have")
        return name

    @field_validator("model")
    @classmethod
    def _model_is_a_stem(cls, name: str | None) -> str | None:
        return name and cls._name_is_a_file_name(model_stem(name))

    @field_validator("folder", "finishes")
    @classmethod
    def _folder_is_inside_outputs(cls, folder: str) -> str:
        if folder and not all(map(is_folder_name, folder.split("/"))):
            raise ValueError(f"{folder!r} is not a folder inside outputs/")
        return folder

    @model_validator(mode="after")
    def _interpolation_adds_frames(self) -> Self:
        # fps that are left to the model are filled in by the worker, which checks this again.
        fps: int | None = self.fps
        if self.interpolate is not None and fps is not None and self.interpolate <= fps:
            raise ValueError(f"interpolate {self.interpolate} is not more than fps {self.fps}")
        if self.chained and self.interpolate is not None and fps is not None and self.interpolate % fps:
            raise ValueError(f"interpolate {self.interpolate} is no multiple of fps {fps}, so links would not join")
        return self

    @model_validator(mode="after")
    def _sound_is_beside_a_video(self) -> Self:
        if "wav" not in self.formats:
            return self
        if set(self.formats) == {"wav"}:
            raise ValueError("formats wav is written beside a video and needs another format, such as mp4")
        if "sound" not in type(self).model_fields:
            raise ValueError(f"formats wav needs sound, which videos of {self.title} lack")
        if self.boomerang:
            raise ValueError("formats wav and boomerang exclude each other")
        if not getattr(self, "sound", True):
            raise ValueError("formats wav needs sound")
        return self

    @model_validator(mode="after")
    def _plays_one_way(self) -> Self:
        if self.boomerang and getattr(self, "loop", False):
            raise ValueError("loop and boomerang exclude each other")
        return self

    @property
    def parameters(self) -> VideoParameters:
        """The parameters for the pipeline."""
        cls = PARAMETERS[self.family]
        return cls.model_validate({field: getattr(self, field) for field in cls.model_fields})

    @property
    def photos(self) -> tuple[str, ...]:
        """The storage keys of its photos: of the first frame and, if there is one, of the last."""
        return tuple(filter(None, (self.image, getattr(self, "last_image", None))))

    @property
    def predecessor(self) -> str:
        """The id of the link of a chain whose last frame is its photo; "" for none."""
        found = None if self.finishes else _LAST_FRAME.fullmatch(self.image)
        return found[1] if found else ""

    @property
    def original(self) -> str:
        """The id of the rendered video that it upscales; "" for none."""
        found = _ID_AT_END.search(self.finishes)
        return found[1] if found else self.finishes.rpartition("-")[2]

    def output_stem(self, job_id: str) -> str:
        """Return the storage key of its files without their extension."""
        return "/".join(part for part in ("outputs", self.folder, f"{self.name}-{job_id}") if part)

    def sidecar_key(self, job_id: str) -> str:
        """Return the storage key of its sidecar."""
        return f"{self.output_stem(job_id)}.json"

    def output_keys(self, job_id: str) -> dict[Format, str]:
        """Return the storage keys of its files by format, the sound last; png is a folder of frames."""
        stem = self.output_stem(job_id)
        formats = sorted(self.formats, key=lambda kind: kind == "wav")
        return {kind: stem if kind == "png" else f"{stem}.{kind}" for kind in formats}

    def digest(self, *, seed_was_drawn: bool, given_name: str = "", variation: int = 0, nonce: str = "") -> str:
        """Return the job's id: 20 hex digits of the SHA-256 of its content.

        A drawn seed does not count, nor does the name unless the user gave it, so that the same submission again is the
        same job. Variations count from 0, which is the same as none. A nonce makes the id unique.
        """
        left_out = {"name"} | ({"seed"} if seed_was_drawn else set()) | (set() if self.folder else {"folder"})
        content = self.model_dump_json(exclude=left_out)
        asked_for = {name: value for name, value in (("name", given_name), ("variation", variation)) if value}
        return hashlib.sha256(f"{content}{json.dumps(asked_for) if asked_for else ''}{nonce}".encode()).hexdigest()[:20]


#: The fields that name the photos, the files and the chain of a job, besides the parameters of its video.
NAMING = ("image", "last_image", "name", "folder", "chained", "finishes")
#: The class of the jobs of each family, which has the fields of a job and then of its parameters.
JOBS: Mapping[str, type[Job]] = {
    name: type(f"{name.capitalize()}Job", (Job, parameters), {"__module__": __name__})
    for name, parameters in PARAMETERS.items()
}


def parse_job(document: object) -> Job:
    """Make a job from its JSON, which anyone may have written; as `class_for`, raises ValueError."""
    return class_for(document, JOBS).model_validate(document)


AnyJob = Annotated[SerializeAsAny[Job], BeforeValidator(lambda job: job if isinstance(job, Job) else parse_job(job))]


class JobArguments(Record):
    """The keyword arguments of an RQ job."""

    job: AnyJob
    photo: str = Field(default="", exclude_if=not_)  # path of its photo at submission
    notes: dict[str, str] = Field(default={}, exclude_if=not_)  # such as an ignored prompt; of svdq, too

    @property
    def source(self) -> str:
        """The path of its photo from the submitted folder on, such as `trip/day 1/cup.jpg`; "" if unknown."""
        return self.notes.get(SOURCE_NOTE, "")

    @property
    def link(self) -> str:
        """Which link of a chain it is, such as `2 of 3`; "" for none."""
        return self.notes.get(LINK_NOTE, "")

    @property
    def replaced(self) -> str:
        """The digest of the sidecar whose video the job is to replace; "" for none."""
        return self.notes.get(REPLACED_NOTE, "")

    @property
    def own_notes(self) -> dict[str, str]:
        """The notes of the submitter."""
        of_svdq = (SOURCE_NOTE, LINK_NOTE, REPLACED_NOTE, TAKEN_NOTE, LOCATION_NOTE)
        return {name: text for name, text in self.notes.items() if name not in of_svdq}


def shown_loras(recorded: object) -> str:
    """Return the LoRAs of a job's JSON as users write them, with semicolons between them."""
    try:
        return "; ".join(str(LoraChoice.model_validate(each)) for each in recorded)  # type: ignore[attr-defined]
    except (TypeError, ValueError):  # anyone may have written it
        return str(recorded)


def check_input_key(key: str) -> str:
    """Return the storage key of a photo; raises ValueError if it is none."""
    if not INPUT_KEY.fullmatch(key):
        raise ValueError(f"{key!r} is not of the form inputs/<sha256>.<ext>")
    return key


def last_frame_key(job_id: str) -> str:
    """Return the storage key of the last frame of a link of a chain."""
    return f"inputs/{job_id}.png"


def latents_key(job_id: str) -> str:
    """Return the storage key of the latents of a finished video, where they are kept."""
    return f"latents/{job_id}.safetensors"


def sound_key(job_id: str) -> str:
    """Return the storage key of the sound of a chain up to a link, if its videos have sound."""
    return f"inputs/{job_id}.wav"


def last_frame_beside(key: str) -> str:
    """Return the storage key of the last frame beside the sound of a chain; any other key as it is."""
    return f"{key.removesuffix('.wav')}.png" if _SOUND_SO_FAR.fullmatch(key) else key


def is_folder_name(name: str) -> bool:
    """Return whether all file systems and object stores accept a folder name, and `ls` shows it."""
    is_plain = bool(name.strip()) and name.isprintable() and "\\" not in name and not name.startswith(".")
    return is_plain and len(name.encode()) <= MAX_NAME_BYTES


_GIVEN = dict.fromkeys(name for job in JOBS.values() for name in job.model_fields if name not in NAMING)
#: The parameters that users give: the fields of all families without `NAMING`. Fields that came to `VideoParameters`
#: later are the last.
VIDEO_FIELDS = tuple(sorted(_GIVEN, key=lambda name: name in VideoParameters.model_fields))
#: The same as users name them: one size for width and height, and format for formats.
PARAMETER_KEYS = (
    *(name for name in VIDEO_FIELDS if name not in ("width", "height", "formats", "loras")),
    "size",
    "format",
    "lora",
)
#: What a svdq.toml in a folder may say of its photos; `model` is a setting there.
PHOTO_KEYS = (*(name for name in PARAMETER_KEYS if name != "model"), "priority", "then")
