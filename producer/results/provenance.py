"""Reads how a video was made from the file itself or from the JSON beside it.

All formats have the same JSON document: an mp4's comment tag, a gif's comment, a webp's EXIF description, a `comment`
text of every png frame, and the sidecar: `{"svdq": version, "job": {…}, "job_id": …, "model": {…}, …}`.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.producer.regular_file import open_regular

#: EXIF tag ImageDescription, which webp files have.
EXIF_IMAGE_DESCRIPTION = 0x010E
#: Largest size of a document in bytes; a sidecar has a few thousand.
MAX_SIDECAR_BYTES = 1 << 20
#: Largest nesting of lists and objects; a sidecar has three levels.
MAX_DEPTH = 20

#: Bytes 4 to 8 of an mp4.
MP4_MARK = b"ftyp"
#: The comment tag of iTunes metadata, which ffmpeg writes.
MP4_COMMENT = "\xa9cmt"


def read_provenance(path: Path) -> dict[str, Any]:
    """Read how a video was made from an mp4, gif, webp or png, a folder of png frames, or a sidecar.

    Raises:
        InputError: the file does not exist, or was not made by svdq.
    """
    try:
        document = parse_document(_read_comment(_first_frame(path) if path.is_dir() else path) or "")
    except FileNotFoundError as error:
        raise InputError(f"There is no file {str(path)!r}; check its path.") from error
    except InputError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.strerror is not None:  # those of Pillow have no such text
            raise InputError(f"The file {str(path)!r} cannot be read ({error.strerror}); check its rights.") from error
        # Parsers of foreign files raise more types than they document; any error means that the file is not ours.
        raise _not_ours(path) from error
    return document


def parse_document(text: str | bytes) -> dict[str, Any]:
    """Parse the JSON document of a video, which anyone may have changed.

    Raises:
        ValueError: the document is invalid; the message says why.
    """
    try:
        document = json.loads(text.decode() if isinstance(text, bytes) else text)
    except UnicodeDecodeError as error:
        raise ValueError("it is not UTF-8") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:
        raise ValueError("it is not JSON") from error
    if not isinstance(document, dict) or "svdq" not in document or not isinstance(document.get("job"), dict):
        raise ValueError("svdq did not write it")
    if not _is_shallow(document, MAX_DEPTH):
        raise ValueError("it is nested too deeply")
    try:
        json.dumps(document, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("it has unpaired surrogates") from error
    except ValueError as error:
        raise ValueError("it has numbers that are not finite") from error
    return document


def _is_shallow(value: object, depth: int) -> bool:
    """Return whether lists and objects are nested at most `depth` levels."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth >= 0 and all(_is_shallow(part, depth - 1) for part in parts)


def notice_of(document: Mapping[str, Any]) -> str:
    """Return the notice to show with a video, such as "preview (no diffusion model)", or ""."""
    model = document.get("model")
    notice = model.get("notice") if isinstance(model, dict) else None
    return str(notice or "")


def _not_ours(path: Path) -> InputError:
    return InputError(
        f"{str(path)!r} does not say how it was made; give a video that svdq made, or the .json beside it, unchanged."
    )


def _first_frame(folder: Path) -> Path:
    frames = sorted(folder.glob("*.png"))
    if not frames:
        raise InputError(f"There are no png frames in the folder {str(folder)!r}; give a video that svdq made.")
    return frames[0]


def _read_comment(path: Path) -> str | bytes | None:
    is_sidecar = path.suffix.lower() == ".json"
    with open_regular(path) as file:
        head = file.read(MAX_SIDECAR_BYTES + 1 if is_sidecar else 12)
    if is_sidecar:
        return head if len(head) <= MAX_SIDECAR_BYTES else None
    return _read_mp4(path) if head[4:8] == MP4_MARK else _read_image(path)


def _read_mp4(path: Path) -> str | None:
    from mutagen.mp4 import MP4  # imported on demand: only this function needs it

    tags: Any = MP4(path).tags  # type: ignore[no-untyped-call]
    comments = (tags or {}).get(MP4_COMMENT)
    return str(comments[0]) if comments else None


def _read_image(path: Path) -> str | None:
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about metadata of untrusted files
        with Image.open(path, formats=("GIF", "WEBP", "PNG")) as image:
            comment = image.info.get("comment")
            if comment is None and (description := image.getexif().get(EXIF_IMAGE_DESCRIPTION)):
                # EXIF has no Unicode type: the tag holds UTF-8, which Pillow decodes as Latin-1.
                comment = description.encode("latin-1", "replace")
    return comment.decode("utf-8", "replace") if isinstance(comment, bytes) else comment
