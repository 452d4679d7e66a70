"""Writes files of measurements."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from svdq.pipeline.errors import InputError


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Write a file within a block.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise InputError(f"The file {str(path)!r} cannot be written ({error.strerror}); give another place.") from error


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write figures into a file atomically; a link or a device is written in place.

    Raises:
        InputError: the file cannot be written.
    """
    text = json.dumps(document, indent=2) + "\n"
    with writing(path):
        if not is_plain(path):
            path.write_text(text, encoding="utf-8")
            return
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def is_plain(path: Path) -> bool:
    """Return whether a path is a regular file or does not exist: not a link, nor a device such as /dev/stdout."""
    return not path.is_symlink() and (path.is_file() or not path.exists())
