"""The outbox of webhooks: a stream in Redis of what has happened to videos, written with the change itself."""

from dataclasses import dataclass
from typing import Any, Literal

import redis
from redis.client import Pipeline

from svdq.producer import keys, lua
from svdq.producer.text import iso_of
from svdq.producer.together import Read, checked

Event = Literal["video.created", "video.started", "video.completed", "video.failed", "video.deleted"]


def tell(pipeline: redis.Redis, event: Event, job_id: str) -> None:
    """Add an event of a video; in a pipeline, with its other commands. Nothing happens while nobody sends webhooks."""
    lua.run(pipeline, "tell", (), event, job_id)


@dataclass(frozen=True, kw_only=True)
class Outbox:
    """The events that are not sent yet."""

    num_waiting: int
    oldest_at: float | None  # when the first of them was written, in seconds since the epoch
    refusal: str  # how the last attempt failed, as the end of a sentence; "" if none did, or none waits

    def as_json(self) -> dict[str, Any]:
        """Return one JSON object."""
        return {
            "waiting": self.num_waiting,
            "oldest_at": None if self.oldest_at is None else iso_of(self.oldest_at),
            "error": f"The last attempt {self.refusal}." if self.refusal else None,
        }


def reading_outbox() -> Read[Outbox]:
    """Read what waits in a round trip with others: see `together.py`."""

    def put(pipeline: Pipeline) -> None:
        pipeline.xlen(keys.WEBHOOKS)
        pipeline.xrange(keys.WEBHOOKS, count=1)
        pipeline.getrange(keys.WEBHOOKS_REFUSAL, 0, 199)

    num_waiting, oldest, refusal = checked((yield put))
    oldest_at = int(oldest[0][0].partition(b"-")[0]) / 1000 if oldest else None
    refusal = refusal.decode(errors="replace") if oldest else ""  # it outlives an event that was dropped
    return Outbox(num_waiting=num_waiting, oldest_at=oldest_at, refusal=refusal)
