"""Storage in an object store (S3, Google, Azure) through fsspec, which shows an object only when it is complete."""

import contextlib
import errno
import mimetypes
import os
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, cast

from svdq.pipeline.errors import InputError, how_to_install
from svdq.producer.storage.local import FRAME, FileInfo
from svdq.producer.storage.upload import ATTEMPTS, SILENT_S, SLOWEST_B_S, Upload, Uploads, make_socket, put
from svdq.producer.text import as_utc
from svdq.producer.threads import ordered_map

#: Protocols of object stores, which have no folders; `memory` is for tests.
OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"})
S3 = ("s3", "s3a")
#: The extra that installs the plugin of a protocol.
EXTRAS = {
    **dict.fromkeys(S3, "s3"),
    **dict.fromkeys(("gs", "gcs"), "gcs"),
    **dict.fromkeys(("az", "abfs", "abfss"), "azure"),
}
#: Keys of the last write in the metadata of fsspec's backends; some have only `created`.
_TIMES = ("LastModified", "last_modified", "updated", "modified", "created")
#: Seconds for connecting to S3; with SILENT_S and ATTEMPTS of each call commands end in half a minute, and workers,
#: which go on trying, say so. By default it takes minutes, in two layers of retries.
CONNECT_S = 4.0
LARGE_BYTES = 100 << 20  # of a file that is uploaded in parts
AT_ONCE = 64  # number of files read or removed in parallel, to hide latency


