"""What is to be expected of jobs that have not ended: how many come first, when they will be done, what they wait for.

Knows no terminal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis
from rq.job import JobStatus

from svdq.producer import keys
from svdq.producer.status.eta import job_eta_s, trouble_of
from svdq.producer.status.ranks import GroupStatus, Trouble
from svdq.producer.status.registries import num_ahead
from svdq.producer.status.status import JobView


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What is to be expected of one job."""

    #: Jobs that are taken before it; None when it does not wait in a queue.
    num_ahead: int | None = None
    #: Seconds until it is done; None while that cannot be told.
    eta_s: float | None = None
    #: What it waits for although a group has it.
    trouble: Trouble | None = None

    def as_json(self) -> dict[str, Any]:
        """Make a flat JSON object, to go with that of the job."""
        eta_s = None if self.eta_s is None else round(self.eta_s, 1)
        trouble = self.trouble.model_dump(exclude={"job_ids"}) if self.trouble else None
        return {"num_ahead": self.num_ahead, "eta_s": eta_s, "trouble": trouble}


def outlooks(connection: redis.Redis, views: Sequence[JobView], groups: Sequence[GroupStatus]) -> dict[str, Outlook]:
    """Tell what is to be expected of jobs.

    Args:
        connection: to Redis.
        views: the jobs; nothing is to be expected of those that have ended.
        groups: as `ranks.read_groups` reads them.

    Returns:
        The outlook by job id.
    """
    waiting = {view.id: view.queue for view in views if view.status == JobStatus.QUEUED.value}
    ahead = num_ahead(connection, waiting) if waiting else {}
    is_paused = bool(waiting and connection.exists(keys.SUSPENDED))
    found = {}
    for view in views:
        if view.status == JobStatus.STARTED.value:
            eta_s = job_eta_s(view.id, view.parameters, view.step, None, groups)
            found[view.id] = Outlook(eta_s=eta_s, trouble=trouble_of(view.id, groups))
        elif view.id in ahead:
            number = ahead[view.id]
            eta_s = None if is_paused else job_eta_s(view.id, view.parameters, 0, number, groups)
            found[view.id] = Outlook(num_ahead=number, eta_s=eta_s)
    return found
