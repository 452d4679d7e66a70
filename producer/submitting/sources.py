"""Finds photos by paths, folders and patterns such as `holiday/*.jpg`, and the prompts beside them."""

import codecs
import contextlib
import errno
import glob
import os
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from svdq.pipeline.errors import InputError
from svdq.pipeline.media.image import open_photo
from svdq.pipeline.video_parameters import MAX_PROMPT
from svdq.producer.files import open_regular
from svdq.producer.name_templates import safe_name
from svdq.producer.results.finished_videos import Result
from svdq.producer.settings import given_path
from svdq.producer.submitting.job_spec import NO_OPTIONS, JobSpec
from svdq.producer.submitting.parameters import as_flag
from svdq.producer.submitting.photos import Photo, source_path

SUFFIXES = frozenset(
    f".{ending}"
    for ending in (
        *("jpg", "jpeg", "jpe", "jfif", "mpo", "png", "webp", "avif", "tif", "tiff", "gif", "bmp", "jp2", "j2k"),
        *("ppm", "pgm", "pbm", "pnm", "heic", "heif", "hif"),
    )
)
#: Folders that systems and storage devices create for thumbnails, deleted files and snapshots, in lower case.
SYSTEM_FOLDERS = frozenset(
    {"@eadir", "@recycle", "@recently-snapshot", "#recycle", "#snapshot", "$recycle.bin", "recycler", "__macosx"}
    | {"lost+found", "system volume information", "found.000", "ipod photo cache", "trash"}
)
#: Endings of folders in which photo programs keep their own copies and previews.
LIBRARIES = (
    *(".photoslibrary", ".photolibrary", ".migratedphotolibrary", ".aplibrary"),  # of Apple's
    *(".lrdata", ".lrlibrary", ".cocatalog"),  # of Lightroom, and of Capture One
)
SUFFIX = ".txt"
LAST = ".last"  # what the name of a photo has before its suffix if it is the last frame of the photo without that
MAX_BYTES = 1 << 16  # bytes; the longest prompt has less


@dataclass(frozen=True, kw_only=True, slots=True)
class PhotoRequest:
    """A photo and the videos to make of it."""

    path: Path = Path()
    spec: JobSpec = NO_OPTIONS
    source: str = ""  # as in `Photo`; "" for its own folder and name
    below: str = ""  # its folder in the submitted one, such as `day 1/morning`; "" for that itself
    where: str = ""  # prefix of errors: where the user asked for it, such as `list.csv, line 7: `
    photo: Photo | None = None  # once it is checked; of an upload, with its bytes
    last: Path | None = None  # the photo of the last frame, until `photo` has it
    result: Result | None = None  # in place of a photo, a finished video that is to be upscaled


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The photo files found, in the order given; the files of a folder by name."""

    photos: tuple[PhotoRequest, ...]
    num_others: int  # files in folders and patterns that are neither photos nor their prompts
    num_below: int = 0  # photos in subfolders of folders that were given without `recursive`


def is_photo_folder(name: str) -> bool:
    """Return whether a folder of this name may hold people's photos."""
    return not name.startswith(".") and name.lower() not in SYSTEM_FOLDERS and not name.lower().endswith(LIBRARIES)


def find_photos(
    words: Sequence[str],
    *,
    recursive: bool = False,
    stdin: BinaryIO | None = None,
    storage: Path | None = None,
    spell: Callable[[str], str] = as_flag,
) -> Sources:
    """Find photos for `words`: files with any suffix, folders, patterns, or `-` for a list, by lines or null bytes.

    `cup.last.jpg` is the last frame of `cup.jpg` where both are found, and else a photo as any other. Hidden folders,
    folders of the system and svdq's own storage are left out; `spell` returns the name of an option
    for errors. Raises InputError if a folder or a pattern has no photos, or cannot be read.
    """
    walk = _Walk(recursive, storage and storage.resolve(), spell("recursive"))
    photos: list[PhotoRequest] = []
    for word in words:
        if not word:
            raise InputError("An empty path was given; check the variable that it comes from.")
        if word == "-" and stdin is not None:
            photos += [photo for line in _lines(stdin) for photo in walk.file_or_folder(given_path(line))]
            continue
        word = os.fspath(given_path(word)) if word.startswith("~") else word
        if glob.has_magic(word) and not os.path.lexists(word):
            photos += walk.pattern(word)
        else:
            photos += walk.file_or_folder(Path(word))
    if not photos:
        raise InputError("There are no paths on standard input; give photos, such as by `find . -name '*.jpg'`.")
    return Sources(photos=tuple(_in_pairs(photos)), num_others=walk.num_others, num_below=walk.num_below)


