"""Groups whose ranks have ended until there is a job: keeps their records in Redis, and looks for work.

The launcher alone does this, and has neither torch nor a CUDA context: the memory of the GPUs is free meanwhile.
"""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Final

import redis
from pydantic import ValidationError
from rq.worker import Worker
from rq.worker_registration import REDIS_WORKER_KEYS

from svdq.pipeline.models.model_name import model_stem
from svdq.pipeline.models.resolved_model import ResolvedModel
from svdq.producer import keys, lua
from svdq.producer.connection import server_url
from svdq.producer.pauses import is_freed
from svdq.producer.processes import process_name, scope
from svdq.producer.queue import SvdqQueue, queues, queues_for
from svdq.producer.settings import Settings
from svdq.producer.status.ranks import Activity, RankStatus, Rest
from svdq.producer.threads import beside
from svdq.worker import run_folder
from svdq.worker.launcher.group_process import GroupProcess
from svdq.worker.outages import ConnectionHealth, connect

logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0  # seconds between two looks for work, as those of an idle group
RECORD_S: Final = 5.0  # seconds between two records, as those of an idle rank
NUM_LOOKS: Final = 3  # looks that must find work while another group runs: that one may be about to take it
#: Seconds beside one and a half times those of its last start that a group gets to take the job for which it starts;
#: one of a dead group cannot be taken at once.
SPARE_S: Final = 15.0


def resting_groups(
    settings: Settings, model: ResolvedModel, groups: Sequence[GroupProcess]
) -> contextlib.AbstractContextManager[None]:
    """Look after those of `groups`, which may grow, that rest, during a block, in a thread."""
    return beside(_Keeper(settings, model, groups).run, "resting")  # the records expire if it does not end in time


def num_waiting(connection: redis.Redis, queues: Sequence[str]) -> int:
    """Count the jobs for which a group of some queues would start its ranks; none while the queues are paused.

    They wait, are due, or belong to a group that has died.
    """
    found = [keys.SUSPENDED, keys.POPPED]
    for name in queues:
        queue = SvdqQueue(name, connection=connection)
        found += [queue.key, queue.intermediate_queue_key]
        found += [queue.scheduled_job_registry.key, queue.started_job_registry.key, queue.ready_job_registry.key]
    return int(lua.run(connection, "count_work", found, Worker.redis_worker_namespace_prefix))


