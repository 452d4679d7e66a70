"""Bodies of requests: limited in size and time before they are parsed, and large ones kept on disk, not in memory.

A large part is in a file without a name, which the system removes however the process ends.
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from tempfile import SpooledTemporaryFile
from typing import Any, BinaryIO, cast
from urllib.parse import parse_qsl

from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from svdq.cli.serve.api_errors import ApiError
from svdq.cli.serve.fields import PHOTOS, decode_data_url, flatten, two_photos
from svdq.producer.submitting.photos import MAX_FOREIGN_BYTES

#: Bytes of a body without a photo, and of the text fields of one with a photo.
MAX_SMALL_BYTES = 1 << 20
#: Bytes of a JSON body with a photo in it, which is parsed in memory.
MAX_JSON_BYTES = 64 << 20
#: Bytes of all text fields of a form, which are kept in memory; one may be a photo as a data URL.
MAX_TEXT_BYTES = 8 << 20
#: Bytes per pixel of the largest photo that may be uploaded: 8-bit RGBA without compression.
BYTES_PER_PIXEL = 4
#: Bytes of a photo that are kept in memory; what is more goes to disk.
SPOOLED_BYTES = 64 * 1024
#: Bytes per second at which a body must arrive on average, after the first seconds.
MIN_BYTES_PER_S = 4096
GRACE_S = 30.0
#: JSON bodies that are parsed at a time; one takes up to three times its size of memory.
JSON_TOGETHER = 1
MAX_FIELDS = 64

#: Key of the `Body` in the scope of a request.
_KEY = "svdq.body"


class Body:
    """The `receive` of one request, with limits."""

    def __init__(self, receive: Receive, content_length: str) -> None:
        self._receive = receive
        self._content_length = int(content_length) if content_length.isdecimal() else 0
        self._begun_at: float | None = None
        self._received = 0
        self._is_complete = False
        #: Largest number of bytes; a view that takes photos raises it.
        self.max_bytes = MAX_SMALL_BYTES
        #: What to do about a larger one.
        self.remedy = "make the photo smaller"

    async def __call__(self) -> Message:
        """Receive the next message.

        Raises:
            ApiError: the body is too large or arrives too slowly.
        """
        if self._is_complete:
            return await self._receive()
        now = time.monotonic()
        if self._begun_at is None:
            self._begun_at = now
            self._check(self._content_length)
        due_at = self._begun_at + GRACE_S + self._received / MIN_BYTES_PER_S
        try:
            async with asyncio.timeout(max(0.0, due_at - now)):
                message = await self._receive()
        except TimeoutError as error:
            raise ApiError(
                408, "The request arrives too slowly; send it again.", code="too_slow", headers={"Connection": "close"}
            ) from error
        self._received += len(message.get("body", b""))
        self._check(self._received)
        self._is_complete = not message.get("more_body", False)
        return message

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self.max_bytes:
            raise ApiError(
                413,
                f"The request has more than the {self.max_bytes:,} bytes that are allowed here; {self.remedy}.",
                code="too_large",
                headers={"Connection": "close"},
            )


class Bodies:
    """Middleware that limits bodies, and refuses forms that are not in UTF-8."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request, its body limited."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            kind, options = parse_options_header(headers.get("content-type"))
            charset = options.get(b"charset", b"utf-8").decode("latin-1")
            if kind == b"multipart/form-data" and charset.lower() not in ("utf-8", "utf8"):
                # Starlette decodes as asked, and some codecs take quadratic time.
                message = f"The charset {charset[:40]!r} of a form cannot be read; send UTF-8."
                await ApiError(400, message, code="bad_form").response()(scope, receive, send)
                return
            receive = Body(receive, headers.get("content-length", ""))
            scope[_KEY] = receive
        await self._app(scope, receive, send)


@dataclass
class Form:
    """What a request has sent."""

    #: Fields in their order; of JSON with values of any type.
    fields: list[tuple[str, Any]] = field(default_factory=list)
    #: The file, and its name as the client has it.
    file: BinaryIO | None = None
    file_name: str = ""

    def close(self) -> None:
        """Remove the file."""
        if self.file is not None:
            self.file.close()