def _in_pairs(photos: Sequence[PhotoRequest]) -> Iterator[PhotoRequest]:
    """Make `cup.last.jpg` the last frame of `cup.jpg` where both are among the photos."""
    stems = {_same(photo.path.with_suffix("")) for photo in photos}
    lasts: dict[Path, Path] = {}
    for photo in photos:
        stem = photo.path.with_suffix("")
        if stem.suffix.lower() == LAST and (first := _same(stem.with_suffix(""))) in stems:
            lasts.setdefault(first, photo.path)
    used = set(lasts.values())
    for photo in photos:
        if photo.path not in used:
            yield replace(photo, last=lasts.get(_same(photo.path.with_suffix(""))))


def _same(path: Path) -> Path:
    """Return what paths have in common whose names people take for the same: upper case and accents may differ."""
    return path.with_name(unicodedata.normalize("NFC", path.name).casefold()) if path.name else path


def _lines(stdin: BinaryIO) -> list[str]:
    data = stdin.read()
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or _is_utf16(data):
        raise InputError("The list on standard input is UTF-16; write it as UTF-8, by `iconv -f UTF-16 -t UTF-8`.")
    data = data.removeprefix(codecs.BOM_UTF8)
    if _is_photo(data):
        raise InputError("Standard input is a photo, and takes a list of paths; give the photo by its path.")
    lines = data.split(b"\0") if b"\0" in data else data.splitlines()
    return [os.fsdecode(line) for line in lines if line.strip()]


def _is_utf16(data: bytes) -> bool:
    """Return whether a list has a zero byte beside each character of its first path; no path is one character long."""
    first = data[:8]
    return len(first) >= 4 and (not any(first[1::2]) or not any(first[::2]))


def _is_photo(data: bytes) -> bool:
    try:
        open_photo(data).close()
    except Exception:  # noqa: BLE001 - Pillow's plugins raise many types
        return False
    return True


@dataclass
class _Walk:
    recursive: bool
    storage: Path | None
    recursive_flag: str
    num_others: int = 0
    num_below: int = 0

    def file_or_folder(self, path: Path) -> list[PhotoRequest]:
        path = as_stored(path)
        if not os.path.isdir(path):  # `Path.is_dir` raises errors that are clearer when the file is opened
            return [_file(path)]
        names = self._photos(self._names(path, recursive=self.recursive))
        root = os.path.basename(os.path.abspath(path))
        found = [
            PhotoRequest(
                path=path / name,
                below="/".join(map(safe_name, name.parent.parts)),
                source=source_path(root, *name.parts),
            )
            for name in names
        ]
        if not found:
            hint = "" if self.recursive else f"; {self.recursive_flag} includes subfolders"
            raise InputError(f"There are no photos in the folder {str(path)!r}{hint}.")
        if not self.recursive:
            with contextlib.suppress(InputError):  # a subfolder that cannot be read
                everything = self._names(path, recursive=True)
                self.num_below += sum(name.suffix.lower() in SUFFIXES and name.parent != Path() for name in everything)
        return found

    def pattern(self, pattern: str) -> list[PhotoRequest]:
        matches = map(Path, sorted(glob.iglob(_without_magic_folders(pattern), recursive=True)))
        left_out = SYSTEM_FOLDERS.difference(map(str.lower, Path(pattern).parts))  # unless the pattern names them
        found = self._photos(
            path
            for path in matches
            if not os.path.isdir(path)
            and left_out.isdisjoint(map(str.lower, path.parts))
            and not any(part.lower().endswith(LIBRARIES) for part in path.parts)
            and not self._is_stored(path.parent)
        )
        if not found:
            raise InputError(
                f"There is no photo like {pattern!r} outside of svdq's storage; check the path and the pattern."
            )
        return [_file(path) for path in found]

    def _photos(self, files: Iterator[Path]) -> list[Path]:
        paths = list(files)
        found = [path for path in paths if path.suffix.lower() in SUFFIXES]
        prompts = {_same(photo.with_suffix(SUFFIX)) for photo in found}
        others = (path for path in {*paths}.difference(found) if _same(path) not in prompts)
        self.num_others += sum(1 for _ in others)
        return found

    def _names(self, folder: Path, *, recursive: bool) -> Iterator[Path]:
        """Yield the files of a folder as paths relative to it."""
        for root, folders, files in os.walk(folder, onerror=_refuse):
            here = Path(root)
            searched = sorted(filter(is_photo_folder, folders)) if recursive else []
            folders[:] = [name for name in searched if not self._is_stored(here / name)]
            yield from (here.relative_to(folder) / name for name in sorted(files) if not name.startswith("."))

    def _is_stored(self, folder: Path) -> bool:
        return self.storage is not None and folder.resolve().is_relative_to(self.storage)


