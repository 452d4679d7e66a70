"""The exceptions of svdq.

    SvdqError                a sentence for the user: what was wrong, the value, what to do (exit code 1)
     ├── InputError          the user's input or settings are wrong; nothing was done (exit code 2)
     ├── UnavailableError    Redis, the storage or a required program is not available (exit code 3)
     └── SampleError         this video failed; others continue

Messages are whole sentences, shown to users unchanged. Chain with `raise … from error`.
"""

from typing import ClassVar


class SvdqError(Exception):
    """Base of every error that svdq raises on purpose; its text is one clear sentence."""

    #: Exit code of a program that ends with it.
    exit_code: ClassVar[int] = 1


class InputError(SvdqError):
    """The user's input or settings are wrong; nothing was enqueued or written."""

    exit_code = 2


class UnavailableError(SvdqError):
    """A server, storage or program that is required is not available; nothing was done."""

    exit_code = 3


class SampleError(SvdqError):
    """One video failed; other videos in flight are not affected."""


def reason_of(error: Exception) -> str:
    """Return the message of a library's exception on one line, for use inside a sentence."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
