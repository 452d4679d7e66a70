"""Reads the prompt of a photo from the text file beside it: `photo.txt` for `photo.jpg`."""

import contextlib
import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.wan.parameters import MAX_PROMPT
from svdq.producer.regular_file import open_regular
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.options import as_flag

SUFFIX = ".txt"
#: Bytes; the longest prompt has less.
MAX_BYTES = 1 << 16


def prompt_path(photo: Path) -> Path | None:
    """Return the path that the prompt of a photo has, or None if that is the photo's own."""
    path = photo.with_suffix(SUFFIX)
    return None if path == photo else path


def usable_prompt(photo: Path) -> str:
    """Return the prompt beside a photo; "" if there is none, or a text that cannot be one."""
    path = prompt_path(photo)
    with contextlib.suppress(InputError):
        prompt = read_prompt(path) if path is not None else None
        if prompt and len(prompt) <= MAX_PROMPT:
            return prompt
    return ""


def read_prompt(path: Path) -> str | None:
    """Return the prompt in a file, or None if there is no file of that name.

    Raises:
        InputError: it cannot be read, is too long or not UTF-8.
    """
    try:
        with open_regular(path) as file:
            return parse_prompt(file.read(MAX_BYTES + 1), path)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            return None  # the photo's name has no suffix, and no room for one
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"The prompt {str(path)!r} cannot be read ({reason}); check its rights.") from error


def parse_prompt(data: bytes, path: Path) -> str:
    """Return the text of a prompt; line breaks and other runs of white space count as one space.

    Raises:
        InputError: it is too long or not UTF-8; `path` is for messages.
    """
    if len(data) > MAX_BYTES:
        raise InputError(f"The prompt {str(path)!r} has more than {MAX_BYTES:,} bytes; shorten it.")
    try:
        return " ".join(data.decode("utf-8-sig").split())
    except UnicodeDecodeError as error:
        raise InputError(f"The prompt {str(path)!r} is not UTF-8; save it as UTF-8.") from error


class PromptFiles:
    """The prompts in text files beside photos."""

    def __init__(self, spell: Callable[[str], str] = as_flag) -> None:
        """Make it; `spell` returns the name of a parameter for errors."""
        self._spell = spell
        #: Number of text files beside photos whose videos take no prompt.
        self.num_ignored = 0

    def spec_for(self, spec: JobSpec, photo: Path) -> JobSpec:
        """Return a spec with the prompt beside a photo, unless it has one; a family without prompts records it.

        Raises:
            InputError: the prompt cannot be used.
        """
        path = prompt_path(photo)
        if spec.has_prompts or path is None:
            return spec
        if spec.with_prompt("") is spec:
            self.num_ignored += os.path.isfile(path)  # unlike `Path.is_file`, it refuses no name
            ignored = usable_prompt(photo)
            return replace(spec, notes=(*spec.notes, ("prompt", ignored))) if ignored else spec
        prompt = read_prompt(path)
        if prompt is None:
            return spec
        spec = spec.with_prompt(prompt)
        spec.check(lambda field: f"The prompt in {str(path)!r}:" if field == "prompt" else self._spell(field))
        return spec
