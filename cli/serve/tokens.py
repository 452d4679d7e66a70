"""Named tokens of `svdq serve`: one for each person, whose name is the owner of what is submitted with it."""

import contextlib
import hashlib
import hmac
import json
import logging
import os
import secrets
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from svdq.pipeline.errors import InputError
from svdq.producer.files import make_home, temporary_name
from svdq.producer.settings import Settings, checked_owner

logger = logging.getLogger(__name__)

FILE_NAME = "serve-tokens.json"  # in the home: an object of tokens by name


def tokens_file(settings: Settings) -> Path:
    """Return the path of the file of named tokens."""
    return settings.home / FILE_NAME


def read_tokens(path: Path) -> dict[str, str]:
    """Return the named tokens, by name; raises InputError if others can read the file, or it cannot be used."""
    try:
        mode, found = stat.S_IMODE(path.stat().st_mode), json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"The file of tokens {str(path)!r} cannot be used ({reason}); correct or delete it."
        ) from error
    if mode & 0o077:
        raise InputError(f"Others can read the file of tokens {str(path)!r}; run `chmod 600` on it.")
    if not isinstance(found, dict) or not all(isinstance(token, str) and token for token in found.values()):
        raise InputError(f"The file of tokens {str(path)!r} is no object of tokens by name; correct or delete it.")
    return found


def add_token(path: Path, name: str) -> tuple[str, bool]:
    """Return the token of a name, and whether it was made now; raises InputError for a name that is not allowed."""
    try:
        checked_owner(name)
    except ValueError as error:
        raise InputError(f"The name {name!r} is not allowed: {error}.") from error
    tokens = read_tokens(path)
    is_new = name not in tokens
    if is_new:
        tokens[name] = secrets.token_urlsafe()
        _write(path, tokens)
    return tokens[name], is_new


def remove_token(path: Path, name: str) -> None:
    """Remove the token of a name; raises InputError if there is none."""
    tokens = read_tokens(path)
    if name not in tokens:
        raise InputError(f"There is no token of {name!r}; `svdq serve token list` lists the names.")
    del tokens[name]
    _write(path, tokens)


def _write(path: Path, tokens: dict[str, str]) -> None:
    whole = path.with_name(temporary_name())
    try:
        make_home(path.parent)
        with open(whole, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            json.dump(tokens, file, indent=1)
        os.replace(whole, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            whole.unlink()
        raise InputError(f"The file of tokens {str(path)!r} cannot be written ({error.strerror}).") from error


def cookie_of(token: str) -> str:
    """Return the value of the cookie for a token; nobody can compute the token from it."""
    return hmac.new(token.encode(), b"svdq serve cookie", hashlib.sha256).hexdigest()


def address_of_machine() -> str | None:
    """Return the address by which other devices reach this machine; None if there is none."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # of the documentation's network: it sends nothing, and chooses the interface
        return str(probe.getsockname()[0])
    return None


class Tokens:
    """The tokens that a server takes: one without a name, and those of a file, read again when it has changed."""

    def __init__(self, token: str, path: Path | None = None) -> None:
        self._path = path
        self._unnamed = token
        self._state: tuple[int, ...] = ()  # of the file as it was read last; () for no file
        self._by_token, self._by_cookie = _lookups({"": token})

    def name_of(self, token: str) -> str | None:
        """Return the name of a token, "" for the one without a name; None if there is no such token."""
        self._refresh()
        return _find(token, self._by_token)

    def name_of_cookie(self, value: str) -> str | None:
        """Return the name of the token whose cookie this is; as `name_of`."""
        self._refresh()
        return _find(value, self._by_cookie)

    def _refresh(self) -> None:
        """Read the file again if it has changed; one that cannot be used lets nobody in."""
        if self._path is None:
            return
        try:
            found = self._path.stat()
            state: tuple[int, ...] = (found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode)
        except OSError:
            state = ()
        if state != self._state:
            self._state = state
            named: dict[str, str] = {}
            try:
                named = read_tokens(self._path)
            except InputError as error:
                logger.warning("%s", error)
            self._by_token, self._by_cookie = _lookups({"": self._unnamed, **named})


def _lookups(tokens: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the names by token and by cookie."""
    return {token: name for name, token in tokens.items()}, {cookie_of(each): name for name, each in tokens.items()}


def _find(given: str, names: Mapping[str, str]) -> str | None:
    """Compare a secret with each known one, in constant time for each."""
    wanted = given.encode(errors="replace")
    found = [name for secret, name in names.items() if hmac.compare_digest(wanted, secret.encode())]
    return found[0] if found else None
