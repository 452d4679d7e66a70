"""Checks and renders names of files, from templates such as `{stem}-{seed}`, and folders below outputs/."""

import re
import string
from collections.abc import Collection, Mapping
from pathlib import PurePosixPath
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.producer.job import MAX_FOLDER_LENGTH, is_folder_name
from svdq.producer.submitting.photos import safe_name

#: Allowed format specifications, such as `04` or `.2f`: no nested fields, and no width that exhausts memory.
_LAYOUT = re.compile(r"[^{}]?[<>=^]?[-+ ]?#?0?\d{0,2}[,_]?(\.\d{1,2})?[a-zA-Z%]?")


def check_template(template: str, fields: Collection[str]) -> None:
    """Check a template for names, independent of values.

    Raises:
        InputError: the template is invalid, or has a field that is not in `fields`.
    """
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise InputError(
            f"The name {template!r} is not a template ({error}); write fields as {{stem}}, and {{{{ for a brace."
        ) from error
    if not template.strip():
        raise InputError("The name is empty; give one such as {stem}-{seed}, or leave it out.")
    for text, field, layout, conversion in parts:
        if "/" in text or "\\" in text:
            raise InputError(f"The name {template!r} names a folder; give the name alone, and the folder by --output.")
        if field is not None and field not in fields:
            raise InputError(
                f"The name {template!r} has the unknown field {{{field}}}; the fields are {', '.join(sorted(fields))}."
            )
        if conversion or (layout and not _LAYOUT.fullmatch(layout)):
            raise InputError(
                f"The name {template!r} formats {{{field}}} in a way that is not allowed; write it as {{{field}}} "
                f"or, for a number, as {{{field}:04}}."
            )


def render_name(template: str, values: Mapping[str, Any]) -> str:
    """Render a checked template, and replace characters that file systems refuse.

    Raises:
        InputError: a value does not fit its format, or is left to the model.
    """
    used = {field for _, field, _, _ in string.Formatter().parse(template) if field}
    for field in used:
        if values[field] is None:
            raise InputError(
                f"The name {template!r} has the field {{{field}}}, which is left to the model; give {field} or leave "
                "the field out."
            )
    try:
        return safe_name(template.format_map(values))
    except ValueError as error:
        raise InputError(f"The name {template!r} cannot be made ({error}); change the format of its field.") from error


def read_folder(text: str) -> str:
    """Parse a folder below outputs/, as a user writes it.

    Raises:
        InputError: the folder is outside of outputs/.
    """
    folder = PurePosixPath(text)
    if folder.is_absolute() or text.startswith("~") or "://" in text or ".." in folder.parts:
        raise InputError(
            f"The output folder {text!r} is not inside the storage's outputs/; give a relative one such as "
            "holiday/day1, choose another storage with --storage, or copy finished videos anywhere with "
            "`svdq fetch ID -o DIR`."
        )
    if not all(map(is_folder_name, folder.parts)) or len(text) > MAX_FOLDER_LENGTH:
        raise InputError(
            f"The output folder {text!r} is not allowed by every storage; use shorter names without backslashes "
            "and control characters, and no dot in front."
        )
    return "" if folder == PurePosixPath(".") else folder.as_posix()
