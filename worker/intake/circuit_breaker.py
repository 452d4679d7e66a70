"""Decides when to pause the intake: after several different jobs in a row that fail in the same way. Pure."""

import re

#: Different jobs that fail alike before the breaker opens.
LENGTH = 3

_ID = re.compile(r"\b(?=\w*\d)[0-9a-f]{8,}\b")
_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")


class CircuitBreaker:
    """Counts different jobs in a row that fail with the same kind of reason."""

    def __init__(self) -> None:
        self._kind = ""
        self._job_ids: set[str] = set()

    def record_success(self) -> None:
        """Forget the failures: a job succeeded."""
        self._job_ids.clear()

    def record_failure(self, job_id: str, reason: str) -> bool:
        """Count a failed job; return whether the limit is reached, which also resets the count."""
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
