"""What a watcher reports: one event at a time, as a sentence and as JSON."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

#: watching   it has started; from now on changes are noticed
#: submitted  a photo became a job
#: known      a photo whose job exists already
#: rejected   a file that is no photo
#: ignored    a file whose name is not that of a photo, or a link; it stays where it is
#: problem    something is wrong that may be resolved; reported once
#: resolved   a problem is over
#: stopped    the end, with the totals
Kind = Literal["watching", "submitted", "known", "rejected", "ignored", "problem", "resolved", "stopped"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened."""

    kind: Kind
    #: A sentence, or the line of a job.
    text: str
    #: The file, by its path from the watched folder.
    path: str | None = None
    #: Id of the job.
    job_id: str | None = None
    #: Where the file is now, if it was rejected and moved.
    moved_to: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return one flat JSON object with the time; fields that do not apply are left out."""
        values = {"path": self.path, "id": self.job_id, "moved_to": self.moved_to, "text": self.text}
        given = {name: value for name, value in values.items() if value}
        return {"event": self.kind, "time": datetime.now(UTC).isoformat(timespec="milliseconds")} | given


Report = Callable[[Event], None]


@dataclass(kw_only=True)
class Summary:
    """How many files were processed, by outcome."""

    submitted: int = 0
    known: int = 0
    rejected: int = 0
    ignored: int = 0
    #: Files that are still growing or on hold.
    waiting: int = 0

    def sentence(self) -> str:
        """Return it in one line."""
        parts = [
            f"{self.submitted} submitted",
            f"{self.known} known already",
            f"{self.rejected} rejected",
            *([f"{self.ignored} ignored"] if self.ignored else []),
            *([f"{self.waiting} waiting"] if self.waiting else []),
        ]
        return f"{', '.join(parts)}."


class Conditions:
    """Problems of the watcher as a whole. Each one is reported when it begins and when it ends."""

    def __init__(self, report: Report) -> None:
        """Initialize without problems."""
        self._report = report
        self._current: set[str] = set()

    def set(self, name: str, problem: str | None, resolved: str) -> None:
        """Report a change of a condition.

        Args:
            name: identifies it.
            problem: a sentence, or None if there is no problem (any more).
            resolved: a sentence for the end of the problem.
        """
        if problem is not None and name not in self._current:
            self._current.add(name)
            self._report(Event(kind="problem", text=problem))
        elif problem is None and name in self._current:
            self._current.remove(name)
            self._report(Event(kind="resolved", text=resolved))
