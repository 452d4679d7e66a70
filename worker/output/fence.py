"""Prevents that a group publishes a video that was canceled, or that another group took over while this one slept."""

import logging
from threading import Event
from typing import Annotated, Self

import redis
from pydantic import BaseModel, BeforeValidator, ConfigDict, SerializeAsAny

from svdq.pipeline.loop.sample import Sample
from svdq.producer import keys
from svdq.producer.job import Job, parse_job
from svdq.worker.outages import RETRY_S

logger = logging.getLogger(__name__)


class TakenJob(BaseModel):
    """The JSON that a sample carries of its job; the ranks read it before they write about the job."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    #: With all parameters.
    job: Annotated[SerializeAsAny[Job], BeforeValidator(lambda job: job if isinstance(job, Job) else parse_job(job))]
    #: Where its photo was, from the submitted folder on.
    source: str = ""
    #: The key of RQ's registry of executions, and the name of this one: the group holds the job while it is there.
    execution: tuple[str, str]

    @classmethod
    def of(cls, sample: Sample) -> Self:
        """Read what a sample carries."""
        return cls.model_validate(sample.job)


class Fence:
    """Checks in Redis, in the threads that write videos, whether a video may be published."""

    def __init__(self, connection: redis.Redis, stopping: Event) -> None:
        """Make a fence; once `stopping` is set, nothing may be published."""
        self._connection = connection
        self._stopping = stopping

    def __call__(self, sample: Sample) -> bool:
        """Return whether the files of a sample may be published; wait while Redis is unavailable."""
        execution = TakenJob.of(sample).execution
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
