"""Tells when it is not the jobs that are to blame: several different ones in a row that fail in the same way. Pure."""

import re

#: Different jobs that fail alike before it is called a streak.
LENGTH = 3

_ID = re.compile(r"\b(?=\w*\d)[0-9a-f]{8,}\b")
_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")


class Streak:
    """What failed lately."""

    def __init__(self) -> None:
        self._kind = ""
        self._job_ids: set[str] = set()

    def good(self) -> None:
        """Note that a job went well."""
        self._job_ids.clear()

    def bad(self, job_id: str, reason: str) -> bool:
        """Note that a job failed; return whether too many have now failed in the same way, and begin anew if so."""
        kind = kind_of(reason)
        if kind != self._kind:
            self._job_ids.clear()
        self._kind = kind
        self._job_ids.add(job_id)
        if len(self._job_ids) < LENGTH:
            return False
        self._job_ids.clear()
        return True


def kind_of(reason: str) -> str:
    """Leave out of a sentence what differs between two failures of the same kind: ids and numbers."""
    return _NUMBER.sub("#", _ID.sub("#", reason))