class RemoteFiles:
    """Files by key through fsspec, with the methods of `LocalFiles`. A folder is written file by file.

    Raises any error of the backend, FileNotFoundError if a key does not exist, and InputError without the plugin.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._protocol = url.partition("://")[0]
        self.connected: Any = None  # the next call connects
        self._root = ""
        self._uploading: Any = None
        self.uploads = Uploads()

    def open(self, key: str) -> BinaryIO:
        # Transferred in parts, as it is read.
        return cast(BinaryIO, self._fs.open(self._path(key), "rb", block_size=1 << 20, cache_type="readahead"))

    def read(self, key: str) -> bytes:
        return bytes(self._fs.cat_file(self._path(key)))

    def copy_out(self, key: str, path: Path) -> None:
        self._fs.get_file(self._path(key), str(path))

    def exists(self, key: str) -> bool:
        return bool(self._fresh().exists(self._path(key)))

    def entry(self, key: str) -> FileInfo:
        return self._entry(self._fresh().info(self._path(key)))

    def entries(self, key: str) -> Iterator[FileInfo]:
        try:
            found = self._fresh().find(self._path(key), detail=True)
        except FileNotFoundError:
            found = {}
        if not found and self._protocol != "memory":
            bucket = self._root.partition("/")[0]
            try:
                self._fs.info(bucket)
            except FileNotFoundError as error:
                raise FileNotFoundError(f"there is no bucket {bucket!r}") from error
        for info in found.values():
            if info["type"] == "file":
                yield self._entry(info)

    def names(self, key: str) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return [path.rstrip("/").rpartition("/")[2] for path in self._fresh().ls(self._path(key), detail=False)]
        return []

    def write(self, key: str, data: bytes) -> None:
        if self._protocol in S3:
            self._upload(self._path(key), data)
        else:
            self._fs.pipe_file(self._path(key), data)

    def publish(self, path: Path, key: str) -> None:
        sources, target = [path], self._path(key)
        if path.is_dir():
            self._remove(found for found in self._find(key) if FRAME.fullmatch(found.removeprefix(f"{target}/")))
            sources = [file for file in path.rglob("*") if file.is_file()]
        # File by file, since fsspec's backends differ in how they upload a folder.
        targets = [f"{target}/{file.relative_to(path).as_posix()}" if file != path else target for file in sources]
        if self._protocol in S3:
            uploads = ordered_map(self._upload_file, zip(sources, targets, strict=True), num_threads=self.num_threads)
            deque(uploads, maxlen=0)
        else:
            self._fs.put([str(file) for file in sources], targets)

    def _upload_file(self, names: tuple[Path, str]) -> None:
        source, target = names
        if source.stat().st_size > LARGE_BYTES:
            self._uploader().put_file(str(source), target)  # in parts, each of which is limited
            return
        kind, _ = mimetypes.guess_type(source)
        self._upload(target, source.read_bytes(), **({"ContentType": kind} if kind else {}))

    def _upload(self, target: str, data: bytes, **options: str) -> None:
        import fsspec.asyn

        bucket, key, _ = self._fs.split_path(target)
        upload = Upload(bucket, key, data, **options)
        with self.uploads.of(upload):
            fsspec.asyn.sync(self._fs.loop, put, self._uploader(), self._fs, upload)

    def _uploader(self) -> Any:
        """Return a file system of its own, whose answers `put` waits for itself."""
        fs = self._fs
        if self._uploading is None or self._uploading[0] is not fs:  # a new one after an error, as of `connected`
            self._uploading = fs, self._open(_limits(self._protocol, LARGE_BYTES / SLOWEST_B_S, 1))[0]
        return self._uploading[1]

    def renew(self, key: str) -> bool:
        return False  # the time of an object changes only with its content

    def remove(self, key: str) -> None:
        """Remove a file or a folder."""
        self._remove(self._find(key))

    def _find(self, key: str) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            found: list[str] = self._fresh().find(self._path(key))
            return found
        return []

    def _remove(self, paths: Iterable[str]) -> None:
        """Remove files. fsspec's `rm` would treat `[`, `*` and `?` in a name as a pattern."""
        fs = self._fs

        def remove(path: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                fs.rm_file(path)

        deque(ordered_map(remove, paths, num_threads=self.num_threads), maxlen=0)

    @property
    def num_threads(self) -> int:
        return AT_ONCE if self._fs.async_impl else 1

    @property
    def _fs(self) -> Any:
        fs = self.connected  # once: another thread may reset it
        return fs if fs is not None else self.connect()

    def _fresh(self) -> Any:
        """Clear fsspec's cache of folders: other processes write, too."""
        fs = self._fs
        fs.invalidate_cache()
        return fs

    def connect(self) -> Any:
        """Open the storage, as its first use does; return fsspec's file system."""
        if self._protocol not in OBJECT_STORES:
            raise InputError(
                f"There is no kind of storage {self._protocol}://; set SVDQ_STORAGE or --storage to a folder, or to "
                "s3://bucket/prefix, gs://bucket/prefix or az://container/prefix."
            )
        try:
            fs, root = self._open(_limits(self._protocol, SILENT_S, ATTEMPTS))
        except ImportError as error:
            advice = how_to_install(EXTRAS[self._protocol])
            raise InputError(
                f"A storage at {self._protocol}:// needs a package that is not installed; {advice}."
            ) from error
        self.connected, self._root = fs, str(root).rstrip("/")
        return fs

    def _open(self, limits: dict[str, Any]) -> tuple[Any, str]:
        import fsspec

        fs, root = fsspec.core.url_to_fs(self._url, skip_instance_cache=True, **limits)
        if self._protocol in S3:
            fs.retries = 1  # botocore tries again itself
        return fs, root

    def _path(self, key: str) -> str:
        path = f"{self._root}/{key}"
        if len(path.partition("/")[2].encode()) > 1024:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), key)
        return path

    def _entry(self, info: dict[str, Any]) -> FileInfo:
        key = info["name"].lstrip("/").removeprefix(self._root.lstrip("/")).strip("/")
        written = next((info[name] for name in _TIMES if info.get(name)), None)
        if isinstance(written, str):
            written = datetime.fromisoformat(written)
        if isinstance(written, int | float):
            written = datetime.fromtimestamp(written, UTC)
        if not isinstance(written, datetime):
            raise ValueError("the storage does not report when its files were written")
        return FileInfo(key=key, size=int(info["size"] or 0), modified_at=as_utc(written))


def _limits(protocol: str, silent_s: float, attempts: int) -> dict[str, Any]:
    """Return the limits of calls as options of fsspec's backend; only S3's is known to wait for minutes."""
    if protocol not in S3:
        return {}
    limits = {"connect_timeout": CONNECT_S, "read_timeout": silent_s, "connector_args": {"socket_factory": make_socket}}
    return {"config_kwargs": limits | {"retries": {"total_max_attempts": attempts, "mode": "standard"}}}
