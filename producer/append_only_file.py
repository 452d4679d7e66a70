"""Repairs the append-only file of the embedded server, whose end a power cut may leave as zeros or garbage.

The server itself cuts an incomplete last command off, and refuses to start with bytes that are no command.
"""

import logging
import os
import re
import shutil
from pathlib import Path
from typing import BinaryIO

from svdq.pipeline.errors import UnavailableError

logger = logging.getLogger(__name__)

FOLDER, MANIFEST = "appendonlydir", "appendonly.aof.manifest"
#: A line of the manifest for an incremental file; the last one is the one that is written.
_INCREMENTAL = re.compile(r"^file (\S+) seq \d+ type i$", re.MULTILINE)
_ARRAY, _STRING = re.compile(rb"\*([1-9]\d{0,8})\r\n"), re.compile(rb"\$(\d{1,10})\r\n")
_COMMAND = re.compile(rb"\*\d+\r\n\$\d+\r\n")


def check_manifest(data: Path) -> None:
    """Raise UnavailableError if the list of the files is gone: the server would begin with an empty database."""
    folder = data / FOLDER
    manifest = folder / MANIFEST
    is_empty = not manifest.exists() or not manifest.stat().st_size
    if is_empty and any(folder.glob("appendonly.aof.*.*.*")):
        raise UnavailableError(
            f"The embedded Redis server has lost the list of its files: {str(manifest)!r} is missing or empty, as "
            "after a power cut. Restore it from a backup, or write it as docs/redis.md says."
        )


def cut_tail(data: Path) -> bool:
    """Cut what is no command off the end of the file that is written, and keep a copy; return whether there was any.

    Nothing is cut where commands follow: that is no power cut, and a person must decide.
    """
    folder = data / FOLDER
    names = _INCREMENTAL.findall((folder / MANIFEST).read_text(errors="replace"))
    path = folder / names[-1] if names else None
    if path is None or not path.is_file():
        return False
    with path.open("r+b") as file:
        end, failed_at = _whole_commands(file)
        file.seek(failed_at)
        rest = file.read()
        if not rest or _COMMAND.search(rest):
            return False
        copy = path.with_name(f"{path.name}.damaged")
        shutil.copyfile(path, copy)
        num_bytes = path.stat().st_size - end
        file.truncate(end)
        os.fsync(file.fileno())
    logger.warning(
        "The last %d bytes of %s were no command, as after a power cut, and were cut off; %s is a copy of before.",
        num_bytes,
        path,
        copy,
    )
    return True


def _whole_commands(file: BinaryIO) -> tuple[int, int]:
    """Return where the whole commands and transactions of an append-only file end, and where it is no command.

    It has the format of requests to the server (valkey.io/topics/protocol): arrays of strings, and lines of `#`.
    """
    end, in_transaction = 0, False
    while True:
        at = file.tell()
        line = file.readline(64)
        words: list[bytes] = []
        if found := _ARRAY.fullmatch(line):
            while len(words) < int(found[1]) and (length := _STRING.fullmatch(file.readline(64))):
                words.append(file.read(int(length[1]) + 2))
                if len(words[-1]) != int(length[1]) + 2 or not words[-1].endswith(b"\r\n"):
                    return end, at
        is_command = found is not None and len(words) == int(found[1])
        if not is_command and not (line.startswith(b"#") and line.endswith(b"\r\n")):
            return end, at
        if words and words[0].upper() == b"MULTI\r\n":
            in_transaction = True
        elif words and words[0].upper() == b"EXEC\r\n":
            in_transaction = False
        if not in_transaction:
            end = file.tell()
