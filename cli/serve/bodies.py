"""Bodies of requests: limited in size and time before they are parsed, and large ones kept on disk, not in memory.

A large part is in a file without a name, which the system removes however the process ends.
"""

import asyncio
import time
from dataclasses import dataclass, field
from tempfile import SpooledTemporaryFile
from typing import Any, BinaryIO, ClassVar, cast
from urllib.parse import unquote_to_bytes

from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.types import Message

from svdq.cli.serve.api_errors import RETRY, ApiError
from svdq.cli.serve.fields import LAST_PHOTO, PHOTO, PHOTOS, decode_data_url, flatten, parse_json, two_photos
from svdq.producer.submitting.photos import MAX_FOREIGN_BYTES

MAX_SMALL_BYTES = 256 << 10  # bytes of a body without a photo, of which there may be one on each connection
MAX_JSON_BYTES = 64 << 20  # bytes of a JSON body with a photo in it, which is parsed in memory
#: Bytes of all text fields of a form, which are kept in memory, as one may be a photo as a data URL; and of all forms
#: together, without what each may always have: SPOOLED_BYTES.
MAX_TEXT_BYTES = 8 << 20
MAX_TEXTS_BYTES = 64 << 20
BYTES_PER_PIXEL = 4  # bytes per pixel of the largest photo that may be uploaded: 8-bit RGBA without compression
SPOOLED_BYTES = 64 << 10  # bytes of a photo that are kept in memory; the rest goes to disk
#: Seconds in which a body must arrive, without a photo and with one.
SMALL_S = 30.0
PHOTO_S = 600.0
MAX_FIELDS = 64
URLENCODED = "application/x-www-form-urlencoded"  # what clients send of a form without a file
UNQUOTED_BYTES = 64 << 10  # bytes of such a form that are decoded at a time: each escape is an object in memory


def limited(
    request: Request, max_bytes: int = MAX_SMALL_BYTES, within_s: float = SMALL_S, remedy: str = "send less"
) -> Request:
    """Return a request whose reader raises ApiError for too large (`remedy` says what to do) or too slow bodies."""
    ends_at = time.monotonic() + within_s
    message = f"The request has more than the {max_bytes:,} bytes that are allowed here; {remedy}."
    too_large = ApiError(413, message, code="too_large", headers={"Connection": "close"})
    if int(request.headers.get("content-length", 0)) > max_bytes:
        raise too_large
    num_bytes = 0

    async def receive() -> Message:
        nonlocal num_bytes
        try:
            async with asyncio.timeout(ends_at - time.monotonic()):
                message = await request.receive()
        except TimeoutError as error:
            raise ApiError(
                408, "The request arrives too slowly; send it again.", code="too_slow", headers={"Connection": "close"}
            ) from error
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes:
            raise too_large
        return message

    return Request(request.scope, receive)


@dataclass
class Form:
    """The content of a request."""

    fields: list[tuple[str, Any]] = field(default_factory=list)  # in their order; of JSON with any values
    #: The photos by `PHOTO` and `LAST_PHOTO`, and the name of the first as the client has it.
    files: dict[str, BinaryIO] = field(default_factory=dict)
    file_name: str = ""

    def close(self) -> None:
        """Remove the files."""
        for file in self.files.values():
            file.close()


