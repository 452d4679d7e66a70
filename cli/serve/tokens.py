"""Tokens of `svdq serve`: one of the server, and one for each person, the owner of what is submitted with it."""

import contextlib
import fcntl
import hashlib
import hmac
import json
import logging
import os
import secrets
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from svdq.pipeline.errors import InputError
from svdq.producer.files import make_home, temporary_name
from svdq.producer.settings import Settings, checked_owner

logger = logging.getLogger(__name__)

MIN_LENGTH = 16  # least length of a token, in characters


def token_file(settings: Settings) -> Path:
    """Return the path of the file of the server's token."""
    return settings.home / "serve-token"


def tokens_file(settings: Settings) -> Path:
    """Return the path of the file of named tokens, a JSON object by name."""
    return settings.home / "serve-tokens.json"


def find_token(settings: Settings) -> str:
    """Return the token of the server, made on first use.

    Raises InputError if the token is too short, or its file cannot be used or can be read by others.
    """
    if settings.serve_token is not None:
        return settings.serve_token
    path = token_file(settings)
    token = _read(path)
    if token is None:
        _write(path, f"{secrets.token_urlsafe()}\n")
        token = _read(path) or ""
    if len(token) < MIN_LENGTH or not (token.isascii() and token.isprintable()) or " " in token:
        raise InputError(f"The file {str(path)!r} holds no token; delete it to have a new one made.")
    return token


def read_tokens(path: Path) -> dict[str, str]:
    """Return the named tokens, by name; raises InputError if others can read the file, or it cannot be used."""
    text = _read(path)
    try:
        found = {} if text is None else json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(token, str) and token for token in found.values()):
        raise InputError(f"The file {str(path)!r} is no JSON object of tokens by name; correct or delete it.")
    return found


def add_token(path: Path, name: str) -> tuple[str, bool]:
    """Return the token of a name, and whether it was made now; raises InputError for a name that is not allowed."""
    try:
        checked_owner(name)
    except ValueError as error:
        raise InputError(f"The name {name!r} is not allowed: {error}.") from error
    with _locked(path):
        tokens = read_tokens(path)
        is_new = name not in tokens
        if is_new:
            tokens[name] = secrets.token_urlsafe()
            _write(path, json.dumps(tokens, indent=1))
    return tokens[name], is_new


def remove_token(path: Path, name: str) -> None:
    """Remove the token of a name; raises InputError if there is none."""
    with _locked(path):
        tokens = read_tokens(path)
        if name not in tokens:
            raise InputError(f"There is no token of {name!r}; `svdq serve token list` lists the names.")
        del tokens[name]
        _write(path, json.dumps(tokens, indent=1))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process at a time change a file; a file beside it is locked, because this one is replaced."""
    lock = path.with_name(f"{path.name}.lock")
    try:
        make_home(path.parent)
        file = open(lock, "a", opener=lambda name, flags: os.open(name, flags, 0o600))  # noqa: SIM115 - closed below
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        raise InputError(f"The token file {str(path)!r} cannot be written ({error.strerror}).") from error
    with file:
        yield


def _read(path: Path) -> str | None:
    """Return the text of a file, None if there is none; raises InputError if others can read it, or it is not text."""
    try:
        mode, text = stat.S_IMODE(path.stat().st_mode), path.read_text("utf-8").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"The token file {str(path)!r} cannot be used ({reason}); correct or delete it.") from error
    if mode & 0o077:
        raise InputError(
            f"Others can read the token file {str(path)!r}; run `chmod 600` on it. If its disk has no such rights, set "
            "SVDQ_HOME to a folder on another disk."
        )
    return text


def _write(path: Path, text: str) -> None:
    """Write a file that only its owner can read, atomically; raises InputError."""
    whole = path.with_name(temporary_name())
    try:
        make_home(path.parent)
        with open(whole, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(text)
        os.replace(whole, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            whole.unlink()
        raise InputError(f"The token file {str(path)!r} cannot be written ({error.strerror}).") from error


def cookie_of(token: str) -> str:
    """Return the value of the cookie for a token; nobody can compute the token from it."""
    return hmac.new(token.encode(errors="replace"), b"svdq serve cookie", hashlib.sha256).hexdigest()


#: Addresses of the documentation's networks: a connection sends nothing, and chooses the interface.
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


def address_of_machine(family: socket.AddressFamily = socket.AF_INET) -> str | None:
    """Return the address by which other devices reach this machine; None if there is none."""
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((_ELSEWHERE[family], 9))
        return str(probe.getsockname()[0])
    return None


class Tokens:
    """The tokens that a server takes: one without a name, and named ones of a file, read again when it has changed."""

    def __init__(self, token: str, path: Path | None = None) -> None:
        self._path = path
        self._state: tuple[int, ...] = ()  # of the file as it was read last; () for no file
        #: Names by the cookies of their tokens. What others send is hashed for the look-up, so its time tells nothing.
        self._names = self._unchanging = {cookie_of(token): ""}

    def name_of(self, token: str) -> str | None:
        """Return the name of a token, "" for the one without a name; None if there is no such token."""
        return self.name_of_cookie(cookie_of(token))

    def name_of_cookie(self, value: str) -> str | None:
        """Return the name of the token whose cookie this is; as `name_of`."""
        self._read_changes()
        return self._names.get(value)

    def _read_changes(self) -> None:
        """Read the file if it has changed; of one that cannot be used, no token is valid."""
        try:
            found = None if self._path is None else self._path.stat()
        except OSError:
            found = None
        state = () if found is None else (found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode)
        if state != self._state:
            self._state, self._names = state, self._unchanging
            try:
                named = read_tokens(self._path) if self._path else {}
            except InputError as error:
                logger.warning("%s", error)
            else:
                self._names = {cookie_of(token): name for name, token in named.items()} | self._unchanging
