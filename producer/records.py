"""The schema of the records of a job that outlive a process: progress, result and sidecar.

Anyone with access to Redis or to the storage may have written one. Fields that later versions have added are optional.
"""

import hashlib
import json
from datetime import UTC, datetime, timedelta
from operator import not_
from typing import Annotated, Any, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from svdq.pipeline.errors import first_error

#: A time that every time zone can represent.
Time = Annotated[AwareDatetime, Field(ge=datetime(1970, 1, 1, tzinfo=UTC), lt=datetime(2500, 1, 1, tzinfo=UTC))]
Count = Annotated[int, Field(ge=0, lt=2**31)]

#: The note that says where a photo was, from the folder that was submitted on: no path of a machine.
SOURCE_NOTE = "source"
LINK_NOTE = "link"  # the note that says which link of a chain a job is, such as `2 of 3`
TAKEN_NOTE, LOCATION_NOTE = "taken", "location"  # the notes that say when and where a photo was taken: `Capture`
REPLACED_NOTE = "replaced"  # the note with the digest of the sidecar of a finished video that is to be rendered again


class Record(BaseModel):
    """Frozen record of finite numbers; unknown fields, of later versions, are ignored."""

    # Here and in all parameters, pydantic builds a class on first use: a short command uses few of them.
    model_config = ConfigDict(frozen=True, defer_build=True, extra="ignore", allow_inf_nan=False)


def reason_invalid(error: ValidationError) -> str:
    """Return the first field that a record lacks or has wrong, and why, as a clause."""
    first = first_error(error)
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))


class JobMeta(Record):
    """The `meta` of an RQ job: its progress in a group."""

    step: Count = 0
    rank: Count | None = None
    boundaries: tuple[Count, ...] = ()  # rank r does steps boundaries[r] to boundaries[r+1], exclusive
    decoder: Count | None = None
    computed: Count | None = None  # how many of its steps are computed, where others are skipped
    notice: str = ""
    used: dict[str, Any] = {}
    canceled: str = ""  # why it was canceled, if because of another link of its chain


class JobResult(Record):
    """The result of a finished RQ job."""

    outputs: tuple[str, ...] = ()
    used: dict[str, Any] = {}
    model: str = ""
    notice: str = ""


class _Open(BaseModel):
    """Frozen part of a sidecar; unknown fields, of later versions, are kept."""

    model_config = ConfigDict(frozen=True, defer_build=True, extra="allow", allow_inf_nan=False)


class SidecarModel(_Open):
    """The model that made a video."""

    name: str = ""
    notice: str = ""
    compute: dict[str, Any] = Field(default={}, exclude_if=not_)  # options that can change bits


class Sidecar(_Open):
    """How a video was made: JSON written after its files and, without paths, owner and timings, a comment in each."""

    svdq: str
    job_id: str = ""
    job: dict[str, Any]  # of another version, it may have other fields
    model: SidecarModel = Field(default_factory=SidecarModel)
    versions: dict[str, str] = {}  # of packages that can change bits
    #: Paths or URLs of the files when they were written; they stay beside the sidecar.
    outputs: tuple[str, ...] = ()
    source: str = Field(default="", exclude_if=not_)
    digital_source_type: str = Field(
        default="", exclude_if=not_
    )  # IPTC's term in the mark of its files; "" for no mark
    taken: str = Field(default="", exclude_if=not_)  # when the photo was taken, as of `Capture.time_text`
    owner: str = Field(
        default="", exclude_if=not_
    )  # whose job it was; "" for none, and in sidecars of earlier versions
    #: `frames`, `fps`, `width` and `height` of the files, where they differ from what the model made.
    shown: dict[str, int] = {}
    upscaled: dict[str, Any] = {}  # by which upscaler: its `model` and `digest`, and the side of a `tile` if any
    finished_at: Time | None = None
    group: dict[str, Any] = {}  # number of ranks, host, and process id of torchrun
    seconds: dict[str, float] = {}  # of work by what was done: encode, denoise, decode, upscale, write
    stages: list[dict[str, Any]] = []  # rank, steps and seconds of each
    memory_bytes: dict[str, int] = {}  # peaks by what was done
    resumed: list[dict[str, Any]] = []

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """Read the text of a file; raises ValueError with a clause that says why it is not a sidecar."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise ValueError(reason_invalid(error)) from error

    def as_json(self) -> dict[str, Any]:
        """Return one JSON object with the fields that were given."""
        return self.model_dump(mode="json", exclude_unset=True)

    @property
    def name(self) -> str:
        """The name of the job, for display."""
        return str(self.job.get("name", "?"))

    @property
    def num_frames(self) -> int:
        """The number of frames that its files show; 0 if it is not known."""
        return int(self.shown.get("frames") or self.job.get("frames") or 0)

    @property
    def text(self) -> str:
        """The content of its file."""
        return json.dumps(self.as_json(), indent=2, ensure_ascii=False) + "\n"

    @property
    def comment(self) -> str:
        """The comment inside the video's files, without paths and owner."""
        document = self.model_dump(mode="json", exclude_unset=True, exclude={"outputs", "source", "owner"})
        return json.dumps(document, ensure_ascii=False)

    @property
    def result(self) -> JobResult:
        """The result of its job."""
        return JobResult(outputs=self.outputs, used=self.job, model=self.model.name, notice=self.model.notice)

    @property
    def work(self) -> timedelta | None:
        """The time that its work took; None in sidecars of earlier versions."""
        return timedelta(seconds=sum(self.seconds.values())) if self.seconds else None


def sidecar_digest(sidecar: bytes) -> str:
    """Return what names a sidecar in `JobArguments.replaced`."""
    return hashlib.sha256(sidecar).hexdigest()
