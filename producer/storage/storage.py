"""Where photos, videos and checkpoints lie: one folder or one fsspec URL, addressed by keys such as `outputs/…/x.mp4`.

What stands under its key is whole, in a folder as in an object store. Knows no jobs and no Redis.
"""

import contextlib
import hashlib
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import unquote, urlsplit

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.producer.settings import without_secrets
from svdq.producer.storage.files import Entry, Files
from svdq.producer.storage.folder_files import TEMPORARY, FolderFiles
from svdq.producer.storage.remote_files import RemoteFiles
from svdq.producer.storage.temporary import sweep, temporary_name

#: Start of the names of staging folders on this machine, for a storage that is elsewhere.
STAGING_PREFIX = "svdq-staging-"
#: File that svdq writes at the root of a storage, and in every folder of checkpoints. Without it nothing is pruned.
MARKER = ".svdq-storage"
_MARKER_TEXT = b"svdq keeps photos, videos and checkpoints here. `svdq prune` removes them only where this file is.\n"
#: Key of the file by which a worker finds whether a storage can be written.
PROBE = "outputs/.svdq-probe"
#: A photo that was submitted again counts as younger than this; `svdq prune` keeps twice as old ones.
INPUT_AGE = timedelta(days=1)

_SEGMENT = re.compile(r"(?!\.\.?$)[^/\\\x00-\x1f\x7f\ud800-\udfff]+")
_CHECKPOINT = re.compile(r"\d+\.safetensors|\.\d+-[0-9a-f]{8}")
_OLD_CHECKPOINTS = re.compile(r"[0-9a-f]{20}")


def is_checkpoint_folder(name: str, files: Collection[str]) -> bool:
    """Whether svdq has made a folder under `checkpoints`, so that it may be removed.

    Earlier versions wrote no marker; their folders have a job's id for a name and hold nothing but checkpoints.
    """
    return MARKER in files or bool(_OLD_CHECKPOINTS.fullmatch(name) and all(map(_CHECKPOINT.fullmatch, files)))


def is_input(key: str, data: bytes) -> bool:
    """Whether a photo has the content that its key is named after."""
    return key.startswith(f"inputs/{hashlib.sha256(data).hexdigest()}.")


