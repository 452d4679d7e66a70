"""Finds photos by paths, folders, patterns such as `holiday/*.jpg`, and lists of paths. Does not open photos."""

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from svdq.pipeline.errors import InputError
from svdq.producer.submitting.options import as_flag
from svdq.producer.submitting.photos import safe_name, source_path
from svdq.producer.submitting.prompts import prompt_path

#: Suffixes of photos in folders.
SUFFIXES = frozenset(
    f".{ending}"
    for ending in (
        *("jpg", "jpeg", "jpe", "jfif", "mpo", "png", "webp", "avif", "tif", "tiff", "gif", "bmp", "jp2", "j2k"),
        *("ppm", "pgm", "pbm", "pnm", "heic", "heif", "hif"),
    )
)
#: Folders that systems create for thumbnails and deleted files, in lower case.
SYSTEM_FOLDERS = frozenset(
    {"@eadir", "#recycle", "$recycle.bin", "__macosx", "lost+found", "system volume information"}
)
#: Argument for paths on standard input.
STDIN = "-"


@dataclass(frozen=True, slots=True)
class Source:
    """A photo file."""

    path: Path
    #: Its folder relative to the given folder, such as `day 1/morning`; "" for the given folder itself.
    folder: str = ""
    #: Name of the given folder; "" for a file that was given itself.
    root: str = ""

    @property
    def source(self) -> str:
        """Where it is, from the given folder on; of a file, from its own folder on."""
        root = self.root or os.path.basename(os.path.dirname(os.path.abspath(self.path)))
        return source_path(root, *self.folder.split("/"), self.path.name)


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The photo files found."""

    #: In the order given; the files of a folder by name.
    photos: tuple[Source, ...]
    #: Number of files in folders and patterns that are neither photos by their suffix nor prompts beside them.
    num_others: int


def is_photo_folder(name: str) -> bool:
    """Return whether a folder of this name may hold people's photos."""
    return not name.startswith(".") and name.lower() not in SYSTEM_FOLDERS


def find_photos(
    words: Sequence[str],
    *,
    recursive: bool = False,
    stdin: BinaryIO | None = None,
    storage: Path | None = None,
    spell: Callable[[str], str] = as_flag,
) -> Sources:
    """Find the photos for the arguments of a command line.

    A file given by name is included with any suffix. Folders and patterns include the files with the suffix of a
    photo, except hidden ones.

    Args:
        words: files, folders, patterns, or `-` for a list of files and folders on `stdin`.
        recursive: include subfolders, except hidden ones and those of the system.
        stdin: paths separated by newlines or null bytes.
        storage: svdq's own storage folder, which is never searched.
        spell: returns the name of an option for errors.

    Raises:
        InputError: a folder or a pattern has no photos, or cannot be read.
    """
    walk = _Walk(
        recursive=recursive, storage=storage, hint="" if recursive else f"; {spell('recursive')} includes subfolders"
    )
    photos: list[Source] = []
    for word in words:
        if not word:
            raise InputError("An empty path was given; check the variable that it comes from.")
        if word == STDIN and stdin is not None:
            photos += [photo for line in _lines(stdin) for photo in walk.file_or_folder(Path(line))]
        elif glob.has_magic(word) and not os.path.lexists(word):
            photos += walk.pattern(word)
        else:
            photos += walk.file_or_folder(Path(word))
    if not photos:
        raise InputError("There are no paths on standard input; give photos, such as by `find . -name '*.jpg'`.")
    return Sources(photos=tuple(photos), num_others=walk.num_others)


def _lines(stdin: BinaryIO) -> list[str]:
    data = stdin.read()
    lines = data.split(b"\0") if b"\0" in data else data.splitlines()
    return [os.fsdecode(line) for line in lines if line.strip()]


class _Walk:
    """Searches folders."""

    def __init__(self, *, recursive: bool, storage: Path | None, hint: str) -> None:
        self._recursive = recursive
        self._hint = hint
        self._storage = storage.resolve() if storage else None
        self.num_others = 0

    def file_or_folder(self, path: Path) -> list[Source]:
        if not os.path.isdir(path):  # `Path.is_dir` raises errors that are clearer when the file is opened
            return [Source(path)]
        names = self._photos(self._names(path))
        root = os.path.basename(os.path.abspath(path))
        found = [Source(path / name, "/".join(map(safe_name, name.parent.parts)), root) for name in names]
        if not found:
            raise InputError(f"There are no photos in the folder {str(path)!r}{self._hint}.")
        return found

    def pattern(self, pattern: str) -> list[Source]:
        matches = map(Path, sorted(glob.iglob(pattern, recursive=True)))
        left_out = SYSTEM_FOLDERS.difference(map(str.lower, Path(pattern).parts))  # unless the pattern names them
        found = self._photos(
            path
            for path in matches
            if not os.path.isdir(path)
            and left_out.isdisjoint(map(str.lower, path.parts))
            and not self._is_stored(path.parent)
        )
        if not found:
            raise InputError(
                f"There is no photo like {pattern!r} outside of svdq's storage; check the path and the pattern."
            )
        return [Source(path) for path in found]

    def _photos(self, files: Iterator[Path]) -> list[Path]:
        found: list[Path] = []
        others: list[Path] = []
        for path in files:
            (found if path.suffix.lower() in SUFFIXES else others).append(path)
        prompts = {prompt_path(path) for path in found}
        self.num_others += sum(path not in prompts for path in others)
        return found

    def _names(self, folder: Path) -> Iterator[Path]:
        """Yield the files of a folder as paths relative to it."""
        for root, folders, files in os.walk(folder, onerror=_refuse):
            here = Path(root)
            folders[:] = sorted(name for name in folders if self._recursive and not self._is_left_out(here / name))
            yield from (here.relative_to(folder) / name for name in sorted(files) if not name.startswith("."))

    def _is_left_out(self, folder: Path) -> bool:
        return not is_photo_folder(folder.name) or self._is_stored(folder)

    def _is_stored(self, folder: Path) -> bool:
        """Return whether a folder is the storage or inside it."""
        return self._storage is not None and folder.resolve().is_relative_to(self._storage)


def _refuse(error: OSError) -> None:
    raise InputError(
        f"The folder {error.filename!r} cannot be read ({error.strerror}); check its path and rights."
    ) from error