class _Keeper:
    def __init__(self, settings: Settings, model: ResolvedModel, groups: Sequence[GroupProcess]) -> None:
        self._settings = settings
        self._model = model
        self._groups = groups
        self._health = ConnectionHealth(settings)
        self._num_looks = 0  # that have found work, one after the other
        #: By the place of a group: the records of its ranks, and the rest for which they were written last, and when.
        self._records: dict[int, list[RankStatus]] = {}
        self._written: dict[int, tuple[Rest, float]] = {}

    def run(self, ended: threading.Event) -> None:
        """Look once a second until the end; then remove the records."""
        with connect(server_url(self._settings)) as connection:
            while not ended.wait(LOOK_S):
                try:
                    self._look(connection)
                except redis.RedisError as error:
                    if any(group.rest for group in self._groups):  # else its ranks say so
                        self._health.failed(error)
                except Exception:
                    logger.exception("The records of resting groups cannot be written; it is tried again.")
            with contextlib.suppress(redis.RedisError):
                self._remove(connection, [*self._records])

    def _look(self, connection: redis.Redis) -> None:
        freed = is_freed(connection, socket.gethostname())
        for group in self._groups:
            group.is_freed = freed
        rests = {number: group.rest for number, group in enumerate(self._groups)}
        self._remove(connection, [number for number in self._records if rests[number] is None])
        resting = [number for number, rest in rests.items() if rest is not None and rest.reason != "starting"]
        if not any(rests.values()):
            return
        for number, rest in rests.items():
            if rest is not None:
                self._write(connection, number, rest)
        if resting and not freed:
            names = dict.fromkeys(name for number in resting for name in self._queues_of(connection, number))
            self._wake(connection, resting, num_waiting(connection, [*names]))
        self._health.succeeded()

    def _queues_of(self, connection: redis.Redis, number: int) -> list[str]:
        found = run_folder.read_idle(self._groups[number].run_dir)
        if found is None:
            found = [queue.name for queue in queues_for(connection, model_stem(self._model.name))]
        ability, of_models = self._ability_of(number), {SvdqQueue(name, connection=connection).model for name in found}
        left = (each for each in queues(connection) if each.unable and each.model in of_models)
        return [*found, *(each.name for each in left if ability not in each.unable)]

    def _entry(self, number: int) -> str:
        """Return what a resting group has in `keys.ABILITIES`."""
        return f"{self._ability_of(number)} {process_name(os.getpid(), str(number))} "

    def _ability_of(self, number: int) -> str:
        intakes = (record.intake for record in self._records[number] if record.intake)
        return next((intake.ability for intake in intakes), "")

    def _wake(self, connection: redis.Redis, resting: Sequence[int], num_waiting: int) -> None:
        """Have as many groups start as there are jobs, less those that start already, here and on other hosts."""
        self._num_looks = self._num_looks + 1 if num_waiting else 0
        if not num_waiting or (self._num_looks < NUM_LOOKS and connection.exists(REDIS_WORKER_KEYS)):
            return
        starting = sum(group.is_starting for number, group in enumerate(self._groups) if number not in resting)
        asleep = [(number, rest) for number in resting if (rest := self._groups[number].rest) and rest.reason == "idle"]
        for number, rest in asleep[: max(0, num_waiting - starting)]:
            if self._claims(connection, number, rest, num_waiting):
                self._groups[number].is_wanted = True

    def _claims(self, connection: redis.Redis, number: int, rest: Rest, num_waiting: int) -> bool:
        """Claim a start for one of so many jobs, unless other groups have; the claim of one that is killed expires."""
        name = process_name(os.getpid(), str(number))
        expires_s = int(1.5 * (rest.start_s or 0.0) + SPARE_S)
        for key in (f"{keys.WAKING}{model_stem(self._model.name)}:{each}" for each in range(num_waiting)):
            if connection.set(key, name, nx=True, ex=expires_s) or connection.get(key) == name.encode():
                connection.expire(key, expires_s)
                return True
        return False

    def _write(self, connection: redis.Redis, number: int, rest: Rest) -> None:
        """Write the last records of a group's ranks again, as of ranks that take no memory."""
        now, before = time.time(), self._written.get(number)
        if before is not None and before[0] is rest and now - before[1] < RECORD_S:
            return
        if number not in self._records:
            self._records[number] = self._last_records(number)
        if rest.reason == "starting" and rest.start_s is not None:
            rest_now = rest.model_copy(update={"start_s": max(0.0, rest.start_s - (now - rest.since))})
        else:
            rest_now = rest
        seconds, _ = connection.time()
        with connection.pipeline(transaction=False) as pipeline:
            if ability := self._ability_of(number):
                # The entry of its ranks counts as replaced once another worker has the same GPU.
                pipeline.zadd(keys.ABILITIES, {self._entry(number): seconds})
                pipeline.expire(f"{keys.ABILITY}{ability}", keys.ABILITY_TTL_S)
            for record in self._records[number]:
                activity: Activity = "asleep" if rest.reason == "idle" else rest.reason
                update: dict[str, object] = {"at": now, "activity": activity, "rest": rest_now}
                if rest.reason == "held" and record.rank == 0:
                    update["conditions"] = (self._groups[number].shortage,)
                record.model_copy(update=update).save(pipeline)
            pipeline.execute()
        self._written[number] = (rest, now)

    def _last_records(self, number: int) -> list[RankStatus]:
        found = []
        for text in run_folder.read_records(self._groups[number].run_dir):
            with contextlib.suppress(ValidationError):
                found.append(_emptied(RankStatus.model_validate_json(text)))
        ranks = {record.rank: record for record in found}  # those that were killed have left none
        group = {"group": found[0].group} if found else {}
        new = (self._new_record(number, rank) for rank in range(self._groups[number].num_ranks))
        return [ranks.get(each.rank, each.model_copy(update=group)) for each in new]

    def _new_record(self, number: int, rank: int) -> RankStatus:
        """Return the record of a rank of a group that has not had ranks yet."""
        now, host, pid = time.time(), socket.gethostname(), os.getpid()
        return RankStatus(
            group=f"{host}-{pid}.{number}-{scope()}",
            rank=rank,
            num_ranks=self._groups[number].num_ranks,
            host=host,
            pid=pid,
            device=self._groups[number].device_of(rank),
            model=self._model.name,
            family=self._model.family or "",
            facts=dict(self._model.facts) if rank == 0 else {},
            started_at=now,
            at=now,
        )

    def _remove(self, connection: redis.Redis, numbers: Sequence[int]) -> None:
        if not numbers:
            return
        with connection.pipeline(transaction=False) as pipeline:
            for number in numbers:
                pipeline.zrem(keys.ABILITIES, self._entry(number))
                for record in self._records[number]:
                    record.remove(pipeline)
            pipeline.execute()
        for number in numbers:
            del self._records[number]
            self._written.pop(number, None)


def _emptied(record: RankStatus) -> RankStatus:
    """Return the last record of a rank as of one that has ended: it takes no memory and has no jobs."""
    intake = record.intake
    return record.model_copy(
        update={
            "pid": os.getpid(),
            "busy_share": 0.0,
            "rss_bytes": 0,
            "gpu_bytes": None if record.gpu_bytes is None else 0,
            "conditions": (),
            "intake": intake and intake.model_copy(update={"in_flight": (), "places": {}, "draining": False}),
        }
    )
