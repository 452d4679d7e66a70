"""Streams videos as one zip: each file is read when its turn comes, and nothing is kept."""

import io
import zipfile
from collections.abc import Iterable, Iterator
from datetime import datetime

from svdq.producer.results.results import OUTPUTS
from svdq.producer.storage.storage import Storage


class _Pipe(io.RawIOBase):
    """A file that cannot be sought, from which what was written is taken."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        """Return that it can be written."""
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        """Keep the bytes until they are taken."""
        self._parts.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        """Return what was written since the last time."""
        taken = b"".join(self._parts)
        self._parts.clear()
        return taken


def zip_of(storage: Storage, keys: Iterable[str], now: datetime) -> Iterator[bytes]:
    """Yield a zip of files in parts; holds one file in memory at a time. Videos are not compressed again.

    A file that was removed meanwhile is left out.

    Raises:
        UnavailableError: the storage cannot be reached.
    """
    pipe = _Pipe()
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_STORED) as archive:
        for key in keys:
            entry = storage.entry(key)
            if entry is None:
                continue
            # A zip begins in 1980.
            modified = max(entry.modified_at.astimezone(now.tzinfo), datetime(1980, 1, 1, tzinfo=now.tzinfo))
            info = zipfile.ZipInfo(key.removeprefix(f"{OUTPUTS}/"), modified.timetuple()[:6])
            info.external_attr = 0o644 << 16
            archive.writestr(info, storage.read(key))
            yield pipe.take()
    yield pipe.take()
