"""The status records that ranks write to Redis every second while busy and every five while idle; they expire."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import not_
from typing import Annotated, Any, Literal

import redis
from pydantic import Field, ValidationError
from redis.client import Pipeline

from svdq.pipeline.planning.costs import Seconds, ShapeCosts, UpscaleCosts
from svdq.pipeline.planning.rounds import Outlook
from svdq.producer import keys, lua
from svdq.producer.records import Record
from svdq.producer.text import MAX_SECONDS, iso_of
from svdq.producer.together import Read, ask_one, checked

SILENT_S = 7.0  # of silence by the clock of Redis; an idle rank writes every five

MAX_RANKS = 4096
Whole = Annotated[int, Field(ge=0, lt=2**63)]  # arithmetic with floats fails on larger ones
Moment = Annotated[float, Field(ge=0, le=MAX_SECONDS)]  # seconds since the epoch

Activity = Literal["idle", "loading", "denoising", "decoding", "waiting", "asleep", "starting", "freed", "held"]


class Condition(Record):
    """Something that is wrong and retried until it works, such as a full storage."""

    effect: str  # a sentence without its full stop: "Videos wait to be written"
    reason: str  # of the last failed attempt, as a sentence
    since: Moment
    attempts: Whole
    job_ids: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return one JSON object."""
        return self.model_dump(mode="json") | {"since": iso_of(self.since)}


NO_CHECKPOINTS = "Checkpoints cannot be written, videos continue without"  # the effect that holds up no video


class IntakeStatus(Record):
    """The report of rank 0 about its group."""

    worker: str  # name of the group's RQ worker
    in_flight: tuple[str, ...] = ()  # ids of jobs, the longest in flight first
    finished: Whole = 0
    failed: Whole = 0
    pace_s: Seconds | None = None  # seconds between two finished videos while the group is busy; None until known
    costs: tuple[ShapeCosts, ...] = ()  # the latest last
    upscales: tuple[UpscaleCosts, ...] = ()
    keeps_latents: bool = Field(default=False, exclude_if=not_)  # which finished videos are upscaled from
    draining: bool = False
    places: Mapping[str, Outlook] = {}  # in rounds, of each job in flight
    round_size: Whole = 0
    loras: Mapping[str, str] = {}  # the LoRAs that jobs may choose: digests by name
    ability: str = ""  # its id in `keys.ABILITIES`; "" of earlier versions
    failed_gpus: Mapping[str, str] = {}  # GPUs that have failed and were left out, each with the reason, a clause


class Rest(Record):
    """Why a group has no ranks at present, or none that are ready; its launcher writes their records then."""

    reason: Literal["idle", "starting", "freed", "held"]
    since: Moment
    start_s: Seconds | None = None  # seconds until its ranks could be ready; None until they have been

    def __str__(self) -> str:
        return _RESTS[self.reason]


_RESTS = {
    "idle": "asleep until there is a job",
    "starting": "starts",
    "freed": "its GPUs are free",
    "held": "waits for its GPU",
}


