"""Prevents that a group publishes a video that was canceled, or that another group took over while this one slept.

A sample has the name of its execution in its metadata; this group holds the job while RQ's registry has that name.
"""

import logging
from collections.abc import Mapping
from threading import Event
from typing import Any

import redis

from svdq.pipeline.loop.sample import Sample
from svdq.producer import keys
from svdq.worker.outages import RETRY_S

logger = logging.getLogger(__name__)


def execution_metadata(registry_key: str, composite_key: str) -> dict[str, Any]:
    """Return the metadata that a sample has of its execution."""
    return {"execution": [registry_key, composite_key]}


def execution_of(metadata: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return registry and name of the execution in a sample's metadata; None if it has none, as in a bench."""
    execution = metadata.get("execution")
    return (execution[0], execution[1]) if execution else None


class Fence:
    """Checks in Redis, in the threads that write videos, whether a video may be published."""

    def __init__(self, connection: redis.Redis, stopping: Event) -> None:
        """Make a fence; once `stopping` is set, nothing may be published."""
        self._connection = connection
        self._stopping = stopping

    def __call__(self, sample: Sample) -> bool:
        """Return whether the files of a sample may be published; wait while Redis is unavailable."""
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
