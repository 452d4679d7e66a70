"""Handing single photos to storage and queue, for a process that outlives connections. Knows no folder."""

from pathlib import Path
from typing import Self

import redis

from svdq.pipeline.errors import UnavailableError
from svdq.producer.queue import connect, plain_errors
from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.enqueue import Enqueued, Entry, enqueue_many
from svdq.producer.submitting.photos import Photo, check_photo


class Submitter:
    """Submits photos one at a time."""

    def __init__(self, settings: Settings) -> None:
        """Make it; nothing is reached yet.

        Raises:
            InputError: there is no such kind of storage.
        """
        self._settings = settings
        self._storage = Storage(settings.storage)
        self._connection: redis.Redis | None = None

    def __enter__(self) -> Self:
        """Nothing more to begin."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()

    def reach(self) -> redis.Redis:
        """Connect to Redis.

        Raises:
            InputError: its URL is not one.
            UnavailableError: it does not answer.
        """
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._connection = connect(self._settings)
        return self._connection

    def check(self, path: Path) -> Photo:
        """Read a photo and decode it.

        Raises:
            InputError: it is none, or cannot be read.
        """
        return check_photo(path, self._settings.max_pixels)

    def submit(self, photo: Photo, entry: Entry) -> Enqueued:
        """Store a photo and enqueue its job, unless there is one of that id.

        Raises:
            InputError: the photo has changed since it was checked.
            UnavailableError: Redis or the storage cannot be reached; the same can be done again.
        """
        if not self._storage.has_input(photo.key, photo.num_bytes):
            self._storage.write_bytes(photo.key, photo.read())
        if self._connection is not None:
            try:
                return self._enqueue(self._connection, entry)
            except UnavailableError:
                pass  # the connection may just be an old one: the server was restarted meanwhile
        return self._enqueue(self.reach(), entry)

    def _enqueue(self, connection: redis.Redis, entry: Entry) -> Enqueued:
        with plain_errors(self._settings):
            return enqueue_many(connection, [entry])[0]
