"""Renders static HTML pages from `templates/`, in one file without external resources."""

import base64
import hashlib
import html
import os
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template

from svdq.pipeline.errors import InputError
from svdq.producer.storage.temporary import temporary_name

STYLE, SCRIPT = "page.css", "gallery.js"


def fill(template: str, **values: str) -> str:
    """Fill in a template. Values are HTML: pass untrusted text through `text` first."""
    return Template(_read(template)).substitute(values)


def fill_page(template: str, **values: str) -> str:
    """Fill in the template of a whole page, whose security policy allows only its own style and script."""
    return fill(
        template,
        version=text(version("svdq")),
        style=_read(STYLE),
        style_hash=_hash(_read(STYLE)),
        **values,
    )


def script() -> dict[str, str]:
    """Return the template values for a page with the gallery's script."""
    return {"script": _read(SCRIPT), "script_hash": _hash(_read(SCRIPT))}


def text(value: object) -> str:
    """Escape a value for HTML text or an attribute."""
    return html.escape(str(value))


def check_target(path: Path, suffixes: Sequence[str] = (".html",)) -> None:
    """Check that a file can be written, before any work is done.

    Args:
        path: the file.
        suffixes: allowed suffixes of the file, so that no video is overwritten; () for any.

    Raises:
        InputError: the suffix is not allowed, the folder does not exist, or the file cannot be written.
    """
    if suffixes and path.suffix.lower() not in suffixes:
        raise InputError(f"{str(path)!r} cannot be written to: give a file whose name ends in {' or '.join(suffixes)}.")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise InputError(f"There is no folder {str(folder)!r} to write {path.name!r} to; make it first.")
    # A device or a folder must not be replaced.
    if (path.exists() and not path.is_file()) or not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"The file {str(path)!r} cannot be written; check the rights of its folder, or give another.")


def write(path: Path, parts: Iterable[str]) -> None:
    """Write a file atomically.

    Raises:
        InputError: the file cannot be written.
    """
    temporary = path.absolute().with_name(f".{temporary_name()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(parts)
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"The file {str(path)!r} cannot be written ({error.strerror}); give another place.") from error
    finally:
        temporary.unlink(missing_ok=True)


@cache
def _read(name: str) -> str:
    return (files("svdq.producer.results") / "templates" / name).read_text(encoding="utf-8")


def _hash(source: str) -> str:
    """Return the hash of a script or style for a content security policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"
