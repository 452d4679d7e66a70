"""Files written whole under temporary names that identify their process, regular files only, and private folders."""

import contextlib
import errno
import os
import pwd
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Sequence
from io import BufferedReader
from pathlib import Path

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.producer.processes import is_running, scope, start_of

#: `<scope>@<process id>.<start of the process>-<random>`.
_NAME = re.compile(r"(?P<scope>[0-9a-f]{12}|x[0-9a-f]+)@(?P<pid>\d{1,10})\.(?P<start>\d{0,20})-[0-9a-f]{16}(?:\.old)?")


def temporary_name(prefix: str = "") -> str:
    """Return an unused name; `sweep` removes only files and folders with such names."""
    pid = os.getpid()
    return f"{prefix}{scope()}@{pid}.{start_of(pid) or ''}-{secrets.token_hex(8)}"


def sweep(paths: Iterable[Path], prefix: str = "", abandoned_s: float = 24 * 60 * 60) -> None:
    """Remove what `temporary_name` named for processes that have ended, or may have and is `abandoned_s` old."""
    for path in paths:
        found = _NAME.fullmatch(path.name.removeprefix(prefix))
        if not path.name.startswith(prefix) or found is None:
            continue
        with contextlib.suppress(OSError):  # its owner has just removed it
            is_alive = is_running(int(found["pid"]), found["start"], found["scope"])
            if is_alive is None:
                is_alive = time.time() - path.stat().st_mtime <= abandoned_s
            if not is_alive:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()


def check_target(path: Path, suffixes: Sequence[str]) -> None:
    """Check that a file can be written and has one of the suffixes (() allows any); raises InputError."""
    if suffixes and path.suffix.lower() not in suffixes:
        raise InputError(f"{str(path)!r} cannot be written to: give a file whose name ends in {' or '.join(suffixes)}.")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise InputError(f"There is no folder {str(folder)!r} to write {path.name!r} to; make it first.")
    # A device or a folder must not be replaced.
    if (path.exists() and not path.is_file()) or not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"The file {str(path)!r} cannot be written; check the rights of its folder, or give another.")


def write_file(path: Path, parts: Iterable[str]) -> None:
    """Write a file atomically, but a link or a device such as /dev/stdout in place; raises InputError.

    A file that is replaced leaves its permissions to the new one.
    """
    target = path.absolute().with_name(f".{temporary_name()}") if is_regular(path) else path
    try:
        with target.open("w", encoding="utf-8") as file:
            if target != path and path.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            file.writelines(parts)
        if target != path:
            os.replace(target, path)
    except OSError as error:
        raise InputError(f"The file {str(path)!r} cannot be written ({error.strerror}); give another place.") from error
    finally:
        if target != path:
            target.unlink(missing_ok=True)


def create_file(path: Path, text: str) -> bool:
    """Write a new file atomically; return False if there is one, which stays as it is. Raises InputError."""
    whole = path.absolute().with_name(f".{temporary_name()}")
    try:
        whole.write_text(text, encoding="utf-8")
        try:
            os.link(whole, path)
        except FileExistsError:
            return False
        except OSError:  # some file systems, such as exFAT, have no hard links
            if os.path.lexists(path):
                return False
            os.replace(whole, path)
    except OSError as error:
        raise InputError(f"The file {str(path)!r} cannot be written ({error.strerror}); give another place.") from error
    finally:
        whole.unlink(missing_ok=True)
    return True


def is_regular(path: Path) -> bool:
    """Return whether a path is a regular file or does not exist."""
    return not path.is_symlink() and (path.is_file() or not path.exists())


def open_regular(path: Path | str, flags: int = 0, *, folder: int | None = None) -> BufferedReader:
    """Open a regular file, relative to the open `folder`, without blocking; raises OSError or ValueError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags, dir_fd=folder)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def private_folder(folder: Path) -> Path:
    """Create a folder that only we can enter; refuse one that another user created in a shared place."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise UnavailableError(
            f"{str(folder)!r} is not a folder of this user; remove it, or set SVDQ_HOME to another folder."
        )
    if stat.S_IMODE(status.st_mode) != 0o700:
        folder.chmod(0o700)
    return folder


def make_home(home: Path) -> None:
    """Create SVDQ_HOME unless it exists, closed to other users whatever the umask is; raises OSError."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    close_home(home)


def unusable(folder: Path, error: OSError) -> str:
    """Say why a folder cannot be used, and whose it is if it belongs to another user."""
    reason = error.strerror or str(error)
    there = next((path for path in (folder, *folder.parents) if path.exists()), None)
    with contextlib.suppress(OSError, KeyError):
        if there is not None and there.stat().st_uid != os.getuid():
            return f"{reason}; {str(there)!r} belongs to {pwd.getpwuid(there.stat().st_uid).pw_name}"
    return reason


def close_home(home: Path) -> None:
    """Close an existing SVDQ_HOME to other users if it is ours; raises OSError."""
    status = home.stat()
    if status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) & 0o077:
        home.chmod(0o700)
