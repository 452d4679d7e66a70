"""A job that a group holds: the record of the process that took it, and the JSON that its sample carries."""

from dataclasses import dataclass

import rq
from rq.executions import Execution

from svdq.producer.job import JobArguments
from svdq.producer.untrusted_job import UntrustedJob


@dataclass(frozen=True, kw_only=True)
class ActiveJob:
    """A job that this worker holds, with its execution."""

    rq_job: UntrustedJob
    queue: rq.Queue
    execution: Execution
    arguments: JobArguments
    is_suspect: bool = False  # of a crash: it must run alone

    @property
    def id(self) -> str:
        """The id of the job."""
        return self.rq_job.id

    @property
    def entry(self) -> tuple[str, str]:
        """The key of RQ's registry and the entry there, while the group holds the job."""
        return self.queue.started_job_registry.key, self.execution.composite_key


class SampleJob(JobArguments):
    """The JSON that a sample carries of its job, with all parameters."""

    execution: tuple[str, str]  # `ActiveJob.entry`
    #: SHA-256 of the first frame of a link of a chain: the link before may be rendered again with another one.
    first_frame: str = ""
    owner: str = ""  # whose job it is; "" for none
