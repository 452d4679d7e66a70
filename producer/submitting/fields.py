"""Parses parameters of a video from text, for sweeps and for lists."""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.producer.submitting.options import MAX_VIDEOS, SubmitOptions, as_flag

WHOLE_NUMBERS = ("frames", "steps", "width", "height", "fps", "motion_bucket_id", "decode_chunk_size", "seed")
#: All names that `read_field` accepts.
FIELDS = (*(field.name for field in fields(SubmitOptions)), "size")

_SIZE = re.compile(r"(\d{1,6})[xX](\d{1,6})")


def read_field(name: str, text: str, called: str) -> dict[str, Any]:
    """Parse the value of a parameter; the job checks which values are allowed.

    Args:
        name: one of `FIELDS`; `size` is width and height, such as 576x320; formats are separated by spaces: `mp4 gif`.
        text: what the user wrote.
        called: name of the parameter in errors.

    Returns:
        The fields of `SubmitOptions` and their values.

    Raises:
        InputError: the text is not a value of the parameter's type.
    """
    text = text.strip()
    if name == "size":
        match = _SIZE.fullmatch(text)
        if match is None:
            raise InputError(f"{called} {text} is not a size; write width and height in pixels, such as 1024x576.")
        return {"width": int(match[1]), "height": int(match[2])}
    if name == "formats":
        # A repeated format counts once.
        return {name: tuple(dict.fromkeys(text.replace(",", " ").split()))}
    if name == "fit":
        return {name: text}
    try:
        return {name: int(text) if name in WHOLE_NUMBERS else float(text)}
    except ValueError as error:
        kind = "whole number, such as 25" if name in WHOLE_NUMBERS else "number, such as 0.5"
        raise InputError(f"{called} {text!r} is not allowed: it must be a {kind}.") from error


def sweep(options: SubmitOptions, sweeps: Iterable[str]) -> tuple[SubmitOptions, ...]:
    """Return all combinations of the values of several parameters; the last parameter changes fastest.

    Args:
        options: all other parameters.
        sweeps: such as `motion_bucket_id=60,127,180`.

    Raises:
        InputError: a sweep cannot be parsed, or a parameter has values twice.
    """
    columns: list[Sequence[dict[str, Any]]] = []
    swept: set[str] = set()
    for text in sweeps:
        column = _column(text)
        twice = swept & column[0].keys() | options.given().keys() & column[0].keys()
        if twice:
            flags = " and ".join(sorted(map(as_flag, twice)))
            raise InputError(f"--sweep {text} gives values to {flags}, which has others; give them in one place.")
        swept |= column[0].keys()
        columns.append(column)
    # Generating one more than allowed is enough to refuse them.
    combinations = itertools.islice(itertools.product(*columns), MAX_VIDEOS + 1)
    return tuple(replace(options, **{k: v for values in chosen for k, v in values.items()}) for chosen in combinations)


def _column(text: str) -> list[dict[str, Any]]:
    name, equals, values = text.partition("=")
    name = name.strip().lstrip("-").replace("-", "_")
    # A list of formats is one value and contains commas.
    allowed = [field for field in FIELDS if field != "formats"]
    if not equals or name not in allowed:
        raise InputError(
            f"--sweep {text} is not a sweep; write it as motion_bucket_id=60,127,180, with one of {', '.join(allowed)}."
        )
    return [read_field(name, value, f"--sweep {name}") for value in dict.fromkeys(values.split(","))]
