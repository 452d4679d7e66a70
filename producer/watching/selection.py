"""Which names in a watched folder are photos to be taken, by their names alone. Pure: opens nothing."""

import fnmatch
import re
from dataclasses import dataclass
from functools import cache, cached_property

from svdq.producer.settings import FILE_NAME
from svdq.producer.submitting.sources import SUFFIXES

#: What is taken unless globs are given.
PHOTO_GLOBS = tuple(f"*{suffix}" for suffix in sorted(SUFFIXES))

#: Files that are still being written, or never were photos: browsers, copy programs, editors, synchronisers.
#: What begins with a dot is left out besides, as are the temporary files of rsync, lftp, Nextcloud and others.
TEMPORARY_GLOBS = (
    *("~*", "*~", "*.tmp", "*.temp", "*.part", "*.partial", "*.filepart", "*.crdownload", "*.download"),
    *("*.opdownload", "*.aria2", "*.!qb", "*.!ut", "*.gstmp"),
)

#: Folders that systems put beside people's own, with thumbnails and what was thrown away.
SYSTEM_FOLDERS = frozenset(
    {"@eadir", "#recycle", "$recycle.bin", "__macosx", "lost+found", "system volume information"}
)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which photos of a folder are taken. Globs do not mind upper and lower case, for cameras write `IMG_1.JPG`."""

    #: Whether photos in folders of the folder are.
    recursive: bool = False
    #: Patterns of names; those with a slash are for the path from the watched folder.
    globs: tuple[str, ...] = PHOTO_GLOBS

    def takes(self, path: str) -> bool:
        """Whether a file is taken, by its path from the watched folder, with slashes."""
        return self._is_open(path) and self._matches_globs(path)

    def sees(self, path: str) -> bool:
        """Whether a file is taken or, where all photos are wanted, is told of because by its name it is none."""
        return self._is_open(path) and (self.globs == PHOTO_GLOBS or self._matches_globs(path))

    def _is_open(self, path: str) -> bool:
        *folders, name = path.split("/")
        if (folders and not self.recursive) or not all(map(is_plain_folder, folders)):
            return False
        return not is_temporary(name) and name != FILE_NAME

    def _matches_globs(self, path: str) -> bool:
        name = path.rpartition("/")[2]
        return _matches(name, self._name_globs) or _matches(path, self._path_globs)

    @cached_property
    def _name_globs(self) -> tuple[str, ...]:
        return tuple(glob for glob in self.globs if "/" not in glob)

    @cached_property
    def _path_globs(self) -> tuple[str, ...]:
        return tuple(glob for glob in self.globs if "/" in glob)


def is_plain_folder(name: str) -> bool:
    """Whether a folder of this name may hold people's photos."""
    return not name.startswith(".") and name.lower() not in SYSTEM_FOLDERS


def is_temporary(name: str) -> bool:
    """Whether a file of this name is hidden or still on its way."""
    return name.startswith(".") or _matches(name, TEMPORARY_GLOBS)


def _matches(text: str, globs: tuple[str, ...]) -> bool:
    return _pattern(globs).match(text.lower()) is not None


@cache
def _pattern(globs: tuple[str, ...]) -> re.Pattern[str]:
    """Make one pattern of all, for big folders have many names to look at; of none, one that nothing matches."""
    return re.compile("|".join(fnmatch.translate(glob.lower()) for glob in globs) or r"(?!)")
