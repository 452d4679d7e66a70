"""The exceptions of svdq.

    SvdqError                a sentence for the user: what was wrong, the value, what to do (exit code 1)
     ├── InputError          the user's input or settings are wrong; nothing was done (exit code 2)
     │    └── NoRoomError    the model does not fit the memory that is free
     ├── UnavailableError    Redis, the storage or a required program is not available (exit code 3)
     └── SampleError         this video failed; others continue

Messages are whole sentences, shown to users unchanged. Chain with `raise … from error`.
"""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails


class SvdqError(Exception):
    """Base of every error that svdq raises on purpose; its text is one clear sentence."""

    exit_code: ClassVar[int] = 1  # exit code of a program that ends with it


class InputError(SvdqError):
    """The user's input or settings are wrong; nothing was enqueued or written."""

    exit_code = 2

    def __init__(self, message: str, *, field: str = "") -> None:
        """Make an error; `field` is the parameter that it is about, by the name of the job's field."""
        super().__init__(message)
        self.field = field


class NoRoomError(InputError):
    """The model does not fit the memory that is free."""


class UnavailableError(SvdqError):
    """A server, storage or program that is required is not available; nothing was done."""

    exit_code = 3


class SampleError(SvdqError):
    """One video failed; other videos in flight are not affected."""


def reason_of(error: Exception) -> str:
    """Return the message of a library's exception on one line, for use inside a sentence."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def first_error(error: "ValidationError") -> "ErrorDetails":
    """Return the first of pydantic's errors; what svdq's own checks say is without the words before it."""
    first = error.errors(include_url=False)[0]
    first["msg"] = first["msg"].removeprefix("Value error, ")
    return first


def how_to_install(extra: str) -> str:
    """Return how to install an extra of svdq, as a clause: in its checkout, or where it is installed without one."""
    root = Path(__file__).parents[1]
    if (root / "pyproject.toml").is_file():
        return f"run `pip install '.[{extra}]'` in {root}"
    return f"run `pip install 'svdq[{extra}]'`"


def require_torch(what: str) -> None:
    """Raise InputError if PyTorch, which `what` needs, such as "a worker", is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise InputError(
            f"This machine can submit photos only: {what} needs PyTorch; to install it, {how_to_install('worker')}."
        )
