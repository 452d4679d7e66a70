"""What the groups of a queue can make, as they say in Redis, and which jobs one of them leaves to the others."""

import logging
import math
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import psutil
import redis
from pydantic import ValidationError

from svdq.pipeline.models.lora_folder import NO_LORAS, LoraFolder
from svdq.producer import keys, processes
from svdq.producer.job import JobArguments
from svdq.producer.queue import SvdqQueue
from svdq.worker.ability import Ability
from svdq.worker.queue.scripts import server_time

logger = logging.getLogger(__name__)

LISTING_S = 1.0  # seconds that leases may wait for a folder of LoRAs
RECENT_S = 0.5  # seconds for which a look counts for all jobs: thousands may be left one after the other


class Lacking(NamedTuple):
    """Why a group leaves a job to others."""

    waits_for: str  # what the group has not, such as "an upscaler"
    unable: frozenset[str]  # the abilities of the groups that leave it; see `SvdqQueue.unable`


class Abilities:
    """The ability of a group, and those of the groups that there are or were in the last days."""

    def __init__(
        self,
        connection: redis.Redis,
        own: Ability,
        worker_name: str,
        *,
        gpus: Sequence[str] = (),
        loras: LoraFolder = NO_LORAS,
        wait_for_able: bool = False,
    ) -> None:
        """Read and write nothing yet; with `wait_for_able`, jobs that no known group can make wait for one."""
        self.own = own
        self.loras: dict[str, str] = {}  # the LoRAs that jobs may choose: digests by name
        self._connection = connection
        self._worker_name = worker_name
        self._gpus = gpus
        self._wait_for_able = wait_for_able
        self._lora_folder = loras
        self._listing = threading.Thread()  # lists that folder, which may be a share that does not answer
        self._listed: dict[str, str] = {}
        self._known: dict[str, Ability] = {}  # by id, this group's among them
        self._are_more_coming = False  # whether workers start that have not said yet what they can make
        self._looked_at = -math.inf  # monotonic
        self._member = ""
        self._launchers: set[str] = set()  # names in `keys.STARTING` of what has started this process

    def look(self) -> None:
        """List the LoRAs, say what this group can make, and read what the others can."""
        self._find_loras()
        self._write()
        self._read()
        self._looked_at = time.monotonic()

    def _find_loras(self) -> None:
        if self._lora_folder.folder is None:
            return
        if not self._listing.is_alive():
            self._listing = threading.Thread(target=self._list_loras, name="loras", daemon=True)
            self._listing.start()
        self._listing.join(LISTING_S)
        if self.loras != self._listed:
            self.loras = self._listed
            self.own = self.own.with_loras(self.loras.values())

    def _list_loras(self) -> None:
        self._listed = self._lora_folder.digests()

    def _write(self) -> None:
        now_s = server_time(self._connection)
        member = f"{self.own.id} {self._worker_name} {','.join(self._gpus)}"
        outdated = {self._member} - {"", member} if self._member else self._of_gone_workers()
        self._member = member
        with self._connection.pipeline(transaction=False) as pipeline:
            pipeline.set(f"{keys.ABILITY}{self.own.id}", self.own.model_dump_json(), ex=keys.ABILITY_TTL_S)
            pipeline.zadd(keys.ABILITIES, {member: now_s})
            pipeline.zremrangebyscore(keys.ABILITIES, "-inf", now_s - keys.ABILITY_TTL_S)
            pipeline.expire(keys.ABILITIES, keys.ABILITY_TTL_S)
            for name in outdated:
                pipeline.zrem(keys.ABILITIES, name)
            pipeline.execute()

    def _of_gone_workers(self) -> set[str]:
        """Return the entries of ended workers of this host that had the same ability or GPU: this one replaces them."""
        self._launchers = {f"{socket.gethostname()}:{process.pid}" for process in psutil.Process().parents()}
        found: Any = self._connection.zrange(keys.ABILITIES, 0, -1)
        outdated = set()
        for member in (name.decode(errors="replace") for name in found):
            ability, _, rest = member.partition(" ")
            worker, _, gpus = rest.partition(" ")
            if processes.is_gone(worker) and (ability == self.own.id or {*gpus.split(",")} & {*self._gpus}):
                outdated.add(member)
        return outdated

    def _read(self) -> None:
        with self._connection.pipeline(transaction=False) as pipeline:
            pipeline.zrange(keys.ABILITIES, 0, -1)
            pipeline.time()
            pipeline.zrange(keys.STARTING, 0, -1, withscores=True)
            members, (now_s, _), starting = pipeline.execute()
        ids = {member.decode(errors="replace").partition(" ")[0] for member in members}
        new = sorted(ids - self._known.keys() - {self.own.id})
        found = self._connection.mget([f"{keys.ABILITY}{each}" for each in new]) if new else []
        abilities = {**self._known, self.own.id: self.own}
        for each, text in zip(new, found, strict=True):
            try:
                abilities[each] = Ability.model_validate_json(text or "")
            except ValidationError:
                continue  # anyone can write to Redis
        self._known = {each: ability for each, ability in abilities.items() if each in ids or each == self.own.id}
        launchers = {name.decode(errors="replace").partition(" ")[0] for name, until in starting if until >= now_s}
        self._are_more_coming = not launchers <= self._launchers

    def reads(self, queue: SvdqQueue) -> bool:
        """Whether this group takes the jobs of a queue that some groups leave to others.

        Those that all known groups leave are looked at again: the group that they waited for was forgotten.
        """
        if self.own.id not in queue.unable:
            return True
        return not self._are_more_coming and keys.WAIT not in queue.unable and self._known.keys() <= queue.unable

    def lacking(self, queue: SvdqQueue, arguments: JobArguments | None, kwargs: dict[str, Any]) -> Lacking | None:
        """Return why this group leaves a job of a queue to others; None if it makes it, or says why nobody can.

        `arguments` are None if only a newer version may read its `kwargs`.
        """
        if not (lacks := self._lacks(self.own, arguments, kwargs)):
            return None
        if time.monotonic() - self._looked_at > RECENT_S:
            self.look()  # a LoRA, or another group, may have come since
            if not (lacks := self._lacks(self.own, arguments, kwargs)):
                return None
        found = {each: self._lacks(ability, arguments, kwargs) for each, ability in self._known.items()}
        left = {*queue.unable, self.own.id, *(each for each, what in found.items() if what)} & found.keys()
        if arguments is not None and not self.own.is_for(arguments.job):  # what lacks those that are for it says more
            nearer = (found[each] for each in left if self._known[each].is_for(arguments.job))
            lacks = next(filter(None, nearer), lacks)
        if left < found.keys() or self._are_more_coming:
            return Lacking(lacks, frozenset(left))
        is_for_lora = arguments is not None and lacks == self.own.lacks_lora(arguments.job)
        return Lacking(lacks, frozenset({*left, keys.WAIT})) if self._wait_for_able or is_for_lora else None

    def _lacks(self, ability: Ability, arguments: JobArguments | None, kwargs: dict[str, Any]) -> str:
        if arguments is None:
            return ability.lacks_fields(kwargs)
        try:
            return ability.lacks(arguments.job)
        except Exception:
            if ability is not self.own:
                return "another model"  # anyone can write to Redis
            logger.exception("Whether this group can make a job cannot be told; it takes it.")
            return ""  # the job fails of the same error when it is prepared
