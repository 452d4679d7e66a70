"""A job to be enqueued, and what came of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from svdq.producer.job import Job
from svdq.producer.records import LINK_NOTE


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A job to be enqueued."""

    job: Job
    job_id: str
    photo: str = ""  # the path of its photo, for display
    warning: str = ""  # as of `crop_warning`
    priority: str = "default"
    at: datetime | None = None  # when to queue it, with a time zone; None means at once
    after: tuple[str, ...] = ()  # ids of jobs that are to have finished or failed first
    notes: Mapping[str, str] = field(default_factory=dict)
    owner: str = ""  # whose job it is; an existing job keeps its owner


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """The outcome of submitting one job."""

    entry: Entry
    job: Job  # as recorded: an existing job with this id may have another seed and name
    status: str  # RQ's status; "new" if it is not submitted but would be
    is_new: bool  # whether it was queued now
    was: str = ""  # how an existing job had ended that is queued again: failed, stopped or canceled; "" for others
    again: str = ""  # why a finished job is rendered again, as a clause; "" if it is not

    @property
    def id(self) -> str:
        """The id of the job."""
        return self.entry.job_id

    @property
    def seed(self) -> int:
        """Its seed."""
        return self.job.seed

    @property
    def name(self) -> str:
        """Its name."""
        return self.job.name

    @property
    def photo(self) -> str:
        """The path of its photo."""
        return self.entry.photo

    @property
    def at(self) -> datetime | None:
        """When a new job will be queued, with a time zone; None: it is queued."""
        return self.entry.at if self.is_new else None

    @property
    def warning(self) -> str:
        """How much a crop removes of the photo of a new job, if that is much."""
        return self.entry.warning if self.is_new else ""

    @property
    def link(self) -> str:
        """Which link of a chain it is, such as `2 of 3`; otherwise ""."""
        return self.entry.notes.get(LINK_NOTE, "")
