"""What a watcher tells: one event at a time, as a sentence and as JSON. Knows no terminal."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

#: watching   it has begun; what comes now is noticed
#: submitted  a photo became a job
#: known      a photo whose job was there already
#: rejected   a file that is no photo
#: left_out   a file that by its name is none; told once, and left where it is
#: trouble    something is wrong that may mend; told once
#: mended     it has
#: stopped    the end, with the numbers of all
Kind = Literal["watching", "submitted", "known", "rejected", "left_out", "trouble", "mended", "stopped"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened."""

    kind: Kind
    #: A sentence, or for a job the rest of its line.
    text: str
    #: The file it is about, by its path from the watched folder.
    path: str | None = None
    #: Id of the job.
    job_id: str | None = None
    #: Where the file is now, if it was moved.
    moved_to: str | None = None

    def as_json(self) -> dict[str, Any]:
        """One flat JSON object, with the time; what does not apply is left out."""
        values = {"path": self.path, "id": self.job_id, "moved_to": self.moved_to, "text": self.text}
        known = {name: value for name, value in values.items() if value}
        return {"event": self.kind, "time": datetime.now(UTC).isoformat(timespec="milliseconds")} | known


@dataclass(kw_only=True)
class Summary:
    """What came of the files that were dealt with."""

    submitted: int = 0
    known: int = 0
    rejected: int = 0
    left_out: int = 0
    #: Files that were seen and are none of these: still growing, or held up.
    waiting: int = 0

    def sentence(self) -> str:
        """Say it in a line."""
        parts = [
            f"{self.submitted} submitted",
            f"{self.known} known already",
            f"{self.rejected} rejected",
            *([f"{self.left_out} left out"] if self.left_out else []),
            *([f"{self.waiting} waiting"] if self.waiting else []),
        ]
        return ", ".join(parts)


class Troubles:
    """What is wrong at present; each trouble is told when it begins and when it ends, not in between."""

    def __init__(self, tell: Callable[[Event], None]) -> None:
        """Make it; nothing is wrong."""
        self._tell = tell
        self._present: set[str] = set()

    def begin(self, what: str, sentence: str) -> None:
        """Tell of a trouble, unless that was done.

        Args:
            what: names it.
            sentence: what is told.
        """
        if what not in self._present:
            self._present.add(what)
            self._tell(Event(kind="trouble", text=sentence))

    def end(self, what: str, sentence: str) -> None:
        """Tell that a trouble is over, if there was one."""
        if what in self._present:
            self._present.remove(what)
            self._tell(Event(kind="mended", text=sentence))