def _file(path: Path) -> PhotoRequest:
    """Return the request for a file that was given itself: it is from its own folder on."""
    folder = os.path.basename(os.path.dirname(os.path.abspath(path)))
    return PhotoRequest(path=path, source=source_path(folder, path.name))


def _without_magic_folders(pattern: str) -> str:
    """Escape the folders of a pattern that exist as they are written, such as `trip [2024]`."""
    parts = Path(pattern).parts
    for number in range(len(parts) - 1, 0, -1):
        folder = os.path.join(*parts[:number])
        if os.path.isdir(folder):
            return os.path.join(glob.escape(folder), *parts[number:])
    return pattern


def _refuse(error: OSError) -> None:
    raise InputError(
        f"The folder {error.filename!r} cannot be read ({error.strerror}); check its path and rights."
    ) from error


def spellings(stem: str, suffix: str) -> list[str]:
    """Return paths that people may give a file beside a photo: in small or capital letters, with accents in both forms.

    `stem` is the path of the photo without its suffix. Its folder is not listed for it, which may be large.
    """
    folder, name = os.path.split(stem)
    forms = (name, *(unicodedata.normalize(form, name) for form in ("NFC", "NFD")))
    cases = (str, str.lower, str.upper, str.capitalize)
    stems = dict.fromkeys(change(form) for change in cases for form in forms)
    return [os.path.join(folder, each + ending) for each in stems for ending in (suffix, suffix.upper())]


def as_stored(path: Path) -> Path:
    """Return a path with the accents of each name in the form of the file system: a list may come from another one."""
    if "\0" in str(path) or os.path.lexists(path):
        return path
    found = Path(path.anchor)
    for name in path.parts[len(found.parts) :]:
        forms = (name, *(unicodedata.normalize(form, name) for form in ("NFC", "NFD")))
        found /= next((form for form in forms if os.path.lexists(found / form)), name)
    return found


def prompt_path(photo: Path) -> Path | None:
    """Return the path of the prompt of a photo, or of the one that it may get; None if that is the photo's own."""
    if photo.suffix.lower() == SUFFIX:
        return None
    paths = spellings(str(photo.with_suffix("")), SUFFIX)
    return Path(next(filter(os.path.lexists, paths), paths[0]))


def usable_prompt(photo: Path) -> str:
    """Return the prompt beside a photo; "" if there is none, or a text that cannot be one."""
    with contextlib.suppress(InputError):
        prompt = read_prompt(path) if (path := prompt_path(photo)) else None
        return prompt if prompt and len(prompt) <= MAX_PROMPT else ""
    return ""


def read_prompt(path: Path) -> str | None:
    """Return the prompt in a file, or None if there is no such file; raises InputError as `parse_prompt`."""
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
    """Return the text of a prompt, with runs of white space as one space; InputError if it is too long or not UTF-8."""
    if len(data) > MAX_BYTES:
        raise InputError(f"The prompt {str(path)!r} has more than {MAX_BYTES:,} bytes; shorten it.")
    try:
        return " ".join(data.decode("utf-8-sig").split())
    except UnicodeDecodeError as error:
        raise InputError(f"The prompt {str(path)!r} is not UTF-8; save it as UTF-8.") from error
