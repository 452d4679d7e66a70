"""Photos, videos and checkpoints in a folder or behind an fsspec URL by keys; files are complete."""

import contextlib
import errno
import hashlib
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import BinaryIO, Self
from urllib.parse import unquote, urlsplit

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.producer.files import sweep, temporary_name
from svdq.producer.settings import absolute, without_secrets, without_urls_secrets
from svdq.producer.storage.local import TEMPORARY, FileInfo, LocalFiles
from svdq.producer.storage.remote import RemoteFiles
from svdq.producer.threads import ordered_map, within

STAGING_PREFIX = "svdq-staging-"  # prefix of staging folders on this machine, for a remote storage
#: File that svdq writes at the root of a storage and in every folder of checkpoints. Nothing is pruned without it.
MARKER = ".svdq-storage"
_MARKER_TEXT = b"svdq keeps photos, videos and checkpoints here. `svdq prune` removes them only where this file is.\n"
#: The line of the marker with the id of the Redis database that has the jobs of the storage.
_DATABASE = re.compile(rb"^redis: (\w+)$", re.MULTILINE)
PROBE = "outputs/.svdq-probe"  # key of the file of `Storage.check_writable`
ANSWER_S = 20.0  # seconds that a command waits for the folder of a storage, which may be a share
INPUT_AGE = timedelta(days=1)  # of resubmitted photos, at most; `svdq prune` keeps twice that

CHECKPOINTS = "checkpoints"  # folder with a folder of checkpoints for each job
_SEGMENT = re.compile(r"(?!\.\.?$)[^/\\\x00-\x1f\x7f\ud800-\udfff]+")
_CHECKPOINT = re.compile(r"\d+\.safetensors|\.\d+-[0-9a-f]{8}")
_JOB_ID = re.compile(r"[0-9a-f]{20}")


def is_checkpoint_folder(name: str, files: Collection[str]) -> bool:
    """Return whether svdq created a folder below `checkpoints`; one that is half removed has no marker."""
    return MARKER in files or bool(_JOB_ID.fullmatch(name) and all(map(_CHECKPOINT.fullmatch, files)))


def is_input(key: str, data: bytes) -> bool:
    """Return whether a photo's content matches the hash in its key; the last frame of a job has none."""
    is_frame = _JOB_ID.fullmatch(key.removeprefix("inputs/").removesuffix(".png"))
    return bool(is_frame) or key.startswith(f"inputs/{hashlib.sha256(data).hexdigest()}.")