class Storage:
    """One storage; nothing is created before the first write.

    Raises:
        InputError: from the constructor, when there is no such kind of storage or its plugin is not installed; from
            every method that takes a key, when it is not one.
        UnavailableError: from every method, when the storage cannot be reached or written.
    """

    def __init__(self, url: str) -> None:
        self._url = without_secrets(url).rstrip("/")
        self._secrets: list[str] = []
        self._files: Files
        #: One of the two is what `_files` is.
        self._folder: FolderFiles | None = None
        self._remote: RemoteFiles | None = None
        #: Whether the marker is known to be there, or was tried to be written.
        self._has_marked = False
        scheme, colon, rest = url.partition("://")
        if not colon or scheme in ("file", "local"):
            self._files = self._folder = FolderFiles(Path(rest if colon else url).expanduser().absolute())
            return
        with self._plain_errors():
            # What must never be shown: the password, and the query, where tokens live.
            parts = urlsplit(url)
            self._secrets = [
                secret for secret in (parts.password, unquote(parts.password or ""), parts.query) if secret
            ]
            self._files = self._remote = RemoteFiles(url)

    def put_input(self, data: bytes, extension: str) -> str:
        """Store a photo under the hash of its content, once, and return its key."""
        key = f"inputs/{hashlib.sha256(data).hexdigest()}.{extension}"
        if not self.has_input(key, len(data)):
            self.write_bytes(key, data)
        return key

    def has_input(self, key: str, num_bytes: int | None = None) -> bool:
        """Whether a photo is there undamaged, for a job that is about to be made: `svdq prune` keeps it for a day.

        Args:
            key: named after the hash of the photo, which is checked in a local folder.
            num_bytes: its size, which is checked everywhere.
        """
        self._check(key)
        with self._plain_errors():
            try:
                entry = self._files.entry(key)
                if num_bytes not in (None, entry.size) or (self._folder and not is_input(key, self._files.read(key))):
                    return False
                return self._files.renew(key) or datetime.now(UTC) - entry.modified_at < INPUT_AGE
            except FileNotFoundError:
                return False

    def read_input(self, key: str) -> bytes:
        """Read a photo; one whose content does not have the hash in its name is removed, so that it is stored anew.

        Raises:
            InputError: it was damaged.
        """
        for _ in range(2):  # it may just be stored anew
            data = self.read(key)
            if is_input(key, data):
                return data
        with contextlib.suppress(UnavailableError):
            self.remove(key)
        raise InputError(f"The photo {key} was damaged in the storage; submit it again, then `svdq retry` the job.")

    def read(self, key: str) -> bytes:
        """Read what stands under a key."""
        self._check(key)
        with self._plain_errors():
            return self._files.read(key)

    def read_many(self, keys: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Read small files, in any order; those that are not there are left out."""
        with self._plain_errors():
            yield from self._files.read_many(keys)

    def copy_out(self, key: str, path: Path) -> None:
        """Copy what stands under a key to a local path."""
        self._check(key)
        with self._plain_errors():
            self._files.copy_out(key, path)

    def exists(self, key: str) -> bool:
        """Whether something stands under a key."""
        self._check(key)
        with self._plain_errors():
            return self._files.exists(key)

    def entry(self, key: str) -> Entry | None:
        """Look at the file under a key; None when there is none."""
        self._check(key)
        with self._plain_errors():
            try:
                return self._files.entry(key)
            except FileNotFoundError:
                return None

    def entries(self, key: str) -> Iterator[Entry]:
        """Look at every file below a key, however deep, in any order; those that no key can name are left out."""
        self._check(key)
        with self._plain_errors():
            for entry in self._files.entries(key):
                if all(map(_SEGMENT.fullmatch, entry.key.split("/"))):
                    yield entry

    def publish(self, local_path: Path, key: str) -> None:
        """Put a finished file or folder under a key, in place of what is there.

        `local_path` is given up: it is moved when it lies on the storage's own file system, as `staging` does.
        """
        self._check(key)
        with self._plain_errors():
            self._mark()
            self._files.publish(local_path, key)

    def write_text(self, key: str, text: str) -> None:
        """Put a text under a key, in place of what is there."""
        self.write_bytes(key, text.encode())

    def write_bytes(self, key: str, data: bytes) -> None:
        """Put bytes under a key, in place of what is there."""
        self._check(key)
        with self._plain_errors():
            self._mark()
            self._files.write(key, data)

    def write_many(self, files: Mapping[str, bytes]) -> None:
        """Put bytes under many keys, in place of what is there; faster than one by one."""
        for key in files:
            self._check(key)
        with self._plain_errors():
            if files:
                self._mark()
            self._files.write_many(files)

    def names(self, key: str) -> list[str]:
        """List the names of what stands under a key as in a folder; none when nothing does."""
        self._check(key)
        with self._plain_errors():
            return self._files.names(key)

    def remove(self, key: str) -> None:
        """Remove what stands under a key, file or folder, if anything does."""
        self._check(key)
        with self._plain_errors():
            self._files.remove(key)

    def check_writable(self) -> None:
        """Write a small file to `outputs` and remove it, to tell one place that refuses from a whole storage that does.

        Raises:
            UnavailableError: nothing can be written to the storage at present.
        """
        self.write_bytes(PROBE, b"")
        self.remove(PROBE)

    def sweep(self) -> None:
        """Remove what killed processes have left half written here; only files with svdq's own temporary names."""
        if self._folder:
            if self.is_marked:
                sweep((self._folder.folder / TEMPORARY).glob("*"))
        else:
            sweep(Path(tempfile.gettempdir()).glob(f"{STAGING_PREFIX}*"), STAGING_PREFIX)

    @property
    def is_marked(self) -> bool:
        """Whether svdq has written here before; `MARKER` says so."""
        return self.exists(MARKER)

    @property
    def folder(self) -> Path | None:
        """The local folder that this is, or None when it is elsewhere."""
        return self._folder.folder if self._folder else None

    @property
    def shown(self) -> str:
        """What it is called in messages: a folder or a URL, without its secrets."""
        return str(self.folder or self._url)

    def location(self, key: str) -> str:
        """Where a person finds what stands under a key: an absolute path or a URL (without its secrets)."""
        self._check(key)
        return f"{self.shown}/{key}"

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """Make a fresh folder for files on their way to `publish`; it is removed at the end."""
        with self._plain_errors():
            if self._folder:
                self._mark()
                path = self._folder.temporary_path()
                path.mkdir()
            else:
                path = Path(tempfile.gettempdir(), temporary_name(STAGING_PREFIX))
                path.mkdir(mode=0o700)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def _mark(self) -> None:
        """Write the marker before the first file; where only subfolders may be written, go on without."""
        if not self._has_marked:
            with contextlib.suppress(PermissionError):
                if not self._files.exists(MARKER):
                    self._files.write(MARKER, _MARKER_TEXT)
            self._has_marked = True

    def _check(self, key: str) -> None:
        if not all(_SEGMENT.fullmatch(segment) for segment in key.split("/")) or "://" in key:
            raise InputError(f"{key!r} is not a storage key; keys look like inputs/photo.jpg, without '..'.")

    @contextlib.contextmanager
    def _plain_errors(self) -> Iterator[None]:
        try:
            yield
        except InputError:
            raise
        except OSError as error:
            self._forget_connection(error)
            reason = error.strerror or self._without_secrets(str(error)).rstrip(".") or type(error).__name__
            file = f" at {self._without_secrets(str(error.filename))!r}" if error.filename else ""
            raise UnavailableError(
                f"The storage {self.shown!r} cannot be used ({reason}{file}); check that it is there, "
                "may be written and has room, or set SVDQ_STORAGE or --storage to another."
            ) from error
        except Exception as error:
            if self._folder:
                raise
            self._forget_connection(error)
            # Each of fsspec's backends has exceptions of its own, and no base for them.
            reason = self._without_secrets(str(error)).rstrip(".") or type(error).__name__
            raise UnavailableError(
                f"The storage {self.shown!r} cannot be used ({reason}); check SVDQ_STORAGE or --storage."
            ) from (None if self._secrets else error)

    def _forget_connection(self, error: Exception) -> None:
        """Have the next call connect anew: a connection that has failed may not come back by itself."""
        if self._remote and not isinstance(error, FileNotFoundError):
            self._remote.reconnect()

    def _without_secrets(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return " ".join(text.split())
