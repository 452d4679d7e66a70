"""The secret of a server: in a file that only its owner can read, or in SVDQ_SERVE_TOKEN."""

import contextlib
import os
import secrets
import stat
from pathlib import Path

from svdq.pipeline.errors import InputError
from svdq.producer.embedded_redis.socket_path import make_home
from svdq.producer.settings import Settings
from svdq.producer.storage.temporary import temporary_name

#: Name of the file in the home.
FILE_NAME = "serve-token"
#: Bytes of randomness in a new token.
NUM_BYTES = 32
#: Least length of a token, in characters.
MIN_LENGTH = 16


def find_token(settings: Settings) -> tuple[str, bool]:
    """Return the token, created on first use, and whether it is new.

    Raises:
        InputError: the token is too short, or its file cannot be used or can be read by others.
    """
    if settings.serve_token is not None:
        return settings.serve_token, False
    path = token_file(settings)
    try:
        is_new = not path.exists() and _create(path)
        return _read(path), is_new
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"The token file {str(path)!r} cannot be used ({reason}); correct its rights, or set SVDQ_SERVE_TOKEN."
        ) from error


def token_file(settings: Settings) -> Path:
    """Return the path of the token's file."""
    return settings.home / FILE_NAME


def _create(path: Path) -> bool:
    """Create the file whole, unless another process is faster; return whether this one did."""
    make_home(path.parent)
    temporary = path.with_name(f".{temporary_name()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(f"{secrets.token_urlsafe(NUM_BYTES)}\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)  # fails where there is one, unlike a rename
            return True
    finally:
        temporary.unlink(missing_ok=True)
    return False


def _read(path: Path) -> str:
    with path.open(encoding="ascii") as file:
        status = os.fstat(file.fileno())
        token = file.read(4096).strip()
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise InputError(f"Others can read the token file {str(path)!r}; run `chmod 600` on it, or delete it.")
    if len(token) < MIN_LENGTH or not token.isprintable() or " " in token:
        raise InputError(f"The token file {str(path)!r} holds no token; delete it to have a new one made.")
    return token
