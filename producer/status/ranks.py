"""The records that ranks write about themselves into Redis: who they are, what they do, what they wait for.

A rank writes its record about once a second while it works and every five seconds while it does not; the record
expires soon after the rank has ended.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import redis
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from svdq.producer import keys
from svdq.producer.timeparse import MAX_SECONDS, iso_of

#: Seconds of silence, by the clock of Redis, after which nothing is promised of a rank; an idle one writes every five.
SILENT_S = 7.0

#: Upper bounds, in seconds, of the classes by which ranks count how long work took; one more class has no bound.
BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)

#: Writes the record of a rank, and forgets ranks whose records have expired, all by the clock of Redis.
#: KEYS: record, svdq:ranks. ARGV: `<group>:<rank>`, the record, seconds that it lasts.
_SAVE = """
local now_s = tonumber(redis.call('time')[1])
redis.call('set', KEYS[1], ARGV[2], 'EX', ARGV[3])
redis.call('zadd', KEYS[2], now_s, ARGV[1])
redis.call('zremrangebyscore', KEYS[2], '-inf', now_s - ARGV[3] - 1)
redis.call('expire', KEYS[2], ARGV[3])
"""

#: Ranks of one group at most: what is above is a mistake.
MAX_RANKS = 4096
#: Seconds since the epoch, and lengths of time in seconds.
Moment = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]

#: What a rank is at: nothing; a step; the decode; or held up by the storage with work in its hands.
Activity = Literal["idle", "denoising", "decoding", "waiting"]


class _Record(BaseModel):
    """Frozen; a field of another version of svdq is left out."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Condition(_Record):
    """Something that is wrong and retried until it works, such as a full storage."""

    #: What it keeps from happening, as a sentence without its full stop: "Videos wait to be written".
    effect: str
    #: Why, as a sentence: what the last attempt came to.
    reason: str
    #: Seconds since the epoch of the first attempt that failed.
    since: Moment
    #: Attempts that have failed.
    attempts: int
    #: The jobs that wait for it, the first in line first.
    job_ids: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """One JSON object."""
        return self.model_dump(mode="json") | {"since": iso_of(self.since)}


class ShapeCosts(_Record):
    """What videos of one shape cost on a group, as it has measured."""

    #: The shape, as in `pipeline.costs.Shape`.
    frames: int = Field(ge=1)
    width: int = Field(ge=1)
    height: int = Field(ge=1)
    guided: bool
    #: Seconds of a denoising step on each rank; K values.
    step_s: Annotated[tuple[Seconds, ...], Field(min_length=1)]
    #: Seconds of an encode and of a decode.
    encode_s: Seconds
    decode_s: Seconds


class Timings(_Record):
    """How long one kind of work took on a rank, as a histogram that only grows while its process lives."""

    #: How often it took as long as each class of `BOUNDS_S` says, and longer than all of them.
    counts: tuple[int, ...]
    #: Seconds of all together.
    sum_s: float


class IntakeStatus(_Record):
    """What rank 0 knows of its whole group."""

    #: Name of the group's RQ worker, as in `workers.WorkerView`.
    worker: str
    #: Jobs that the group has, the longest in flight first.
    in_flight: tuple[str, ...] = ()
    #: Jobs that have ended since rank 0 was started.
    finished: int = 0
    failed: int = 0
    #: Seconds between two finished videos while the group is busy; None until it is known.
    pace_s: Seconds | None = None
    #: Costs of the shapes that were measured, the latest last.
    costs: tuple[ShapeCosts, ...] = ()
    #: Whether the group takes no more jobs because it is to end.
    draining: bool = False
    #: Jobs of dead groups that it has given back to their queues.
    taken_back: int = 0