class Storage:
    """One storage; nothing is created before the first write.

    Raises InputError for unknown kinds, a missing plugin or invalid keys, UnavailableError if it cannot be used.
    """

    def __init__(self, url: str) -> None:
        self._url = (without_secrets(url) if "://" in url else url).rstrip("/")
        self._secrets: list[str] = []
        #: Whether the marker was there before the first write, or was written then; None until then.
        self._had_marker: bool | None = None
        self._is_claimed = False
        scheme, colon, rest = url.partition("://")
        if not colon or scheme in ("file", "local"):
            self._files: LocalFiles | RemoteFiles = LocalFiles(absolute(Path(rest if colon else url)))
            return
        self._files = RemoteFiles(url)
        with self._plain_errors():
            # Never shown: the password, and the query, which may contain tokens.
            parts = urlsplit(url)
            self._secrets = [text for text in (parts.password, unquote(parts.password or ""), parts.query) if text]
            self._files.connect()

    @classmethod
    def open_for_command(cls, url: str) -> Self:
        """Make it; raise an UnavailableError if its folder hangs. Of a bucket, each call has a limit."""
        storage = cls(url)
        if storage.folder is not None:
            try:
                within(ANSWER_S, storage.answers)
            except TimeoutError:
                raise UnavailableError(
                    f"The storage {storage.shown!r} has not answered for {ANSWER_S:.0f} s; check its mount and the "
                    "network, or set SVDQ_STORAGE or --storage to another."
                ) from None
        return storage

    def answers(self) -> bool:
        """Return whether it can be asked; waits as long as it, or one of its uploads, hangs."""
        try:
            self.exists(MARKER)
        except UnavailableError:
            return False
        while isinstance(self._files, RemoteFiles) and self._files.uploads.is_stalled:
            time.sleep(0.5)
        return True

    def put_input(self, data: bytes, extension: str) -> str:
        """Store a photo under the hash of its content unless it exists, and return its key."""
        key = f"inputs/{hashlib.sha256(data).hexdigest()}.{extension}"
        if not self.has_input(key, len(data)):
            self.write_bytes(key, data)
        return key

    def has_input(self, key: str, num_bytes: int | None = None) -> bool:
        """Return whether a photo exists, undamaged as far as is quick to see, and keep it for at least a day."""
        with self._access(key):
            try:
                entry = self._files.entry(key)
                if num_bytes not in (None, entry.size):
                    return False
                if isinstance(self._files, LocalFiles) and not is_input(key, self._files.read(key)):
                    return False
                return self._files.renew(key) or datetime.now(UTC) - entry.modified_at < INPUT_AGE
            except FileNotFoundError:
                return False

    def read_input(self, key: str) -> bytes:
        """Read a photo; if it is damaged, remove it so that it can be stored again, and raise InputError."""
        for _ in range(2):  # another process may be storing it again
            data = self.read(key)
            if is_input(key, data):
                return data
        with contextlib.suppress(UnavailableError):
            self.remove(key)
        raise InputError(f"The photo {key} was damaged in the storage; submit it again, then `svdq retry` the job.")

    def read(self, key: str) -> bytes:
        """Read a file."""
        with self._access(key):
            return self._files.read(key)

    def open(self, key: str) -> BinaryIO:
        """Open a file for reading and seeking."""
        with self._access(key):
            return self._files.open(key)

    def read_many(self, keys: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Read small files, in any order; missing files are left out."""

        def read(key: str) -> tuple[str, bytes] | None:
            with contextlib.suppress(FileNotFoundError):
                return key, self._files.read(key)
            return None

        with self._plain_errors():
            yield from filter(None, ordered_map(read, keys, num_threads=self.num_threads))

    def copy_out(self, key: str, path: Path) -> None:
        """Copy a file to a local path."""
        with self._access(key):
            self._files.copy_out(key, path)

    def exists(self, key: str) -> bool:
        """Return whether a file or a folder with this key exists."""
        with self._access(key):
            return self._files.exists(key)

    def entry(self, key: str) -> FileInfo | None:
        """Return the entry of a file, or None if it does not exist."""
        with self._access(key):
            try:
                return self._files.entry(key)
            except FileNotFoundError:
                return None

    def entries(self, key: str) -> Iterator[FileInfo]:
        """Yield the entry of every file below a key, at any depth and in any order; skip files without a valid key."""
        with self._access(key):
            for entry in self._files.entries(key):
                if all(map(_SEGMENT.fullmatch, entry.key.split("/"))):
                    yield entry

    def publish(self, local_path: Path, key: str) -> None:
        """Move a finished file or folder in a `staging` folder to a key, replacing what exists."""
        with self._access(key):
            self._mark()
            self._files.publish(local_path, key)

    def write_text(self, key: str, text: str) -> None:
        """Write text, replacing an existing file."""
        self.write_bytes(key, text.encode())

    def write_bytes(self, key: str, data: bytes) -> None:
        """Write bytes, replacing an existing file."""
        with self._access(key):
            self._mark()
            self._files.write(key, data)

    def names(self, key: str) -> list[str]:
        """List the names in a folder; none if the key does not exist."""
        with self._access(key):
            return self._files.names(key)

    def remove(self, key: str) -> None:
        """Remove a file or a folder if it exists."""
        with self._access(key):
            self._files.remove(key)

    def remove_checkpoints(self, job_id: str) -> None:
        """Remove the checkpoints of a job, and no folder that svdq did not make."""
        folder = f"{CHECKPOINTS}/{job_id}"
        if is_checkpoint_folder(job_id, self.names(folder)):
            self.remove(folder)

    def check_writable(self) -> None:
        """Write and remove a small file in `outputs`; raises UnavailableError if the storage is not writable."""
        self.write_bytes(PROBE, b"")
        self.remove(PROBE)

    def sweep(self) -> None:
        """Remove the partial files of killed processes on this machine; only files with svdq's own temporary names."""
        if self.folder:
            if self.is_marked:
                sweep((self.folder / TEMPORARY).glob("*"))
        else:
            sweep(Path(tempfile.gettempdir()).glob(f"{STAGING_PREFIX}*"), STAGING_PREFIX)

    @property
    def is_marked(self) -> bool:
        """Return whether svdq has written here before, according to `MARKER`."""
        return self.exists(MARKER)

    def claim(self, read_id: Callable[[], str]) -> None:
        """Name the Redis database that has the jobs of this storage in its marker, unless one is named."""
        if self._is_claimed:
            return
        with self._access(MARKER), contextlib.suppress(PermissionError):  # as in `_mark`
            self._mark()
            if self.database_id is None:
                self._files.write(MARKER, _MARKER_TEXT + f"redis: {read_id()}\n".encode())
        self._is_claimed = True

    @property
    def database_id(self) -> str | None:
        """The id of the Redis database that the marker names, if any."""
        with self._access(MARKER), contextlib.suppress(FileNotFoundError):
            found = _DATABASE.search(self._files.read(MARKER))
            return found[1].decode() if found else None
        return None

    @property
    def num_threads(self) -> int:
        """Number of threads that may use it at a time."""
        return self._files.num_threads

    @property
    def folder(self) -> Path | None:
        """The local folder of the storage, or None if it is remote."""
        return self._files.folder if isinstance(self._files, LocalFiles) else None

    @property
    def shown(self) -> str:
        """The folder, or the URL without secrets."""
        return str(self.folder or self._url)

    def location(self, key: str) -> str:
        """Return the place of a key for people: an absolute path or a URL without secrets."""
        self._check(key)
        return f"{self.shown}/{key}"

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """Create a temporary folder for files to `publish`; it is removed at the end."""
        with self._plain_errors():
            if isinstance(self._files, LocalFiles):
                self._mark()
                path = self._files.temporary_path()
                path.mkdir()
            else:
                path = Path(tempfile.gettempdir(), temporary_name(STAGING_PREFIX))
                path.mkdir(mode=0o700)
        try:
            yield path
        finally:
            if isinstance(self._files, LocalFiles):
                self._files.discard(path)
            else:
                shutil.rmtree(path, ignore_errors=True)

    def _mark(self) -> None:
        """Write the marker before the first file; continue without it if only subfolders are writable.

        Raises FileNotFoundError if it is gone from a local folder, whose disk may have been unmounted.
        """
        if self._had_marker is None:
            try:
                if not self._files.exists(MARKER):
                    self._files.write(MARKER, _MARKER_TEXT)
                self._had_marker = True
            except PermissionError:
                self._had_marker = False
        elif self._had_marker and self.folder and not self._files.exists(MARKER):
            reason = "moved, removed or not mounted: there is no file"
            raise FileNotFoundError(errno.ENOENT, reason, str(self.folder / MARKER))

    def _check(self, key: str) -> None:
        if not all(_SEGMENT.fullmatch(segment) for segment in key.split("/")) or "://" in key:
            raise InputError(f"{key!r} is not a storage key; keys look like inputs/photo.jpg, without '..'.")

    def _access(self, key: str) -> contextlib.AbstractContextManager[None]:
        """Check a key, and convert the errors of a block that uses it."""
        self._check(key)
        return self._plain_errors()

    @contextlib.contextmanager
    def _plain_errors(self) -> Iterator[None]:
        try:
            yield
        except InputError:
            raise
        except Exception as error:
            # fsspec's backends raise types without a common base.
            if isinstance(self._files, LocalFiles):
                if not isinstance(error, OSError):
                    raise
            elif not isinstance(error, FileNotFoundError):
                self._files.connected = None  # a failed connection may not recover
            reason, name = getattr(error, "strerror", None), getattr(error, "filename", None)
            reason = reason or self._without_secrets(str(error)).rstrip(".") or type(error).__name__
            file = f" at {self._without_secrets(str(name))!r}" if name else ""
            raise UnavailableError(
                f"The storage {self.shown!r} cannot be used ({reason}{file}); check that it is there, "
                "may be written and has room, or set SVDQ_STORAGE or --storage to another."
            ) from (None if self._secrets else error)

    def _without_secrets(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return " ".join(without_urls_secrets(text).split())
