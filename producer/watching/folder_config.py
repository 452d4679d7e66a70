"""How a folder is watched: which files are photos, their parameters, and what happens to them afterwards."""

import errno
import fnmatch
import os
import re
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import BinaryIO

from svdq.pipeline.errors import InputError
from svdq.producer.job import PHOTO_KEYS
from svdq.producer.name_templates import safe_name
from svdq.producer.settings import ENV_PREFIX, Settings, checked_owner
from svdq.producer.settings_loader import FILE_NAME, cannot_be_read, read_toml
from svdq.producer.submitting.draft import read_draft, read_then
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.parameters import as_key, no_such
from svdq.producer.submitting.sources import SUFFIXES, is_photo_folder
from svdq.producer.watching.directory import make_folder, open_file

PHOTO_GLOBS = tuple(f"*{suffix}" for suffix in sorted(SUFFIXES))
#: Temporary files of browsers, copy programs, editors and synchronizers, besides those that start with a dot.
TEMPORARY_GLOBS = (
    *("~*", "*~", "*.tmp", "*.temp", "*.part", "*.partial", "*.filepart", "*.crdownload", "*.download"),
    *("*.opdownload", "*.aria2", "*.!qb", "*.!ut", "*.gstmp"),
)


@dataclass(frozen=True, kw_only=True)
class FileFilter:
    """Which files are submitted. Patterns ignore case, because cameras write `IMG_1.JPG`."""

    recursive: bool = False
    globs: tuple[str, ...] = PHOTO_GLOBS  # of names, or of paths if they have a slash

    def matches(self, path: str) -> bool:
        """Return whether a path from the watched folder names a photo to submit."""
        name = os.path.basename(path)
        return self._is_visible(path) and any(
            _pattern((glob,)).match((path if "/" in glob else name).lower()) for glob in self.globs
        )

    def includes(self, path: str) -> bool:
        """Return whether a file is submitted or, where all photos are wanted, reported as ignored."""
        return self._is_visible(path) if self.globs == PHOTO_GLOBS else self.matches(path)

    def _is_visible(self, path: str) -> bool:
        *folders, name = path.split("/")
        if (folders and not self.recursive) or not all(map(is_photo_folder, folders)):
            return False
        return not (name.startswith(".") or _pattern(TEMPORARY_GLOBS).match(name.lower()) or name == FILE_NAME)


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """How a folder is watched."""

    selection: FileFilter = field(default_factory=FileFilter)
    existing: bool = False  # whether files that existed before the folder was first watched are submitted, too
    stable_for_s: float = 2.0  # seconds without a change after which a file has stopped growing
    on_success: str = "keep"  # the action on photos after submission: `keep`, `move:DIR` or `delete`
    once: bool = False  # process what is there, then end; files that still grow or are on hold are left to the next run


@dataclass(frozen=True, kw_only=True)
class PostSubmit:
    """The action on photos after submission: keep, move or delete them."""

    root: Path  # the watched folder, resolved
    keep: bool  # whether photos stay where they are
    target: str = ""  # the path of the folder in it that they are moved to; "" if they are kept or deleted

    @classmethod
    def parse(cls, text: str, root: Path) -> "PostSubmit":
        """Parse `keep`, `move:DIR` or `delete`; raises InputError for others, and a DIR that is not in the folder."""
        action, _, folder = text.partition(":")
        if action == "move" and folder.strip():
            target = Path(os.path.normpath(root / os.path.expanduser(folder)))
            if not target.is_relative_to(root):
                target = target.resolve()  # it may be given through a link
            if target == root or not target.is_relative_to(root):
                raise InputError(
                    f"--on-success {text} is not allowed: DIR must be a folder in the watched one, such as move:done."
                )
            return cls(root=root, keep=False, target=target.relative_to(root).as_posix())
        if text not in ("keep", "delete"):
            raise InputError(f"--on-success {text} is not allowed: it must be keep, move:DIR or delete.")
        return cls(root=root, keep=text == "keep")

    def prepare(self) -> None:
        """Create the target folder; raises InputError if photos cannot be moved or deleted."""
        try:
            if not self.keep and not os.access(self.root, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.root))
            if self.target and make_folder(self.root, self.target).stat().st_dev != self.root.stat().st_dev:
                raise OSError(errno.EXDEV, "it is on another disk than the watched folder")
        except OSError as error:
            raise InputError(
                f"Photos cannot be moved or deleted in {str(self.root / self.target)!r} ({error.strerror}); "
                "check the folder and its permissions, or leave photos where they are with --on-success keep."
            ) from error