class RankStatus(_Record):
    """One rank, as it was when it last spoke."""

    #: What all ranks of a group have in common and no other group has; the same after a restart of the group.
    group: str
    #: 0 takes jobs in, the last one writes videos.
    rank: int = Field(ge=0, le=MAX_RANKS)
    #: K.
    num_ranks: int = Field(ge=1, le=MAX_RANKS)
    #: Where its process is.
    host: str
    pid: int
    #: cpu, or cuda and the GPU's number.
    device: str
    #: The GPU's own name, or "".
    device_name: str = ""
    #: What is to be said of the model wherever its work is shown, or "".
    notice: str = ""
    #: Name of the model, and the seconds that opening this rank's part of it took.
    model: str
    load_s: float = 0.0
    #: Seconds since the epoch, by the clock of its host: when it was ready, and when it wrote this.
    started_at: Moment
    at: Moment
    #: What it is at.
    activity: Activity = "idle"
    #: The job it computes, that job's denoising steps, and how many of them are done; None while it computes nothing.
    job_id: str | None = None
    steps: int | None = None
    step: int | None = None
    #: The steps that are this rank's of the job that it computes or computed last: from one up to, not including, the
    #: other; the same twice for a rank that only encodes or decodes.
    step_range: tuple[int, int] | None = None
    #: Seconds that its last step took.
    step_s: float | None = None
    #: Part of the last seconds in which it computed, 0 to 1.
    busy_share: float = 0.0
    #: Resident bytes of the process.
    rss_bytes: int = 0
    #: Bytes of GPU memory that PyTorch holds for the process, and all that the GPU has; None on a processor.
    gpu_bytes: int | None = None
    gpu_total_bytes: int | None = None
    #: What it waits for.
    conditions: tuple[Condition, ...] = ()
    #: How often its group was restarted before this process was started.
    restart_count: int = 0
    #: How long work took since then: `step`, `encode`, `decode` and `write`, where there was any.
    timings: Mapping[str, Timings] = {}
    #: Videos that it took up again from a checkpoint; checkpoints written, and their bytes.
    resumed: int = 0
    checkpoints: int = 0
    checkpoint_bytes: int = 0
    #: On rank 0.
    intake: IntakeStatus | None = None

    def as_json(self) -> dict[str, Any]:
        """One JSON object."""
        times = {"started_at": iso_of(self.started_at), "at": iso_of(self.at)}
        return (
            self.model_dump(mode="json")
            | times
            | {"conditions": [condition.as_json() for condition in self.conditions]}
        )

    @property
    def key(self) -> str:
        """The Redis key of its record."""
        return f"{keys.RANK}{self._member}"

    @property
    def _member(self) -> str:
        return f"{self.group}:{self.rank}"

    def save(self, pipeline: redis.Redis) -> None:
        """Write the record for as long as a rank may be silent; one command."""
        pipeline.eval(_SAVE, 2, self.key, keys.RANKS, self._member, self.model_dump_json(), keys.RANK_TTL_S)

    def remove(self, pipeline: redis.Redis) -> None:
        """Remove the record: the rank ends."""
        pipeline.delete(self.key)
        pipeline.zrem(keys.RANKS, self._member)


@dataclass(frozen=True, kw_only=True)
class GroupStatus:
    """The ranks of one group that have spoken lately."""

    #: What they have in common.
    name: str
    #: By rank; some may be missing while the group starts.
    ranks: tuple[RankStatus, ...]
    #: Seconds since the rank that has been silent for longest wrote its record, by the clock of Redis.
    silent_s: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether all of its ranks have written their records lately."""
        return len(self.ranks) >= self.ranks[0].num_ranks and self.silent_s < SILENT_S

    @property
    def intake(self) -> IntakeStatus | None:
        """What rank 0 knows of the group; None while rank 0 is not there."""
        return self.ranks[0].intake

    def has(self, job_id: str, worker: str | None) -> bool:
        """Whether the group has a job in flight, by its own record or, if that is older, by the job's RQ worker."""
        # Rank 0 writes its record once a second, and may have taken the job since.
        return self.intake is not None and (job_id in self.intake.in_flight or worker == self.intake.worker)

    @property
    def conditions(self) -> list[Condition]:
        """What its ranks wait for."""
        return [condition for rank in self.ranks for condition in rank.conditions]


def read_groups(connection: redis.Redis) -> list[GroupStatus]:
    """Read the groups that are there, by name; two round trips, however many jobs there are."""
    members: Any = connection.zrange(keys.RANKS, 0, -1)
    if not members:
        return []
    with connection.pipeline(transaction=False) as pipeline:
        for member in members:
            pipeline.get(keys.RANK.encode() + member)
            pipeline.pttl(keys.RANK.encode() + member)
        answers = pipeline.execute(raise_on_error=False)
    ranks: dict[str, list[tuple[RankStatus, float]]] = {}
    for text, ttl_ms in zip(answers[::2], answers[1::2], strict=True):
        if isinstance(text, bytes):
            try:
                rank = RankStatus.model_validate_json(text)
            except ValidationError:
                continue  # a worker of another version, or somebody's mistake: nothing else may fail for it
            ranks.setdefault(rank.group, []).append((rank, keys.RANK_TTL_S - ttl_ms / 1000))
    return [
        GroupStatus(
            name=name,
            ranks=tuple(sorted((rank for rank, _ in ranks[name]), key=lambda rank: rank.rank)),
            silent_s=max(silent_s for _, silent_s in ranks[name]),
        )
        for name in sorted(ranks)
    ]
