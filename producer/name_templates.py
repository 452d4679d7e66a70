"""Names of files and folders that all file systems allow, and the templates that users write for them."""

import re
import string
import unicodedata
from collections.abc import Mapping
from datetime import date, datetime
from pathlib import PurePosixPath
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.producer.job import MAX_FOLDER_LENGTH, VIDEO_FIELDS, Job, is_folder_name

MAX_STEM_BYTES = 180  # bytes of UTF-8; leaves room for a suffix within a file system's 255
#: Names that Windows refuses, with any extension.
_DEVICES = frozenset(
    ["CON", "PRN", "AUX", "NUL", *(f"{port}{number}" for port in ("COM", "LPT") for number in range(10))]
)
#: Fields of templates besides the parameters of the video; `photo` and `n` are other names of `stem` and `index`.
OWN_FIELDS = ("stem", "photo", "index", "n", "variation", "folder", "owner", "date", "taken")
NAME_FIELDS = frozenset([*OWN_FIELDS, *VIDEO_FIELDS]) - {"formats", "family", "loras"}

_FIELD = re.compile(r"\{[^{}]")
#: Allowed format specifications, such as `04` or `.2f`: no nested fields, and no width that exhausts memory.
_LAYOUT = re.compile(r"(%[YmdjUV]|[-_. ])+|[^{}]?[<>=^]?[-+ ]?#?0?\d{0,2}[,_]?(\.\d{1,2})?[a-zA-Z%]?")


def safe_name(stem: str) -> str:
    """Turn the stem of a file name into a name that `Job.name` and all file systems allow."""
    stem = unicodedata.normalize("NFC", stem)
    stem = "".join(char if char.isprintable() and char not in '/\\:*?"<>|' else "_" for char in stem)
    stem = stem.lstrip(". ").encode()[:MAX_STEM_BYTES].decode(errors="ignore").rstrip(". ").strip() or "photo"
    return f"_{stem}" if stem.partition(".")[0].rstrip().upper() in _DEVICES else stem


class Undated:
    """The date of a photo that has none: `undated` in any layout."""

    def __format__(self, _layout: str) -> str:
        return "undated"


def template_values(
    job: Job, stem: str, source: str, model: str, day: date, taken: datetime | None = None
) -> dict[str, Any]:
    """Return the fields of templates that do not depend on the submission; `stem` to `taken` are of the photo."""
    values = {name: getattr(job, name) for name in NAME_FIELDS & type(job).model_fields.keys() - {"folder"}}
    folders = source.split("/")[:-1]
    # Of the folder that was submitted only the name, and only for photos that lie in no subfolder.
    folder = "/".join(folders[1:] or folders)
    of_photo = {"stem": stem, "photo": stem, "folder": folder, "taken": taken.date() if taken else Undated()}
    return values | of_photo | {"date": day, "model": model or job.family}


def literal(text: str) -> str:
    """Escape the braces of a text for use in a template."""
    return text.replace("{", "{{").replace("}", "}}")


def has_field(template: str) -> bool:
    """Return whether a template has a field."""
    return _FIELD.search(template.replace("{{", "")) is not None


def render_folder(template: str, values: Mapping[str, Any]) -> str:
    """Render a template of a folder, in which `{folder}` may be several; raises InputError as `render_name`."""
    parts: list[str] = []
    for part in template.split("/"):
        if part == "{folder}":
            parts += map(safe_name, filter(None, values["folder"].split("/")))
        elif part:
            parts.append(render_name(part, values, "output"))
    return checked_folder("/".join(parts))


def render_name(template: str, values: Mapping[str, Any], parameter: str = "name") -> str:
    """Render a template of `str.format`, without conversions and nested fields, as a name for all file systems.

    Raises InputError if the template, the value of a parameter, is invalid, or a value does not fit its format or is
    left to the model.
    """
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise InputError(
            f"The name {template!r} is not a template ({error}); write fields as {{stem}}, and {{{{ for a brace.",
            field=parameter,
        ) from error
    if not template.strip():
        raise InputError("The name is empty; give one such as {stem}-{seed}, or leave it out.", field=parameter)
    for text, field, layout, conversion in parts:
        if "/" in text or "\\" in text:
            raise InputError(
                f"The name {template!r} names a folder; give the name alone, and the folder as output.", field=parameter
            )
        if field is None:
            continue
        wrong = ""
        if field not in NAME_FIELDS:
            wrong = f", which is unknown; the fields are {', '.join(sorted(NAME_FIELDS))}"
        elif conversion or (layout and not _LAYOUT.fullmatch(layout)):
            wrong = f" in a format that is not allowed; write it as {{{field}}} or, for a number, as {{{field}:04}}"
        elif field not in values:
            wrong = ", which such videos do not have; leave it out"
        elif values[field] is None:
            wrong = f", which is left to the model; give {field} or leave the field out"
        if wrong:
            raise InputError(f"The name {template!r} has the field {{{field}}}{wrong}.", field=parameter)
    try:
        return safe_name(template.format_map(values))
    except (ValueError, OverflowError) as error:
        raise InputError(
            f"The name {template!r} cannot be made ({error}); change the format of its field.", field=parameter
        ) from error


def read_folder(text: str) -> str:
    """Parse a folder below outputs/, as a user writes it; raises InputError as `checked_folder`, and for a home."""
    return checked_folder(text, is_outside=text.startswith("~"))


def checked_folder(text: str, *, is_outside: bool = False) -> str:
    """Parse a folder below outputs/, perhaps named after folders of photos; raises InputError if it is outside."""
    folder = PurePosixPath(text)
    if is_outside or folder.is_absolute() or "://" in text or ".." in folder.parts:
        raise InputError(
            f"The output folder {text!r} is not inside the storage's outputs/; give a relative one such as "
            "holiday/day1, choose another storage, or copy finished videos anywhere with `svdq fetch ID -o DIR`.",
            field="output",
        )
    if not all(map(is_folder_name, folder.parts)) or len(text) > MAX_FOLDER_LENGTH:
        raise InputError(
            f"The output folder {text!r} is not allowed by every storage; use shorter names without backslashes "
            "and control characters, and no dot in front.",
            field="output",
        )
    return "" if folder == PurePosixPath(".") else folder.as_posix()
