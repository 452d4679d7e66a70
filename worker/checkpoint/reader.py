"""Reads checkpoints: a job that is taken again continues from its furthest one."""

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from svdq.pipeline.errors import UnavailableError
from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.sample import Resumption, Sample
from svdq.worker.checkpoint.codec import Codec
from svdq.worker.checkpoint.store import CheckpointStore

logger = logging.getLogger(__name__)

#: Seconds after which the checkpoints of an unknown job are removed.
UNKNOWN_S = 24 * 60 * 60.0


@dataclass(frozen=True, kw_only=True)
class CheckpointReader:
    """Finds and removes the checkpoints of jobs; on rank 0."""

    #: Has the checkpoints.
    store: CheckpointStore
    #: Decodes them.
    codec: Codec

    def furthest(self, job_id: str, parameters: VideoParameters) -> Sample | None:
        """Read a job's furthest checkpoint; one that cannot be used is logged and ignored."""
        try:
            for step in self.store.steps(job_id) or ():
                data = self.store.read(job_id, step)
                try:
                    return self.codec.decode(data, job_id, parameters)
                except Exception as error:  # noqa: BLE001 - anyone may have written it, so no content may fail a job
                    logger.warning("The checkpoint of job %s at step %d cannot be used: %s.", job_id, step, error)
        except (OSError, UnavailableError) as error:
            logger.warning("The checkpoints of job %s cannot be read (%s); it starts anew.", job_id, error)
        return None

    def open(self, job_id: str) -> None:
        """Make a folder for the checkpoints of a job that is taken."""
        with contextlib.suppress(OSError, UnavailableError):  # the writer reports it
            self.store.open(job_id)

    def sweep(self, states: Callable[[list[str]], Mapping[str, bool]]) -> None:
        """Remove the checkpoints of jobs that have ended.

        Args:
            states: returns for each job id whether the job has ended; leaves out unknown jobs. Those may be another
                server's, so their checkpoints are removed only when they are old.
        """
        try:
            ages_s = self.store.ages_s()
            ended = states(list(ages_s))
            for job_id, age_s in ages_s.items():
                if ended.get(job_id, age_s > UNKNOWN_S):
                    self.store.clear(job_id)
        except (OSError, UnavailableError) as error:
            logger.warning("Old checkpoints cannot be removed (%s).", error)


def resumed(sample: Sample, step_seen: int) -> Sample:
    """Add a resumption to a sample from a checkpoint; `step_seen` is the last step that the job reached."""
    again = Resumption(from_step=sample.step, steps_done_again=max(0, step_seen - sample.step))
    return replace(sample, resumed=(*sample.resumed, again))