class Reader:
    """Reads the forms of all requests."""

    def __init__(self, max_pixels: int) -> None:
        photo_bytes = min(max(max_pixels * BYTES_PER_PIXEL, MAX_SMALL_BYTES), MAX_FOREIGN_BYTES)
        self._max_bytes = photo_bytes + MAX_SMALL_BYTES
        self._documents = asyncio.Semaphore(JSON_TOGETHER)

    async def read(self, request: Request) -> Form:
        """Read a form with at most one photo, or a JSON object; the caller closes it.

        Raises:
            ApiError: the body is neither, is too large or arrives too slowly.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        body: Body = request.scope[_KEY]
        if kind == "multipart/form-data":
            body.max_bytes, body.remedy = self._max_bytes, "make the photo smaller or raise SVDQ_MAX_PIXELS"
            return await self._read_multipart(request)
        body.remedy = "send the photo as multipart/form-data"
        if kind in ("application/json", ""):
            body.max_bytes = min(self._max_bytes, MAX_JSON_BYTES)
            return await self._read_text(request, _parse_json)
        if kind == "application/x-www-form-urlencoded":
            body.max_bytes = min(self._max_bytes, MAX_TEXT_BYTES)
            return await self._read_text(request, _parse_urlencoded)
        raise ApiError(
            400,
            f"A body of type {kind[:80]!r} cannot be read; send multipart/form-data or application/json.",
            code="unknown_content_type",
        )

    async def _read_multipart(self, request: Request) -> Form:
        try:
            parts = await _Parser(
                request.headers,
                request.stream(),
                max_files=len(PHOTOS),
                max_fields=MAX_FIELDS,
                max_part_size=MAX_TEXT_BYTES,
            ).parse()
        except MultiPartException as error:
            message = error.message.rstrip(".")
            raise ApiError(400, f"The form cannot be read: {message}.", code="bad_form") from error
        try:
            return await asyncio.to_thread(lambda: _with_photo(_form_of(parts)))
        except ApiError:
            await parts.close()
            raise

    async def _read_text(self, request: Request, parse: Callable[[bytes], Form]) -> Form:
        with SpooledTemporaryFile(max_size=SPOOLED_BYTES) as file:
            async for chunk in request.stream():
                file.write(chunk)
            file.seek(0)
            async with self._documents:
                return await asyncio.to_thread(lambda: _with_photo(parse(file.read())))


class _Parser(MultiPartParser):
    """Keeps less of each file and of all fields in memory than Starlette does."""

    spool_max_size = SPOOLED_BYTES
    _num_text_bytes = 0

    def on_headers_finished(self) -> None:
        """Begin a part; some clients send a photo without a filename, as if it were a text."""
        part = self._current_part
        options = parse_options_header(part.content_disposition)[1]
        if options.get(b"name", b"").decode(errors="replace") in PHOTOS and b"filename" not in options:
            part.content_disposition = (part.content_disposition or b"") + b'; filename=""'
        super().on_headers_finished()

    def on_part_end(self) -> None:
        """End a part; Starlette reads text that is not UTF-8 as Latin-1, whatever it is."""
        if self._current_part.file is None:
            try:
                self._current_part.data.decode()
            except UnicodeDecodeError as error:
                name = self._current_part.field_name
                raise MultiPartException(f"Its field {name[:40]!r} is not in UTF-8") from error
        super().on_part_end()

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        """Take bytes of a part."""
        if self._current_part.file is None:
            self._num_text_bytes += end - start
            if self._num_text_bytes > MAX_TEXT_BYTES:
                raise MultiPartException(f"Its fields have more than {MAX_TEXT_BYTES >> 20} MiB")
        super().on_part_data(data, start, end)


def _form_of(parts: FormData) -> Form:
    """Return the fields and the photo of a form; raises ApiError."""
    form = Form()
    for key, value in parts.multi_items():
        name = key.removesuffix("[]")
        if not isinstance(value, UploadFile):
            form.fields.append((key, value))
        elif name not in PHOTOS:
            raise ApiError(400, f"There is no file {name[:80]!r}; the photo is {PHOTOS[0]}.", param=name)
        elif not value.filename and (text := _text_of(value)) is not None:
            form.fields.append((name, text))
        elif form.file is not None:
            raise two_photos()
        else:
            form.file, form.file_name = value.file, value.filename or ""
    return form


def _text_of(part: UploadFile) -> str | None:
    """Return a part that is a data URL, an address, an object or nothing; None if it is the bytes of a photo."""
    head = part.file.read(5)
    part.file.seek(0)
    if head and not head.startswith((b"data:", b"http", b"null", b"None", b"{", b"[")):
        return None
    if (part.size or 0) > MAX_TEXT_BYTES:
        raise ApiError(413, f"A photo in a text has {MAX_TEXT_BYTES >> 20} MiB at most; send a file.", code="too_large")
    with part.file:
        return part.file.read().decode(errors="replace")


def _parse_json(data: bytes) -> Form:
    """Parse an object; raises ApiError."""
    try:
        document = json.loads(data or b"{}")
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The body is not JSON ({error}).", code="bad_json") from error
    if not isinstance(document, dict):
        raise ApiError(400, "The body is not a JSON object.", code="bad_json")
    return Form(fields=list(document.items()))


def _parse_urlencoded(data: bytes) -> Form:
    """Parse a form without files; raises ApiError."""
    try:
        return Form(fields=list(parse_qsl(data.decode(), keep_blank_values=True, max_num_fields=MAX_FIELDS)))
    except ValueError as error:
        raise ApiError(400, f"The form cannot be read ({error}).", code="bad_form") from error


def _with_photo(form: Form) -> Form:
    """Merge the fields of a form; a photo in them goes to disk, since the request may wait for others.

    Raises:
        ApiError: a field cannot be read, or there are two photos.
    """
    try:
        form.fields, url = flatten(form.fields)
        if url:
            if form.file is not None:
                raise two_photos()
            data = decode_data_url(url)
            form.file = cast(BinaryIO, SpooledTemporaryFile(max_size=SPOOLED_BYTES))  # noqa: SIM115 - Form closes it
            form.file.write(data)
    except ApiError:
        form.close()
        raise
    return form