class RankStatus(Record):
    """The latest status of one rank."""

    group: str  # does not change when the group restarts
    rank: int = Field(ge=0, le=MAX_RANKS)  # 0 takes jobs, the last rank writes videos
    num_ranks: int = Field(ge=1, le=MAX_RANKS)
    host: str
    pid: Whole
    device: str  # cpu, or cuda and the number of the GPU
    device_name: str = ""
    notice: str = ""
    model: str  # of family "" if it makes videos of any
    family: str = ""
    loras: tuple[str, ...] = ()  # of a model file: its LoRAs with their strengths
    #: The model's facts (`Family.read_facts`), of rank 0; {} of other ranks and of earlier versions.
    facts: dict[str, Any] = Field({})
    #: Seconds of a step of its model's usual video on such a GPU, as somebody has published it, of rank 0.
    published_step_s: Seconds | None = None
    #: Seconds since the epoch, by the clock of its host: when it was ready, and when it wrote this.
    started_at: Moment
    at: Moment
    activity: Activity = "idle"
    #: The components that are loaded at present, and the seconds that this took the last time.
    loading: str = ""
    loading_s: Seconds | None = None
    #: The current job, the number of its denoising steps, and how many of them are done; None while idle.
    job_id: str | None = None
    steps: Whole | None = None
    step: Whole | None = None
    step_range: tuple[Whole, Whole] | None = None  # of its steps of the current or last job; equal: none
    step_s: float | None = None
    busy_share: float = 0.0  # of the last seconds, 0 to 1
    rss_bytes: Whole = 0
    #: GPU memory that PyTorch has reserved, and total GPU memory, in bytes; None on a CPU.
    gpu_bytes: Whole | None = None
    gpu_total_bytes: Whole | None = None
    conditions: tuple[Condition, ...] = ()
    restart_count: Whole = 0  # of its group before this process was started
    #: Denoising steps that it has done since then, and how long they took in all, in seconds.
    num_steps: Whole = 0
    steps_s: float = 0.0
    #: Of the last rank: the seconds of writing a video, None before the first, and how many are written at once.
    write_s: Seconds | None = None
    num_writers: int = Field(default=1, ge=1, le=MAX_RANKS)
    intake: IntakeStatus | None = None
    rest: Rest | None = Field(default=None, exclude_if=not_)

    def as_json(self) -> dict[str, Any]:
        """Return one JSON object."""
        return self.model_dump(mode="json", exclude={"facts"}) | {
            "started_at": iso_of(self.started_at),
            "at": iso_of(self.at),
            "conditions": [condition.as_json() for condition in self.conditions],
            "defaults": self.facts.get("defaults", {}),
            **({} if self.rest is None else {"rest": {**self.rest.model_dump(), "since": iso_of(self.rest.since)}}),
        }

    @property
    def loading_text(self) -> str:
        """The set that it loads, such as "loading transformer_2, about 6 s"."""
        if self.loading_s is None:
            return f"loading {self.loading}"
        return f"loading {self.loading}, about {self.loading_s:{'.0f' if self.loading_s >= 1 else '.1g'}} s"

    @property
    def key(self) -> str:
        """The Redis key of its record."""
        return f"{keys.RANK}{self._member}"

    @property
    def _member(self) -> str:
        return f"{self.group}:{self.rank}"

    def save(self, pipeline: redis.Redis) -> None:
        """Write the record for as long as a rank may be silent; one command."""
        lua.run(pipeline, "save_rank", [self.key, keys.RANKS], self._member, self.model_dump_json(), keys.RANK_TTL_S)

    def remove(self, pipeline: redis.Redis) -> None:
        """Remove the record when the rank ends."""
        pipeline.delete(self.key)
        pipeline.zrem(keys.RANKS, self._member)


