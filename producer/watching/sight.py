"""Seeing what lies in a watched folder and was not dealt with: by hints of changes, and by looking at all of it.

Knows no queue and opens no photo.
"""

import time

from svdq.pipeline.errors import UnavailableError
from svdq.producer.watching.changes import Changes, Polling
from svdq.producer.watching.events import Troubles
from svdq.producer.watching.ledger import Ledger, Record, State
from svdq.producer.watching.settling import Settling, Signature
from svdq.producer.watching.tree import Files, Tree

#: Seconds between looks at the whole folder: without hints, and with them, in case one was lost.
POLL_S, RESCAN_S = 2.0, 60.0
#: Looking at the whole folder takes at most this share of the time.
MAX_SHARE = 0.1
#: Seconds between clean-ups of the ledger.
FORGET_EVERY_S = 24 * 60 * 60


class Sight:
    """Puts every file that is to be taken among those that are waited for."""

    def __init__(
        self, tree: Tree, ledger: Ledger, changes: Changes, settling: Settling, troubles: Troubles, *, existing: bool
    ) -> None:
        """Make it.

        Args:
            tree: the folder.
            ledger: what was dealt with.
            changes: hints.
            settling: where files are put.
            troubles: is told what is wrong with the folder.
            existing: whether files are wanted that were left alone before.
        """
        self._tree = tree
        self._ledger = ledger
        self._changes = changes
        self._settling = settling
        self._troubles = troubles
        self._existing = existing
        self._look_at_s = self._forget_at_s = 0.0
        self._root_id: tuple[int, int] | None = None
        #: Folders that were just made, and when to look at them again.
        self._new: dict[str, float] = {}

    def look(self) -> None:
        """Look at what it is time to look at.

        Raises:
            UnavailableError: the ledger cannot be used.
        """
        now_s = time.monotonic()
        for folder in [folder for folder, at_s in self._new.items() if at_s <= now_s]:
            del self._new[folder]
            self._see_tree(folder)
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + POLL_S
            self._look_at_all()

    def note(self, paths: set[str] | None) -> None:
        """Look at paths that may have changed, from the watched folder on, or at all of it."""
        if paths is None:
            self._look_at_s = 0.0
            return
        try:
            for path in sorted(paths):
                if (signature := self._tree.look(path)) is not None:
                    self._see(path, self._ledger.get(path), signature)
                elif self._tree.is_folder(path):
                    self._see_tree(path)
                    # Once more, for the kernel tells of what is in a new folder a moment later than we look.
                    self._new[path] = time.monotonic() + POLL_S
        except UnavailableError:
            self._look_at_s = 0.0

    def _look_at_all(self) -> None:
        started_s = time.monotonic()
        root = self._tree.root
        try:
            status = root.stat()
            for folder, files in self._tree.scan():
                self._see_folder(folder, files)
        except OSError as error:
            self._troubles.begin("folder", f"The folder {str(root)!r} cannot be read ({error.strerror}).")
            return
        self._troubles.end("folder", f"The folder {str(root)!r} can be read again.")
        if self._root_id is not None and self._root_id != (status.st_dev, status.st_ino):
            # It was mounted, or made anew: what seemed to be gone may be there.
            self._changes.restart()
            self._forget_at_s = 0.0
        self._root_id = (status.st_dev, status.st_ino)
        if started_s >= self._forget_at_s:
            self._forget_at_s = started_s + FORGET_EVERY_S
            self._ledger.forget_gone(root)
        if self._changes.trouble:
            self._troubles.begin("changes", f"Changes are not told ({self._changes.trouble}); the folder is polled.")
        else:
            self._troubles.end("changes", "Changes are told again.")
        ended_s = time.monotonic()
        interval_s = POLL_S if self._changes.trouble or isinstance(self._changes, Polling) else RESCAN_S
        self._look_at_s = ended_s + max(interval_s, (ended_s - started_s) / MAX_SHARE)

    def _see_tree(self, path: str) -> None:
        try:
            for folder, files in self._tree.scan(path):
                self._see_folder(folder, files)
        except OSError:  # it is gone already, or may not be read
            return

    def _see_folder(self, folder: str, files: Files) -> None:
        known = self._ledger.in_folder(folder)
        for name, signature in files.items():
            self._see(f"{folder}/{name}" if folder else name, known.get(name), signature)

    def _see(self, path: str, record: Record | None, signature: Signature) -> None:
        if record is not None and record.signature == signature:
            settled = (State.DONE, State.BAD) if self._existing else (State.DONE, State.BAD, State.LEFT)
            if record.state in settled or (record.state is State.OTHER and not self._tree.takes(path)):
                return
        self._settling.see(path, signature, time.monotonic())