class FormReader:
    """Reads the forms of all requests."""

    def __init__(self, max_pixels: int) -> None:
        photo_bytes = min(max(max_pixels * BYTES_PER_PIXEL, MAX_SMALL_BYTES), MAX_FOREIGN_BYTES)
        self._max_bytes = 2 * photo_bytes + MAX_SMALL_BYTES
        self._parsing = asyncio.Lock()  # it takes up to three times the size of the JSON in memory

    async def read(self, request: Request) -> Form:
        """Read a form with at most a photo for each frame, or a JSON object; the caller closes it. Raises ApiError."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "multipart/form-data":
            remedy = "make the photo smaller or raise SVDQ_MAX_PIXELS"
            return await _read_multipart(limited(request, self._max_bytes, PHOTO_S, remedy))
        if kind not in (URLENCODED, "application/json", ""):
            message = f"A body of type {kind[:80]!r} cannot be read; send multipart/form-data or application/json."
            raise ApiError(400, message, code="unknown_content_type")
        parse, most = (_parse_urlencoded, MAX_TEXT_BYTES) if kind == URLENCODED else (_parse_json, MAX_JSON_BYTES)
        remedy = "send the photo as multipart/form-data"
        request = limited(request, min(most, self._max_bytes), PHOTO_S, remedy)
        with SpooledTemporaryFile(max_size=SPOOLED_BYTES) as file:
            async for chunk in request.stream():
                file.write(chunk)
            file.seek(0)
            async with self._parsing:
                return await asyncio.to_thread(lambda: with_photos(parse(file.read())))


async def _read_multipart(request: Request) -> Form:
    parser = _Parser(
        request.headers,
        request.stream(),
        max_files=len(PHOTOS) + 1,
        max_fields=MAX_FIELDS,
        max_part_size=MAX_TEXT_BYTES,
    )
    try:
        parts = await parser.parse()
        try:
            return await asyncio.to_thread(lambda: with_photos(_form_of(parts)))
        except ApiError:
            await parts.close()
            raise
    except MultiPartException as error:
        message = error.message.rstrip(".")
        raise ApiError(400, f"The form cannot be read: {message}.", code="bad_form") from error
    finally:
        parser.forget()


class _Parser(MultiPartParser):
    """Keeps less of each file and of all fields in memory than Starlette does."""

    spool_max_size = SPOOLED_BYTES
    _num_text_bytes = 0
    _num_all_bytes: ClassVar[int] = 0  # of the long texts of all forms

    def forget(self) -> None:
        """Count the texts no more."""
        _Parser._num_all_bytes -= max(0, self._num_text_bytes - SPOOLED_BYTES)
        self._num_text_bytes = 0

    def on_headers_finished(self) -> None:
        """Take a photo as a file though its part has no `filename`, or one as `filename*`, which the parser ignores."""
        part = self._current_part
        disposition = part.content_disposition or b""
        _, options = parse_options_header(disposition)
        kind = dict(part.item_headers).get(b"content-type", b"text/plain")
        is_photo = options.get(b"name", b"").decode("latin-1").removesuffix("[]") in (*PHOTOS, LAST_PHOTO)
        is_file = b"filename*=" in disposition or not kind.startswith(b"text/")
        if is_photo and is_file and b"filename" not in options:
            part.content_disposition = disposition + b'; filename=""'
        super().on_headers_finished()

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._current_part.file is None:
            self._num_text_bytes += end - start
            _Parser._num_all_bytes += min(end - start, max(0, self._num_text_bytes - SPOOLED_BYTES))
            if self._num_text_bytes > MAX_TEXT_BYTES:
                raise MultiPartException(f"Its fields have more than {MAX_TEXT_BYTES >> 20} MiB")
            if _Parser._num_all_bytes > MAX_TEXTS_BYTES:
                message = "Many requests have photos in their texts; try again later, or send the photo as a file."
                raise ApiError(503, message, code="busy", headers=RETRY)
        super().on_part_data(data, start, end)


def _form_of(parts: FormData) -> Form:
    """Return the fields and the photo of a form; raises ApiError."""
    form = Form()
    for key, value in parts.multi_items():
        name = key.removesuffix("[]")
        if not isinstance(value, UploadFile):
            form.fields.append((key, value))
        elif name not in (*PHOTOS, LAST_PHOTO):
            raise ApiError(400, f"There is no file {name[:80]!r}; the photo is {PHOTO}.", param=name)
        elif (frame := PHOTO if name in PHOTOS else name) in form.files:
            raise two_photos(frame)
        else:
            form.files[frame] = value.file
            if frame == PHOTO:
                form.file_name = value.filename or ""
    return form


def _parse_urlencoded(data: bytes) -> Form:
    """Parse a form without files, in which a photo is a data URL; raises ApiError."""
    parts = [part.partition(b"=") for part in data.split(b"&", MAX_FIELDS) if part]
    try:
        fields = [(_unquoted(name), _unquoted(value)) for name, _, value in parts]
    except UnicodeDecodeError as error:
        raise ApiError(400, "The form is not UTF-8.", code="bad_form") from error
    if len(fields) > MAX_FIELDS:
        raise ApiError(400, f"The form has more than {MAX_FIELDS} fields.", code="bad_form")
    return Form(fields=fields)


def _unquoted(text: bytes) -> str:
    text, decoded, begin = text.replace(b"+", b" "), bytearray(), 0
    while begin < len(text):
        end = begin + UNQUOTED_BYTES
        escape = text.find(b"%", end - 2, end)  # one that the end would cut
        end = end if escape < 0 else escape
        decoded += unquote_to_bytes(text[begin:end])
        begin = end
    return decoded.decode()


def _parse_json(data: bytes) -> Form:
    """Parse an object; raises ApiError."""
    try:
        document = parse_json(data or b"{}")
    except ValueError as error:
        raise ApiError(400, f"The body is not JSON ({error}).", code="bad_json") from error
    if not isinstance(document, dict):
        raise ApiError(400, "The body is not a JSON object.", code="bad_json")
    return Form(fields=list(document.items()))


def with_photos(form: Form) -> Form:
    """Merge the fields of a form; photos go to disk. Raises ApiError if a field cannot be read or is there twice."""
    try:
        form.fields, *urls = flatten(form.fields)
        for frame, url in zip((PHOTO, LAST_PHOTO), urls, strict=True):
            if url and frame in form.files:
                raise two_photos(frame)
            if url:
                data = decode_data_url(url, frame)
                file = cast(BinaryIO, SpooledTemporaryFile(max_size=SPOOLED_BYTES))  # noqa: SIM115 - Form closes it
                form.files[frame] = file
                file.write(data)
    except ApiError:
        form.close()
        raise
    return form