class FolderConfig:
    """The parameters of photos in `root`, a resolved folder: `spec`, overridden by the nearest `svdq.toml`."""

    def __init__(self, root: Path, spec: JobSpec) -> None:
        spec.check()
        self._root = root
        self._spec = spec
        #: By folder, the version of its file, and its parameters or why it cannot be used: others' photos must not wait
        #: while a file is parsed for each photo beside it.
        self._parsed: dict[str, tuple[tuple[int, ...], JobSpec | str]] = {}

    @property
    def prompt(self) -> str | None:
        """The command's prompt, for all photos, or None."""
        prompt: str | None = self._spec.drafts[0].prompt
        return prompt

    @property
    def is_open(self) -> bool:
        """Whether the command does not decide the family of the videos."""
        return self._spec.is_open

    def spec_for(self, path: str) -> JobSpec:
        """Return the parameters of a photo by its path; raises InputError if the nearest file is not valid."""
        folder = os.path.dirname(path)
        folders = folder.split("/") if folder else []
        read = (self._read("/".join(folders[:depth])) for depth in range(len(folders), -1, -1))
        spec = next(filter(None, read), self._spec)
        return spec.below("/".join(map(safe_name, folders))) if folders else spec

    def _read(self, folder: str) -> JobSpec | None:
        file_path = self._root / folder / FILE_NAME
        try:
            with open_file(self._root, f"{folder}/{FILE_NAME}") as file:
                status = os.fstat(file.fileno())
                version = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                if self._parsed.get(folder, ((), None))[0] != version:
                    self._parsed[folder] = (version, self._parse(file, file_path))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise cannot_be_read(file_path, error.strerror) from error
        found = self._parsed[folder][1]
        if isinstance(found, str):
            raise InputError(found)
        return found

    def _parse(self, file: BinaryIO, file_path: Path) -> JobSpec | str:
        """Return the parameters in a file, or why it cannot be used; raises OSError."""
        try:
            document = read_toml(file, file_path)
        except InputError as error:
            return str(error)
        spec = self._spec
        try:
            given = {key.replace("-", "_"): value for key, value in document.items()}
            owner = given.pop("owner", spec.owner)
            if "owner" in document:
                try:
                    checked_owner(owner)
                except ValueError as error:
                    raise InputError(f"owner {owner!r} is not allowed: {error}.") from error
            for key in document.keys() - {"owner"}:
                name = key.replace("-", "_")
                if name in Settings.model_fields and name != "output":
                    raise InputError(
                        f"{key!r} is a setting, and a watched folder has none: set {ENV_PREFIX}{name.upper()}, or move "
                        f"it to the {FILE_NAME} of SVDQ_HOME."
                    )
                if name not in (*PHOTO_KEYS, "output"):
                    raise InputError(no_such("key", key, (*PHOTO_KEYS, "output")))
            priority = given.pop("priority", spec.priority)
            then = read_then(given.pop("then"), "then") if "then" in given else spec.then
            output = given.pop("output", None)
            if output is not None and not isinstance(output, str):
                raise InputError(f"output {output!r} is not allowed: it must be a text, such as '{{date}}/{{photo}}'.")
            if self.prompt is not None:
                given.pop("prompt", None)
            draft = spec.drafts[0].overridden(read_draft(given))
            spec = replace(spec, drafts=(draft,), priority=priority, then=then, owner=owner)
            spec = spec if output is None else replace(spec, name=None).with_output(output)
            spec.check(spell=as_key)
        except InputError as error:
            return f"In the file {str(file_path)!r}: {error}"
        return spec


@cache
def _pattern(globs: tuple[str, ...]) -> re.Pattern[str]:
    """Compile patterns into one: a scan matches every file of a large folder."""
    return re.compile("|".join(fnmatch.translate(glob.lower()) for glob in globs))
