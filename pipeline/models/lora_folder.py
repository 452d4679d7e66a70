"""The LoRAs for jobs: files of a folder, by their names and by what is in them. Does not import torch."""

import hashlib
import os
import stat
from pathlib import Path
from typing import Any

from svdq.pipeline.models.model_file import LORA_SUFFIXES

#: Bytes of LoRAs that stay on a GPU for later videos, besides the LoRAs of the present one.
KEPT_BYTES = 2**31
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096  # samples of a file for its digest, and the bytes of each


class LoraFolder:
    """The LoRAs in a folder and the folders in it, as in ComfyUI's `models/loras`; None is an empty one."""

    def __init__(self, folder: Path | None) -> None:
        """Read nothing yet."""
        self.folder = folder
        #: The digest of each file that was read, by its path, size in bytes and time of change in nanoseconds.
        self._known: dict[tuple[Path, int, int], str] = {}

    def digests(self) -> dict[str, str]:
        """Return the digest of each LoRA by its name: its path in the folder without `.safetensors`.

        Files that cannot be read are left out; those that have not changed are not read again.
        """
        return {path.relative_to(self.folder or path).with_suffix("").as_posix(): key for path, key in self._files()}

    def find(self, digest: str) -> Path | None:
        """Return the file with a digest, None if the folder has none."""
        return next((path for path, found in self._files() if found == digest), None)

    def _files(self) -> list[tuple[Path, str]]:
        known: dict[tuple[Path, int, int], str] = {}
        seen: set[str] = set()
        # People link to files, and to folders, of other programs; those may link back.
        for folder, folders, names in os.walk(self.folder, followlinks=True) if self.folder else ():
            if (real := os.path.realpath(folder)) in seen:
                folders.clear()
                continue
            seen.add(real)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(names):
                path = Path(folder, name)
                try:
                    about = path.stat()
                    if name.startswith(".") or path.suffix not in LORA_SUFFIXES or not stat.S_ISREG(about.st_mode):
                        continue
                    key = (path, about.st_size, about.st_mtime_ns)
                    known[key] = self._known.get(key) or digest_of(path)
                except OSError:
                    continue
        self._known = known
        return [(path, digest) for (path, _, _), digest in known.items()]


NO_LORAS = LoraFolder(None)


def digest_of(file: Path) -> str:
    """Return a hash of the size and of samples of a file: 16 hexadecimal digits, the same on all machines."""
    digest = hashlib.sha256()
    add_samples(digest, file)
    return digest.hexdigest()[:16]


def add_samples(digest: Any, file: Path) -> None:
    """Add the size and samples of a file to a hash.

    Reading gigabytes would take minutes, and other weights of a model differ nearly everywhere.
    """
    size = file.stat().st_size
    digest.update(f"{size} ".encode())
    with file.open("rb", buffering=0) as opened:
        for position in range(0, size, max(_SAMPLE_BYTES, size // _NUM_SAMPLES)):
            opened.seek(position)
            digest.update(opened.read(_SAMPLE_BYTES))
