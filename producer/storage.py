"""Where photos, videos and checkpoints lie: one folder or one fsspec URL, addressed by keys such as `outputs/…/x.mp4`.

What stands under its key is whole: everything is written under another name, flushed, and renamed into place.
Knows no jobs and no Redis. fsspec is imported only for what is not a local folder.
"""

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.producer.settings import without_secrets
from svdq.producer.temporary import sweep, temporary_name

#: Folder under the root for what is being written; a rename from here into place stays on one file system.
TEMPORARY = "tmp"

#: Start of the names of staging folders on this machine, for a storage that is elsewhere.
STAGING_PREFIX = "svdq-staging-"

_SEGMENT = re.compile(r"(?!\.\.?$)[^/\\\x00-\x1f\x7f]+")


class Storage:
    """One storage; nothing is created before the first write.

    Raises:
        UnavailableError: from every method, when the storage cannot be reached or written.
        InputError: from every method that takes a key, when it is not one.
    """

    def __init__(self, url: str) -> None:
        self._url = without_secrets(url).rstrip("/")
        self._folder: Path | None = None
        self._remote: Any = None
        if "://" not in url or url.startswith("file://"):
            self._folder = Path(url.removeprefix("file://")).expanduser().absolute()
            return
        self._secrets: list[str] = []
        with self._plain_errors():
            # What must never be shown: the password, and the query, where tokens live.
            parts = urlsplit(url)
            self._secrets = [
                secret for secret in (parts.password, unquote(parts.password or ""), parts.query) if secret
            ]

            import fsspec

            self._remote, self._root = fsspec.core.url_to_fs(url)

    def put_input(self, data: bytes, extension: str) -> str:
        """Store a photo under the hash of its content, once, and return its key."""
        key = f"inputs/{hashlib.sha256(data).hexdigest()}.{extension}"
        if not self.exists(key):
            self._write(key, data)
        return key

    def read(self, key: str) -> bytes:
        """Read what stands under a key."""
        self._check(key)
        with self._plain_errors():
            if self._folder:
                return (self._folder / key).read_bytes()
            return bytes(self._remote.cat_file(self._path(key)))

    def exists(self, key: str) -> bool:
        """Whether something stands under a key."""
        self._check(key)
        with self._plain_errors():
            return (self._folder / key).exists() if self._folder else bool(self._remote.exists(self._path(key)))

    def publish(self, local_path: Path, key: str) -> None:
        """Put a finished file or folder under a key, in place of what is there.

        `local_path` is given up: it is moved when it lies on the storage's own file system, as `staging` does.
        """
        self._check(key)
        with self._plain_errors():
            if self._folder:
                _publish_locally(local_path, self._folder / key, self._temporary_path())
            else:
                # Object stores show a file only when it is complete.
                self._remote.makedirs(self._path(key).rpartition("/")[0], exist_ok=True)
                if local_path.is_dir() and self._remote.exists(self._path(key)):
                    self._remote.rm(self._path(key), recursive=True)  # else fsspec would put it inside the old one
                self._remote.put(str(local_path), self._path(key), recursive=local_path.is_dir())

    def write_text(self, key: str, text: str) -> None:
        """Put a text under a key, in place of what is there."""
        self._check(key)
        self._write(key, text.encode())

    def write_bytes(self, key: str, data: bytes) -> None:
        """Put bytes under a key, in place of what is there."""
        self._check(key)
        self._write(key, data)

    def names(self, key: str) -> list[str]:
        """List the names of what stands under a key as in a folder; none when nothing does."""
        self._check(key)
        with self._plain_errors(), contextlib.suppress(FileNotFoundError):
            if self._folder:
                return os.listdir(self._folder / key)
            self._remote.invalidate_cache()  # other processes write, too
            return [path.rstrip("/").rpartition("/")[2] for path in self._remote.ls(self._path(key), detail=False)]
        return []

    def remove(self, key: str) -> None:
        """Remove what stands under a key, file or folder, if anything does."""
        self._check(key)
        with self._plain_errors(), contextlib.suppress(FileNotFoundError):
            if not self._folder:
                self._remote.rm(self._path(key), recursive=True)
            elif (self._folder / key).is_dir():
                shutil.rmtree(self._folder / key)
            else:
                (self._folder / key).unlink()

    def sweep(self) -> None:
        """Remove what processes that were killed have left half written: theirs by name, or older than a day."""
        if self._folder:
            sweep((self._folder / TEMPORARY).glob("*"))
        else:
            sweep(Path(tempfile.gettempdir()).glob(f"{STAGING_PREFIX}*"), STAGING_PREFIX)

    @property
    def folder(self) -> Path | None:
        """The local folder that this is, or None when it is elsewhere."""
        return self._folder

    def location(self, key: str) -> str:
        """Where a person finds what stands under a key: an absolute path or a URL (without its secrets)."""
        self._check(key)
        return str(self._folder / key) if self._folder else f"{self._url}/{key}"

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """Make a fresh folder for files on their way to `publish`; it is removed at the end."""
        with self._plain_errors():
            if self._folder:
                path = self._temporary_path()
                path.mkdir()
            else:
                path = Path(tempfile.gettempdir(), temporary_name(STAGING_PREFIX))
                path.mkdir(mode=0o700)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def _check(self, key: str) -> None:
        if not all(_SEGMENT.fullmatch(segment) for segment in key.split("/")) or "://" in key:
            raise InputError(f"{key!r} is not a storage key; keys look like inputs/photo.jpg, without '..'.")

    def _path(self, key: str) -> str:
        return f"{str(self._root).rstrip('/')}/{key}"

    def _write(self, key: str, data: bytes) -> None:
        with self._plain_errors():
            if self._folder:
                temporary = self._temporary_path()
                try:
                    temporary.write_bytes(data)
                    _publish_locally(temporary, self._folder / key, temporary)
                finally:
                    temporary.unlink(missing_ok=True)  # a full disk must not get any fuller
            else:
                self._remote.makedirs(self._path(key).rpartition("/")[0], exist_ok=True)
                self._remote.pipe_file(self._path(key), data)

    def _temporary_path(self) -> Path:
        """Make up a fresh name. Not by mkstemp or mkdtemp: what they make is closed to others, and would stay so."""
        assert self._folder is not None
        folder = self._folder / TEMPORARY
        folder.mkdir(parents=True, exist_ok=True)
        return folder / temporary_name()

    @contextlib.contextmanager
    def _plain_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or self._without_secrets(str(error))
            file = f" at {self._without_secrets(str(error.filename))!r}" if error.filename else ""
            raise UnavailableError(
                f"The storage {self._shown()} cannot be used ({reason}{file}); check that it is there, "
                "may be written and has room, or set SVDQ_STORAGE or --storage to another."
            ) from error
        except Exception as error:
            if self._folder:
                raise
            # Each of fsspec's backends has exceptions of its own, and no base for them.
            raise UnavailableError(
                f"The storage {self._shown()} cannot be used ({self._without_secrets(str(error)).rstrip('.')}); "
                "check SVDQ_STORAGE or --storage."
            ) from (None if self._secrets else error)

    def _shown(self) -> str:
        return repr(str(self._folder) if self._folder else self._url)

    def _without_secrets(self, text: str) -> str:
        if not self._folder:
            for secret in self._secrets:
                text = text.replace(secret, "***")
        return " ".join(text.split())


def _publish_locally(source: Path, target: Path, temporary: Path) -> None:
    """Flush `source` to disk and rename it to `target`, by way of `temporary` when it is on another file system."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source != temporary and source.stat().st_dev != target.parent.stat().st_dev:
        if source.is_dir():
            shutil.copytree(source, temporary, copy_function=shutil.copyfile)
        else:
            shutil.copyfile(source, temporary)
        source = temporary
    for path in [source, *source.rglob("*")] if source.is_dir() else [source]:
        _flush(path)
    if source.is_dir() and target.exists():
        # A folder cannot be replaced in one step; the old one is set aside, whole, just before.
        aside = temporary.with_name(f"{temporary.name}.old")
        target.rename(aside)
        source.rename(target)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        source.replace(target)
    _flush(target.parent)


def _flush(path: Path) -> None:
    """Have the disk take what was written to a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
