"""What happens to a file after its photo was submitted (kept, moved or deleted) or found to be no photo (rejected).

A file is first renamed into a private folder and compared with the version that was submitted: a newer version that
takes its name meanwhile is neither moved nor deleted.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from svdq.pipeline.errors import InputError
from svdq.producer.watching.directory import Signature, exists, free_names, move, open_folder, split

#: Folder in the watched folder for files that are no photos.
REJECTED = "rejected"
#: Folder beside a file that is being moved or deleted.
MOVING = ".svdq-moving"


@dataclass(frozen=True, kw_only=True)
class PostSubmit:
    """What happens to photos after they were submitted."""

    #: The watched folder, resolved.
    root: Path
    #: Whether photos stay where they are; then no file is ever changed.
    keep: bool
    #: Folder that they are moved to, or None; `subfolder` below it is reached without following links.
    target: Path | None = None
    subfolder: str = ""

    @classmethod
    def parse(cls, text: str, root: Path) -> "PostSubmit":
        """Parse `keep`, `move:DIR` or `delete`; a relative DIR is in the watched folder.

        Raises:
            InputError: it is none of them, or would move photos to where they are.
        """
        action, _, folder = text.partition(":")
        if action == "move" and folder.strip():
            target = Path(os.path.normpath(root / os.path.expanduser(folder)))
            if not target.is_relative_to(root):
                target = target.resolve()
            if target == root:
                raise InputError(f"--on-success {text} is not allowed: the photos are there already; name another DIR.")
            if target.is_relative_to(root):
                return cls(root=root, keep=False, target=root, subfolder=target.relative_to(root).as_posix())
            return cls(root=root, keep=False, target=target)
        if text not in ("keep", "delete"):
            raise InputError(f"--on-success {text} is not allowed: it must be keep, move:DIR or delete.")
        return cls(root=root, keep=text == "keep")

    @property
    def target_folder(self) -> Path | None:
        """The folder that photos are moved to, or None."""
        return self.target / self.subfolder if self.target else None

    def prepare(self) -> None:
        """Create the target folder and check that photos can be moved.

        Raises:
            InputError: they cannot.
        """
        try:
            if not self.keep and not os.access(self.root, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.root))
            if self.target is not None:
                self.target.mkdir(parents=True, exist_ok=True)
                with open_folder(self.target, self.subfolder, create=True):
                    pass
        except OSError as error:
            raise InputError(
                f"Photos cannot be moved or deleted in {str(self.target_folder or self.root)!r} ({error.strerror}); "
                "check the folder and its permissions, or leave photos where they are with --on-success keep."
            ) from error

    def finish(self, path: str, signature: Signature) -> None:
        """Move or delete a photo that was submitted, unless it was replaced since.

        Raises:
            OSError: it cannot be moved or deleted.
        """
        if self.keep:
            return
        folder, name = split(path)
        with _claimed(self.root, path, signature) as claimed:
            if claimed is None:
                return
            if self.target is None:
                os.unlink(name, dir_fd=claimed)
                return
            with open_folder(self.target, f"{self.subfolder}/{folder}", create=True) as target:
                move(name, claimed, target, name)


def reject(root: Path, path: str, signature: Signature, reason: str) -> Path | None:
    """Move a file to `rejected/` with the reason beside it in a .txt; return its new path, or None if it was replaced.

    Raises:
        OSError: it cannot be moved.
    """
    folder, name = split(path)
    with (
        _claimed(root, path, signature) as claimed,
        open_folder(root, f"{REJECTED}/{folder}", create=True) as target,
    ):
        if claimed is None:
            return None
        for free_name in free_names(name):
            if exists(free_name, target):
                continue
            note = f"{free_name}.txt"
            try:
                descriptor = os.open(note, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666, dir_fd=target)
            except FileExistsError:
                continue
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(f"{reason}\n")
                return root / REJECTED / folder / move(name, claimed, target, free_name)
            except OSError:
                os.unlink(note, dir_fd=target)
                raise
    raise AssertionError("names do not end")


def restore(folder: int) -> None:
    """Move the files that a killed watcher had claimed in an open folder back to their names."""
    with contextlib.suppress(OSError), _entered(MOVING, folder) as claimed:
        for name in os.listdir(claimed):
            move(name, claimed, folder, name)


@contextlib.contextmanager
def _claimed(root: Path, path: str, signature: Signature) -> Iterator[int | None]:
    """Rename a file into a private folder and yield that, or None if it is another version; put back what is left."""
    folder, name = split(path)
    with open_folder(root, folder) as here:
        os.mkdir(MOVING, 0o700, dir_fd=here)
        with _entered(MOVING, here) as claimed:
            os.rename(name, name, src_dir_fd=here, dst_dir_fd=claimed)
            try:
                found = Signature.of(os.stat(name, dir_fd=claimed, follow_symlinks=False))
                yield claimed if found == signature else None
            finally:
                if exists(name, claimed):
                    move(name, claimed, here, name)


@contextlib.contextmanager
def _entered(name: str, folder: int) -> Iterator[int]:
    """Open a private folder, and remove it in the end if it is empty."""
    descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=folder)
