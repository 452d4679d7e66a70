"""Files of measurements: written at the end of minutes of work, so what goes wrong is said and nothing else is lost."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from svdq.pipeline.errors import InputError


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Write a file within a block.

    Raises:
        InputError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise InputError(f"The file {str(path)!r} cannot be written ({error.strerror}); give another place.") from error


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write figures into a file.

    Raises:
        InputError: it cannot be written.
    """
    with writing(path):
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
