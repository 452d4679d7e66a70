"""Interface of storage backends: files addressed by keys, in a folder or behind a URL."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One file of a storage."""

    #: Key, such as `outputs/photo-1f.mp4`.
    key: str
    #: Size in bytes.
    size: int
    #: Time of the last write, with a time zone.
    modified_at: datetime


class Files(Protocol):
    """Files by key. Keys are checked by the caller.

    Writes are atomic, so a file under its key is complete. A folder of files (the frames of a video) is written file by
    file on storages without folders.

    Raises:
        FileNotFoundError: from `read`, `copy_out` and `entry`, if the key does not exist.
        Exception: from every method, errors of the storage.
    """

    def read(self, key: str) -> bytes:
        """Read a file."""
        ...

    def read_many(self, keys: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Read small files, in any order; missing files are left out."""
        ...

    def copy_out(self, key: str, path: Path) -> None:
        """Copy a file to a local path."""
        ...

    def exists(self, key: str) -> bool:
        """Return whether a file or a folder with this key exists."""
        ...

    def entry(self, key: str) -> Entry:
        """Return the entry of one file."""
        ...

    def entries(self, key: str) -> Iterator[Entry]:
        """Yield the entry of every file below a key, with subfolders; none if the key does not exist."""
        ...

    def names(self, key: str) -> list[str]:
        """List the names in a folder; none if the key does not exist."""
        ...

    def write(self, key: str, data: bytes) -> None:
        """Write bytes, replacing an existing file."""
        ...

    def write_many(self, files: Mapping[str, bytes]) -> None:
        """Write many files, replacing existing ones; faster than one by one."""
        ...

    def publish(self, path: Path, key: str) -> None:
        """Move a local file or folder to a key, replacing what exists; `path` may be gone afterwards."""
        ...

    def renew(self, key: str) -> bool:
        """Set the time of a file to now; return False if that requires writing it again."""
        ...

    def remove(self, key: str) -> None:
        """Remove a file or a folder if it exists."""
        ...
