"""The outbox of webhooks: a stream in Redis of what has happened to videos, written with the change itself."""

from typing import Literal

import redis

from svdq.producer import lua

Event = Literal["video.created", "video.started", "video.completed", "video.failed", "video.deleted"]


def tell(pipeline: redis.Redis, event: Event, job_id: str) -> None:
    """Add an event of a video; in a pipeline, with its other commands. Nothing happens while nobody sends webhooks."""
    lua.run(pipeline, "tell", (), event, job_id)
