"""Keeps a group from publishing what another has taken over while it slept, or what was canceled. Knows no files.

A sample carries the name of its execution in its metadata; the execution is ours as long as it stands in RQ's registry.
"""

import logging
from collections.abc import Mapping
from threading import Event
from typing import Any

import redis

from svdq.pipeline.sample import Sample
from svdq.producer import keys

logger = logging.getLogger(__name__)

#: Seconds between questions while Redis is away.
RETRY_S = 1.0


def execution_metadata(registry_key: str, composite_key: str) -> dict[str, Any]:
    """Make what a sample carries of its execution."""
    return {"execution": [registry_key, composite_key]}


def execution_of(metadata: Mapping[str, Any]) -> tuple[str, str] | None:
    """Give registry and name of the execution in a sample's metadata; None when it has none, as in a bench."""
    execution = metadata.get("execution")
    return (execution[0], execution[1]) if execution else None


class Fence:
    """Asks Redis, from the thread that writes videos."""

    def __init__(self, connection: redis.Redis, stopping: Event) -> None:
        """Make it.

        Args:
            connection: of that thread's own.
            stopping: set when the rank is to stop; the answer is then no.
        """
        self._connection = connection
        self._stopping = stopping

    def __call__(self, sample: Sample) -> bool:
        """Whether the files of a sample may be published; waits for as long as Redis is away."""
        execution = execution_of(sample.metadata)
        if execution is None:
            return True
        has_warned = False
        while not self._stopping.is_set():
            try:
                is_canceled = self._connection.sismember(keys.CANCELED, sample.job_id)
                return not is_canceled and self._connection.zscore(*execution) is not None
            except redis.RedisError as error:
                if not has_warned:
                    logger.warning("Redis does not answer (%s); the video of %s waits.", error, sample.job_id)
                    has_warned = True
                self._stopping.wait(RETRY_S)
        return False
