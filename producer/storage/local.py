"""Storage in a folder: files are renamed when flushed, and leave the embedded Redis server its last bytes.

The folder and those right in it may be links. Links below are not followed: others may write to a shared storage.
"""

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from svdq.producer.files import open_regular, temporary_name

FRAME = re.compile(r"frame_\d+\.png")  # names of svdq's own files in a folder of frames
TEMPORARY = "tmp"  # folder for files being written, below the root so that a rename stays on one file system
REMOVE_ATTEMPTS = 5  # to remove a folder into which another process writes


@dataclass(frozen=True, kw_only=True)
class FileInfo:
    """One file of a storage."""

    key: str
    size: int  # bytes
    modified_at: datetime  # time of the last write, with a time zone


class LocalFiles:
    """Files by key in a local folder, with methods of `Storage`, which checks keys. Raises OSError."""

    num_threads = 16  # file systems flush those files together that are flushed at the same time

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._left: list[Path] = []  # temporary files and folders on a disk that was away when they were discarded

    def open(self, key: str) -> BinaryIO:
        """Open a file folder by folder, so that none can be replaced by a link between a check and its use."""
        first, *folders, name = ["", *key.split("/")] if "/" not in key else key.split("/")
        opened = os.open(self.folder / first, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for folder in folders:
                inner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=opened)
                os.close(opened)
                opened = inner
            return open_regular(name, os.O_NOFOLLOW, folder=opened)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise FileNotFoundError(errno.ENOENT, "it is a link, or in one", str(self.folder / key)) from error
            raise OSError(error.errno, error.strerror, str(self.folder / key)) from error
        finally:
            os.close(opened)

    def read(self, key: str) -> bytes:
        with self.open(key) as file:
            return file.read()

    def copy_out(self, key: str, path: Path) -> None:
        with self.open(key) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)

    def exists(self, key: str) -> bool:
        return self._status(key) is not None

    def entry(self, key: str) -> FileInfo:
        status = self._status(key)
        if status is None or not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(errno.ENOENT, "it is no file", key)
        return _info(key, status)

    def entries(self, key: str) -> Iterator[FileInfo]:
        if self.folder.is_dir() and self._status(key) is None:  # else it cannot be used
            return
        for folder, _, names in os.walk(self.folder / key, onerror=_unless_missing):
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    path = Path(folder, name)
                    if stat.S_ISREG((status := path.lstat()).st_mode):
                        yield _info(path.relative_to(self.folder).as_posix(), status)

    def names(self, key: str) -> list[str]:
        if self._status(key) is not None:
            with contextlib.suppress(FileNotFoundError):
                return os.listdir(self.folder / key)
        return []

    def _status(self, key: str) -> os.stat_result | None:
        """Return what is at a key; None if there is nothing, or a link on the way."""
        path, status = self.folder, None
        try:
            for number, part in enumerate(key.split("/")):
                path /= part
                status = path.lstat() if number else path.stat()
                if stat.S_ISLNK(status.st_mode):
                    return None
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status

    def write(self, key: str, data: bytes) -> None:
        temporary = self.temporary_path()
        try:
            temporary.write_bytes(data)
            publish(temporary, self.folder / key)
        finally:
            self.discard(temporary)  # leave no partial file on a full disk

    def publish(self, path: Path, key: str) -> None:
        """Move a file or folder of `temporary_path` to a key, replacing what exists."""
        publish(path, self.folder / key)

    def renew(self, key: str) -> bool:
        """Set a file's time to now; only its owner may."""
        try:
            os.utime(self.folder / key)
        except PermissionError:
            return False
        return True

    def remove(self, key: str) -> None:
        path = self.folder / key
        parent = key.rpartition("/")[0]
        if parent and self._status(parent) is None:
            return
        _remove(path)

    def temporary_path(self) -> Path:
        """Return an unused name, open to others unlike mkstemp's; raises OSError if only the reserve is left."""
        folder = self.folder / TEMPORARY
        folder.mkdir(parents=True, exist_ok=True)
        left, self._left = self._left, []
        for path in left:
            self.discard(path)
        free = shutil.disk_usage(folder).free
        if free < reserve_bytes(folder):
            reason = f"{os.strerror(errno.ENOSPC)}: the last {free / 2**20:.1f} MiB of the disk are kept for the queue"
            raise OSError(errno.ENOSPC, reason, str(folder))
        return folder / temporary_name()

    def discard(self, path: Path) -> None:
        """Remove what is at a path of `temporary_path`; if its disk is not mounted, when the next path is asked for."""
        with contextlib.suppress(OSError):
            if path.parent.is_dir():
                _remove(path)
            else:
                self._left.append(path)


def reserve_bytes(folder: Path) -> int:
    """Return the number of bytes that videos, photos and checkpoints leave free on the disk of a folder."""
    return min(32 * 2**20, shutil.disk_usage(folder).total // 32)


def _info(key: str, status: os.stat_result) -> FileInfo:
    return FileInfo(key=key, size=status.st_size, modified_at=datetime.fromtimestamp(status.st_mtime, UTC))


def _remove(path: Path) -> None:
    """Remove a file, or a folder also while others write into it or remove from it."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for attempt in range(REMOVE_ATTEMPTS):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:  # of a file in it, or of the folder itself
            pass
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or attempt == REMOVE_ATTEMPTS - 1:
                raise
        if not path.exists():
            return


def _unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def publish(source: Path, target: Path) -> None:
    """Flush a file or a folder of frames to disk, and rename it to `target` on the same disk, replacing what exists.

    What others have put into a folder of frames stays in it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for path in [source, *source.rglob("*")] if source.is_dir() else [source]:
        flush(path)
    aside = source.with_name(f"{source.name}.old")
    while True:
        if source.is_dir() and target.is_dir():
            # A folder cannot be replaced atomically, so the old one is moved aside just before.
            shutil.rmtree(aside, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):
                _link_others(target, source)
                target.rename(aside)
        try:
            source.replace(target)
            break
        except OSError as error:
            if error.errno == errno.EXDEV:
                raise OSError(errno.EXDEV, "its folders are on several disks", str(target.parent)) from error
            # Another process may replace the same folder at the same time.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    shutil.rmtree(aside, ignore_errors=True)
    flush(target.parent)


def _link_others(old: Path, new: Path) -> None:
    """Link everything but svdq's frames from a folder into the one that replaces it, which a kill cannot undo."""
    for path in old.iterdir():
        target = new / path.name
        if FRAME.fullmatch(path.name) or os.path.lexists(target):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, target, symlinks=True, copy_function=_link)
        else:
            _link(path, target)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # such as on exFAT, which has no links
        shutil.copyfile(source, target, follow_symlinks=False)


def flush(path: Path) -> None:
    """Have the disk write a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
