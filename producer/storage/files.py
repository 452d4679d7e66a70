"""What a storage is made of: files addressed by keys, in a folder or behind a URL. Knows no jobs and no user."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One file of a storage."""

    #: Its key, such as `outputs/photo-1f.mp4`.
    key: str
    #: Bytes.
    size: int
    #: When it was written last; has a zone.
    modified_at: datetime


class Files(Protocol):
    """Files by key. Keys are checked by the caller.

    What stands under its key is whole: writers put it there in one step. A folder of files (the frames of a video) is
    put there file by file where the storage knows no folders.

    Raises:
        FileNotFoundError: from `read`, `copy_out` and `entry`, when nothing stands under the key.
        Exception: from every method, whatever the storage raises.
    """

    def read(self, key: str) -> bytes:
        """Read a file."""
        ...

    def read_many(self, keys: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Read small files, in any order; those that are not there are left out."""
        ...

    def copy_out(self, key: str, path: Path) -> None:
        """Copy a file to a local path."""
        ...

    def exists(self, key: str) -> bool:
        """Whether a file or a folder stands under a key."""
        ...

    def entry(self, key: str) -> Entry:
        """Look at one file."""
        ...

    def entries(self, key: str) -> Iterator[Entry]:
        """Look at every file below a key, however deep; at none where nothing stands there."""
        ...

    def names(self, key: str) -> list[str]:
        """List the names of what stands under a key as in a folder; none where nothing does."""
        ...

    def write(self, key: str, data: bytes) -> None:
        """Put bytes under a key, in place of what is there."""
        ...

    def write_many(self, files: Mapping[str, bytes]) -> None:
        """Put bytes under many keys, in place of what is there; faster than one by one."""
        ...

    def publish(self, path: Path, key: str) -> None:
        """Put a local file or folder under a key, in place of what is there; `path` is given up."""
        ...

    def renew(self, key: str) -> bool:
        """Have the age of a file count from now on; False where that is not possible without writing it again."""
        ...

    def remove(self, key: str) -> None:
        """Remove what stands under a key, file or folder, if anything does."""
        ...
