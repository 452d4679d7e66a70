"""The exceptions of svdq, and what those of others say. Knows nothing else.

    SvdqError                a sentence for the user: what was wrong, the value, what to do (exit code 1)
     ├── InputError          the user's input or settings are wrong; nothing was done (exit code 2)
     ├── UnavailableError    Redis, storage or a program that is needed cannot be reached (exit code 3)
     └── SampleError         this video failed while it was being made; others go on

Messages are whole sentences, shown to users as they stand. Chain with `raise … from error`.
"""

from typing import ClassVar


class SvdqError(Exception):
    """Base of every error that svdq raises on purpose; its text is one clear sentence."""

    #: Exit code of a program that ends by it.
    exit_code: ClassVar[int] = 1


class InputError(SvdqError):
    """The user's input or settings are wrong; nothing was enqueued or written."""

    exit_code = 2


class UnavailableError(SvdqError):
    """A server, storage or program that is needed cannot be reached; nothing was done."""

    exit_code = 3


class SampleError(SvdqError):
    """One video failed while it was being made; the videos beside it are not affected."""


def reason_of(error: Exception) -> str:
    """Put what an exception of a library says on one line, to stand inside a sentence of ours."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
