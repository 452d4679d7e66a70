"""The prompts of photos in a watched folder: `photo.txt` beside `photo.jpg`. Follows no symbolic links."""

import contextlib
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from svdq.pipeline.errors import InputError
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.parameters import WITH_PROMPTS, as_key
from svdq.producer.submitting.sources import MAX_BYTES, SUFFIX, SUFFIXES, parse_prompt
from svdq.producer.watching.directory import Signature, delete_file, move_file, open_file, open_folder, signature
from svdq.producer.watching.folder_config import FolderConfig, PostSubmit
from svdq.producer.watching.scanner import WaitingFile

_SUFFIXES = (*SUFFIXES, *map(str.upper, SUFFIXES))


@dataclass
class Prompts:
    """The prompts beside the photos of one watched folder. Paths are text, from the watched folder, with slashes."""

    config: FolderConfig
    post_submit: PostSubmit
    #: Seconds without a change after which a prompt has been written to its end.
    stable_for_s: float

    def add(self, file: WaitingFile, spec: JobSpec) -> JobSpec | None:
        """Return the parameters of a photo with the prompt beside it, or None if that is new and may still grow.

        Raises:
            InputError: the prompt cannot be read or is not valid.
        """
        path = _prompt_of(file.path)
        if self.config.prompt is not None or not _takes_prompts(spec) or path == file.path:
            return spec
        found = self._signature(path)
        is_new, file.prompt = found != file.prompt, found
        if found is None:
            return spec
        prompt = "" if is_new else self._read(path)
        if is_new or self._signature(path) != found:
            file.due_s = time.monotonic() + self.stable_for_s
            return None
        shown = f"The prompt in {str(self.post_submit.root / path)!r}:"
        spec = replace(spec, options=(replace(spec.options[0], prompt=prompt),))
        spec.check(lambda field: shown if field == "prompt" else as_key(field))
        return spec

    def finish(self, file: WaitingFile, moved_to: Path | None) -> None:
        """Move or delete the prompt of a photo that was moved or deleted, unless another photo has the same prompt."""
        path, post_submit = _prompt_of(file.path), self.post_submit
        if file.prompt is None or post_submit.keep or self._has_photo(path):
            return
        with contextlib.suppress(OSError):  # it stays; without its photo nothing uses it
            if post_submit.target is None:
                delete_file(self.post_submit.root, path, file.prompt)
            elif moved_to is not None:
                name = moved_to.with_suffix(SUFFIX).name
                move_file(
                    self.post_submit.root, path, file.prompt, post_submit.target, post_submit.subfolder, name=name
                )

    def why_ignored(self, path: str) -> str:
        """Return why a text file is not used as a prompt, as a clause; "" if it is used."""
        if not self._has_photo(path):
            return "there is no photo beside it whose prompt it can be."
        with contextlib.suppress(InputError):  # reported with the photos
            if not _takes_prompts(self.config.spec_for(path)):
                return "this family of models takes no prompts."
        return ""

    def _read(self, path: str) -> str:
        shown = self.post_submit.root / path
        try:
            with open_file(self.post_submit.root, path) as file:
                return parse_prompt(file.read(MAX_BYTES + 1), shown)
        except OSError as error:
            raise InputError(
                f"The prompt {str(shown)!r} cannot be read ({error.strerror}); check its rights, or put the text there."
            ) from error

    def _signature(self, path: str) -> Signature | None:
        found = signature(self.post_submit.root, path)
        if found is not None and not found.is_regular and os.path.isdir(self.post_submit.root / path):
            return None
        return found

    def _has_photo(self, prompt: str) -> bool:
        """Return whether there is a photo that has a file as its prompt; a large folder is not listed for it."""
        folder, name = os.path.split(prompt)
        stem = os.path.splitext(name)[0]
        with contextlib.suppress(OSError), open_folder(self.post_submit.root, folder) as descriptor:
            return any(os.access(stem + suffix, os.F_OK, dir_fd=descriptor) for suffix in _SUFFIXES)
        return False


def _takes_prompts(spec: JobSpec) -> bool:
    """Return whether its family takes prompts, or nothing but a prompt would decide it."""
    return spec.options[0].family_for(spec.model) in {None, *WITH_PROMPTS}


def _prompt_of(photo: str) -> str:
    return os.path.splitext(photo)[0] + SUFFIX
