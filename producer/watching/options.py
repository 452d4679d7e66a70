"""How a folder is watched, and which of its files are photos by their names."""

import fnmatch
import re
from dataclasses import dataclass, field
from functools import cache

from svdq.producer.settings import FILE_NAME
from svdq.producer.submitting.sources import SUFFIXES

#: What is taken unless patterns are given.
PHOTO_GLOBS = tuple(f"*{suffix}" for suffix in sorted(SUFFIXES))

#: Files that are still being written, or never were photos: browsers, copy programs, editors, synchronizers.
#: Names that start with a dot are left out, too, as are the temporary files of rsync, lftp, Nextcloud and others.
TEMPORARY_GLOBS = (
    *("~*", "*~", "*.tmp", "*.temp", "*.part", "*.partial", "*.filepart", "*.crdownload", "*.download"),
    *("*.opdownload", "*.aria2", "*.!qb", "*.!ut", "*.gstmp"),
)

#: Folders that systems create for thumbnails and deleted files.
SYSTEM_FOLDERS = frozenset(
    {"@eadir", "#recycle", "$recycle.bin", "__macosx", "lost+found", "system volume information"}
)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which files are submitted. Patterns ignore case, because cameras write `IMG_1.JPG`."""

    #: Whether those in subfolders are.
    recursive: bool = False
    #: Patterns of names; those with a slash are for the path from the watched folder.
    globs: tuple[str, ...] = PHOTO_GLOBS

    def matches(self, path: str) -> bool:
        """Return whether a file is a photo to submit, by its path from the watched folder."""
        return self._is_visible(path) and self._matches_globs(path)

    def includes(self, path: str) -> bool:
        """Return whether a file is submitted or, where all photos are wanted, reported as ignored."""
        return self._is_visible(path) and (self.globs == PHOTO_GLOBS or self._matches_globs(path))

    def _is_visible(self, path: str) -> bool:
        *folders, name = path.split("/")
        if (folders and not self.recursive) or not all(map(is_photo_folder, folders)):
            return False
        return not is_temporary(name) and name != FILE_NAME

    def _matches_globs(self, path: str) -> bool:
        name = path.rpartition("/")[2]
        of_names = tuple(glob for glob in self.globs if "/" not in glob)
        of_paths = tuple(glob for glob in self.globs if "/" in glob)
        return _matches(name, of_names) or _matches(path, of_paths)


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """How a folder is watched."""

    #: Which files are submitted.
    selection: Selection = field(default_factory=Selection)
    #: Whether files are that existed before the folder was first watched.
    existing: bool = False
    #: Seconds without a change after which a file has stopped growing.
    stable_for_s: float = 2.0
    #: What happens to photos afterwards: `keep`, `move:DIR` or `delete`.
    on_success: str = "keep"
    #: Scan the folder regularly, instead of using notifications.
    poll: bool = False
    #: Process what is there, then end; files that still grow or are on hold are left to the next run.
    once: bool = False


def is_photo_folder(name: str) -> bool:
    """Return whether a folder of this name may hold people's photos."""
    return not name.startswith(".") and name.lower() not in SYSTEM_FOLDERS


def is_temporary(name: str) -> bool:
    """Return whether a file of this name is hidden or still being written."""
    return name.startswith(".") or _matches(name, TEMPORARY_GLOBS)


def _matches(text: str, globs: tuple[str, ...]) -> bool:
    return _pattern(globs).match(text.lower()) is not None


@cache
def _pattern(globs: tuple[str, ...]) -> re.Pattern[str]:
    """Compile patterns into one; without any, one that matches nothing."""
    return re.compile("|".join(fnmatch.translate(glob.lower()) for glob in globs) or r"(?!)")