@dataclass(frozen=True, kw_only=True)
class GroupStatus:
    """The ranks of one group with recent records."""

    name: str
    ranks: tuple[RankStatus, ...]  # some may be missing while the group starts
    silent_s: float = 0.0  # age in seconds of the oldest record, by Redis' clock

    @property
    def is_whole(self) -> bool:
        """Whether all ranks have recent records."""
        return len(self.ranks) >= self.ranks[0].num_ranks and self.silent_s < SILENT_S

    @property
    def intake(self) -> IntakeStatus | None:
        """The report of rank 0; None without rank 0."""
        return self.ranks[0].intake

    @property
    def in_flight(self) -> tuple[str, ...]:
        """The ids of its jobs, the longest in flight first."""
        return self.intake.in_flight if self.intake is not None else ()

    @property
    def places(self) -> Mapping[str, Outlook]:
        """In rounds, the outlook of each job in flight that is not for the next one."""
        return self.intake.places if self.intake is not None else {}

    @property
    def round_size(self) -> int:
        """The videos of a round; 0 if it does not work in rounds."""
        return self.intake.round_size if self.intake is not None else 0

    @property
    def rest(self) -> Rest | None:
        """Why it has no ranks at present; None while it has."""
        return self.ranks[0].rest

    @property
    def is_freed(self) -> bool:
        """Whether it has no ranks until `svdq resume`."""
        return self.rest is not None and self.rest.reason == "freed"

    @property
    def is_held(self) -> bool:
        """Whether it has no ranks until another program gives memory of its GPUs back."""
        return self.rest is not None and self.rest.reason == "held"

    @property
    def start_s(self) -> float:
        """The seconds until it can begin a job, as far as they are known: 0 while it has ranks."""
        return self.rest.start_s or 0.0 if self.rest is not None else 0.0

    @property
    def write_s(self) -> float:
        """The seconds of writing a video; 0 before one was written."""
        return self.ranks[-1].write_s or 0.0

    @property
    def writes_pace_s(self) -> float:
        """The seconds between two written videos while all writers work."""
        return self.write_s / self.ranks[-1].num_writers

    @property
    def conditions(self) -> list[Condition]:
        """The outages that its ranks wait out."""
        return [condition for _, condition in conditions_of([self])]

    @property
    def waits_for_storage(self) -> bool:
        """Whether no video of it can be begun, or written."""
        return any(condition.effect != NO_CHECKPOINTS for condition in self.conditions)

    @property
    def failed_gpus(self) -> dict[str, str]:
        """The GPUs that have failed and were left out, each with a sentence."""
        failed = self.intake.failed_gpus if self.intake is not None else {}
        host, later = self.ranks[0].host, "`svdq worker` tries it again at its next start."
        return {name: f"{name} of {host} has failed ({reason}); {later}" for name, reason in failed.items()}


class GroupFinder:
    """Finds the groups of jobs in flight, of which there may be thousands."""

    def __init__(self, groups: Sequence[GroupStatus]) -> None:
        self._by_job = {job_id: group for group in groups for job_id in group.in_flight}
        self._by_worker = {group.intake.worker: group for group in groups if group.intake is not None}

    def find(self, job_id: str, worker: str | None) -> GroupStatus | None:
        """Return the group that a job is in flight in, by the group's record or, if older, by the job's RQ worker."""
        # Rank 0 writes its record once a second, and may have taken the job since then.
        return self._by_job.get(job_id) or self._by_worker.get(worker or "")


def conditions_of(groups: Iterable[GroupStatus]) -> list[tuple[RankStatus, Condition]]:
    """Return what the ranks of groups wait for, each with its rank."""
    return [(rank, condition) for group in groups for rank in group.ranks for condition in rank.conditions]


def read_groups(connection: redis.Redis) -> list[GroupStatus]:
    """Read all groups, sorted by name; two round trips, independent of the number of jobs."""
    return ask_one(connection, reading_groups())


def reading_groups() -> Read[list[GroupStatus]]:
    """Read the same."""
    (members,) = checked((yield lambda pipeline: pipeline.zrange(keys.RANKS, 0, -1)))

    def put(pipeline: Pipeline) -> None:
        for member in members:
            pipeline.get(keys.RANK.encode() + member)
            pipeline.pttl(keys.RANK.encode() + member)

    answers = (yield put) if members else []
    ranks: dict[str, list[tuple[RankStatus, float]]] = {}
    for text, ttl_ms in zip(answers[::2], answers[1::2], strict=True):
        if isinstance(text, bytes):
            try:
                rank = RankStatus.model_validate_json(text)
            except ValidationError:
                continue  # a record of another version, or an invalid one, must not affect the others
            ranks.setdefault(rank.group, []).append((rank, keys.RANK_TTL_S - ttl_ms / 1000))
    return [
        GroupStatus(
            name=name,
            ranks=tuple(sorted((rank for rank, _ in ranks[name]), key=lambda rank: rank.rank)),
            silent_s=max(silent_s for _, silent_s in ranks[name]),
        )
        for name in sorted(ranks)
    ]
