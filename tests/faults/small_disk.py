"""A disk of its own for a storage, so small that it can be filled; only where this user may mount one."""

import subprocess
import time
from pathlib import Path

#: Its size as `mount` takes it, and the bytes of a piece that fills it.
SIZE = "16m"
PIECE_BYTES = 4096
FILL_EVERY_S = 0.02  # seconds between looks for room that somebody else has made


class SmallDisk:
    """A tmpfs."""

    def __init__(self, folder: Path) -> None:
        """Mount it on an existing folder, if that is allowed."""
        self._folder = folder
        command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
        try:
            self.mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
        except FileNotFoundError:
            self.mounted = False

    def fill(self, seconds: float) -> None:
        """Keep it full to the last block for a while."""
        filler = self._folder / "filler"
        until = time.monotonic() + seconds
        with filler.open("wb", buffering=0) as file:
            while time.monotonic() < until:
                try:
                    file.write(bytes(PIECE_BYTES))
                except OSError:
                    time.sleep(FILL_EVERY_S)
        filler.unlink()

    def unmount(self) -> None:
        """Give it up with all that is on it."""
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self._folder)], check=True)
