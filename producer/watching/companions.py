"""The files beside a photo in a watched folder: `photo.txt` is its prompt, and `photo.last.jpg` its last frame."""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import TypeVar

from svdq.pipeline.errors import InputError
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.parameters import WITH_PROMPTS, as_key
from svdq.producer.submitting.photos import MAX_FOREIGN_BYTES, Photo, read_file
from svdq.producer.submitting.sources import LAST, MAX_BYTES, SUFFIX, SUFFIXES, parse_prompt, spellings
from svdq.producer.watching.directory import Signature, delete_file, move_file, open_file, signature
from svdq.producer.watching.folder_config import FolderConfig, PostSubmit
from svdq.producer.watching.scanner import WaitingFile

T = TypeVar("T")


@dataclass
class Companions:
    """The prompts and last frames of photos in a watched folder."""

    config: FolderConfig
    post_submit: PostSubmit
    stable_for_s: float  # seconds without a change after which such a file has been written to its end
    decoded: Callable[[WaitingFile, bytes, Path], Photo]  # checks the photo of a last frame

    def add(self, file: WaitingFile, spec: JobSpec) -> tuple[JobSpec, Photo | None] | None:
        """Return the parameters of a photo with what is beside it, and its last frame; None while that may still grow.

        Raises InputError if one of them cannot be used.
        """
        stem = os.path.splitext(file.path)[0]
        prompt = next(filter(self._signature, spellings(stem, SUFFIX)), stem + SUFFIX)
        last = self._photo_of(stem + LAST) or self._photo_of(stem + LAST.upper())
        found = {path: version for path in (prompt, last) if path and (version := self._signature(path))}
        spec = spec.with_last_photo() if last in found else spec
        if self.config.prompt is not None or not _takes_prompts(spec) or prompt == file.path:
            found.pop(prompt, None)
        is_new, file.beside = found != file.beside, found
        photo = None
        if found and not is_new:
            if prompt in found:
                text = self._read(prompt, lambda opened, path: parse_prompt(opened.read(MAX_BYTES + 1), path))
                spec = replace(spec, drafts=(replace(spec.drafts[0], prompt=text),))
            if last in found:
                photo = self._read(last, lambda opened, path: self._check(file, opened, path))
            is_new = any(self._signature(path) != version for path, version in found.items())
        if found and is_new:
            file.due_s = time.monotonic() + self.stable_for_s
            return None
        root = self.post_submit.root
        shown = {"prompt": f"The prompt in {str(root / prompt)!r}:"} if prompt in found else {}
        shown |= {"last_image": f"The last frame {str(root / last)!r}"} if last in found else {}
        spec.check(lambda field: shown.get(field) or as_key(field))
        return spec, photo

    def finish(self, file: WaitingFile, moved_to: Path | None) -> None:
        """Move or delete what was beside a photo that was moved or deleted, unless it is of another photo, too."""
        root, target = self.post_submit.root, self.post_submit.target
        for path, version in file.beside.items():
            if self._photo_of(_stem_of(path)):
                continue
            with contextlib.suppress(OSError):  # it stays; without its photo nothing uses it
                if not target:
                    delete_file(root, path, version)
                elif moved_to is not None:
                    name = moved_to.stem + path.removeprefix(_stem_of(path))
                    move_file(root, path, version, target, name=name)

    def first_of(self, path: str) -> str | None:
        """Return the photo whose last frame another one is by its name; "" if that is not there, None for others."""
        stem = os.path.splitext(path)[0]
        return self._photo_of(_stem_of(path)) if stem.lower().endswith(LAST) else None

    def why_ignored(self, prompt: str) -> str:
        """Return why a text file is not used as a prompt, as a clause; "" if it is used."""
        if not self._photo_of(_stem_of(prompt)):
            return "there is no photo beside it whose prompt it can be."
        with contextlib.suppress(InputError):  # reported with the photos
            if not _takes_prompts(self.config.spec_for(prompt)):
                return "this family of models takes no prompts."
        return ""

    def _read(self, path: str, parse: Callable[[BufferedReader, Path], T]) -> T:
        shown = self.post_submit.root / path
        try:
            with open_file(self.post_submit.root, path) as file:
                return parse(file, shown)
        except OSError as error:
            raise InputError(
                f"The file {str(shown)!r} cannot be read ({error.strerror}); check its rights, or put the file itself "
                "there."
            ) from error

    def _check(self, file: WaitingFile, opened: BufferedReader, path: Path) -> Photo:
        return self.decoded(file, read_file(opened, path, MAX_FOREIGN_BYTES), path)

    def _signature(self, path: str) -> Signature | None:
        is_folder = os.path.isdir(self.post_submit.root / path)
        return None if is_folder else signature(self.post_submit.root, path)

    def _photo_of(self, stem: str) -> str:
        """Return the path of a photo without its suffix; "" if there is none. A large folder is not listed for it."""
        paths = (path for suffix in sorted(SUFFIXES) for path in spellings(stem, suffix))
        return next((path for path in paths if os.path.lexists(self.post_submit.root / path)), "")


def _takes_prompts(spec: JobSpec) -> bool:
    """Return whether its family takes prompts, or nothing but a prompt would decide it."""
    return spec.drafts[0].family_for(spec.expected) in (None, *WITH_PROMPTS)


def _stem_of(path: str) -> str:
    """Return what a photo's path has before its suffix, from the path of a file beside it."""
    stem = os.path.splitext(path)[0]
    return stem[: -len(LAST)] if stem.lower().endswith(LAST) else stem
