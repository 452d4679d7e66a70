"""How the user has files named: templates such as `{stem}-{seed}`, and folders under outputs/. Knows no jobs."""

import re
import string
from collections.abc import Collection, Mapping
from pathlib import PurePosixPath
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.producer.job import MAX_FOLDER_LENGTH, is_folder_name
from svdq.producer.submitting.photos import safe_name

#: How a value is laid out, such as `04` or `.2f`: no fields within fields, and no width that fills the memory.
_LAYOUT = re.compile(r"[^{}]?[<>=^]?[-+ ]?#?0?\d{0,2}[,_]?(\.\d{1,2})?[a-zA-Z%]?")


def check_template(template: str, fields: Collection[str]) -> None:
    """Check a template for names, whatever the values will be.

    Raises:
        InputError: it is not one, or it has a field that is not in `fields`.
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
                f"The name {template!r} has the field {{{field}}}, which there is not; the fields are "
                f"{', '.join(sorted(fields))}."
            )
        if conversion or (layout and not _LAYOUT.fullmatch(layout)):
            raise InputError(
                f"The name {template!r} lays out {{{field}}} in a way that is not allowed; write it as {{{field}}} "
                f"or, for a number, as {{{field}:04}}."
            )


def render_name(template: str, values: Mapping[str, Any]) -> str:
    """Make a name of a template that was checked; what file systems refuse is replaced.

    Raises:
        InputError: a value cannot be laid out so, or is left to the model.
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
        raise InputError(f"The name {template!r} cannot be made ({error}); change how it lays out a field.") from error


def read_folder(text: str) -> str:
    """Read a folder under outputs/, as a user writes it.

    Raises:
        InputError: it is not inside outputs/.
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
            f"The output folder {text!r} is not one that every storage takes; use shorter names without backslashes "
            "and control characters, and no dot in front."
        )
    return "" if folder == PurePosixPath(".") else folder.as_posix()
