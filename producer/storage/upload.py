"""Uploads to S3 that are watched: one without progress ends, and one that S3 has is not sent again."""

import asyncio
import contextlib
import hashlib
import io
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

logger = logging.getLogger(__name__)

SILENT_S = 10.0  # seconds without a byte from S3 after which it is asked whether it answers otherwise
STALLED_S = 25.0  # seconds after which bytes that S3 does not take, or does not acknowledge, end a connection
#: Bytes a second at least of whatever stands between: a proxy takes an upload at once and answers when it is through.
SLOWEST_B_S = 20e3
ATTEMPTS = 2
_DIGEST = "svdq-sha256"  # in the metadata of an object


class UnansweredError(ConnectionError):
    """S3 does not answer either whether it has an upload."""


class Upload(io.BytesIO):
    """An object on its way; when it was read last shows its progress."""

    def __init__(self, bucket: str, key: str, data: bytes, **options: str) -> None:
        super().__init__(data)
        self.place = {"Bucket": bucket, "Key": key}
        self.size = len(data)
        self.digest = hashlib.sha256(data).hexdigest()
        self.options = options | {"Metadata": {_DIGEST: self.digest}}
        self._read_at = self._further_at = time.monotonic()
        self._furthest = 0

    def read(self, size: int | None = -1, /) -> bytes:
        """Read, and note it."""
        data = super().read(size)
        self._read_at = time.monotonic()
        if self.tell() > self._furthest:  # not again what an earlier attempt has sent
            self._furthest, self._further_at = self.tell(), self._read_at
        return data

    def begin(self) -> None:
        """Begin an attempt."""
        self.seek(0)
        self._read_at = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds of this attempt since the last bytes were handed over."""
        return time.monotonic() - self._read_at

    @property
    def waits_s(self) -> float:
        """Seconds of all attempts without progress."""
        return time.monotonic() - self._further_at

    @property
    def limit_s(self) -> float:
        """Seconds of silence that are allowed at this point."""
        return SILENT_S + self.size / SLOWEST_B_S if self.tell() >= self.size else STALLED_S


async def put(client: Any, reader: Any, upload: Upload) -> None:
    """Send an object by `client`, which waits for answers without a limit; `reader` asks whether it has arrived."""
    for attempt in range(ATTEMPTS):
        upload.begin()
        try:
            await _attempt(client, reader, upload)
            return
        except (PermissionError, FileNotFoundError, UnansweredError):
            raise
        except Exception as error:
            if await _has(reader, upload):
                return
            if attempt == ATTEMPTS - 1:
                raise
            logger.warning("The upload of %r is tried again on a new connection: %s.", upload.place["Key"], error)


async def _attempt(client: Any, reader: Any, upload: Upload) -> None:
    task = asyncio.ensure_future(client._call_s3("put_object", **upload.place, **upload.options, Body=upload))
    asked_at = time.monotonic()
    try:
        while not (await asyncio.wait({task}, timeout=0.5))[0]:
            if upload.silent_s > upload.limit_s:
                raise ConnectionError(f"it has made no progress for {upload.silent_s:.0f} s")
            if min(upload.silent_s, time.monotonic() - asked_at) > SILENT_S:
                if await _has(reader, upload):
                    return
                asked_at = time.monotonic()
        task.result()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await asyncio.wait({task}, timeout=1)


async def _has(reader: Any, upload: Upload) -> bool:
    """Return whether S3 has the object, by size and hash; raises an UnansweredError if it does not answer."""
    try:
        found = await asyncio.wait_for(reader._call_s3("head_object", **upload.place), SILENT_S)
    except (FileNotFoundError, PermissionError):
        return False
    except Exception as error:
        reason = f"no answer for {SILENT_S:.0f} s" if isinstance(error, TimeoutError) else str(error)
        raise UnansweredError(reason) from error
    return bool(found["ContentLength"] == upload.size and found.get("Metadata", {}).get(_DIGEST) == upload.digest)


def make_socket(address: tuple[Any, ...]) -> socket.socket:
    """Make a socket whose connection ends when the other side acknowledges nothing or takes nothing more."""
    made = socket.socket(*address[:3])
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(STALLED_S * 1000))
    return made


class Uploads:
    """The uploads of a storage that are under way."""

    def __init__(self) -> None:
        self._under_way: set[Upload] = set()

    @contextlib.contextmanager
    def of(self, upload: Upload) -> Iterator[None]:
        """Count an upload as under way within a block."""
        self._under_way.add(upload)
        try:
            yield
        finally:
            self._under_way.discard(upload)

    @property
    def is_stalled(self) -> bool:
        """Whether one of them has made no progress for a while."""
        return any(upload.waits_s > 2 * SILENT_S for upload in [*self._under_way])
