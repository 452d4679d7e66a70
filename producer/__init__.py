"""Jobs and the queue, without torch; the package itself is the Python API (docs/python.md), imported lazily."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from svdq.pipeline.errors import InputError, SvdqError, UnavailableError
    from svdq.producer.settings import Settings
    from svdq.producer.settings_loader import load_settings
    from svdq.producer.status.job_view import JobView, cancel, job_status, retry, wait_for_jobs
    from svdq.producer.submitting.draft import SubmitOptions
    from svdq.producer.submitting.entries import Submission
    from svdq.producer.submitting.submission import submit

__all__ = [
    "InputError",
    "JobView",
    "Settings",
    "Submission",
    "SubmitOptions",
    "SvdqError",
    "UnavailableError",
    "cancel",
    "job_status",
    "load_settings",
    "retry",
    "submit",
    "wait_for_jobs",
]

#: The module that defines each public name.
_MODULES = {
    **dict.fromkeys(("InputError", "SvdqError", "UnavailableError"), "svdq.pipeline.errors"),
    **dict.fromkeys(("JobView", "cancel", "job_status", "retry", "wait_for_jobs"), "svdq.producer.status.job_view"),
    "Submission": "svdq.producer.submitting.entries",
    "submit": "svdq.producer.submitting.submission",
    "Settings": "svdq.producer.settings",
    "load_settings": "svdq.producer.settings_loader",
    "SubmitOptions": "svdq.producer.submitting.draft",
}

# Type checkers see the imports above; with __getattr__ they would accept any name.
if not TYPE_CHECKING:

    def __getattr__(name):
        """Import a public name when it is first used (PEP 562)."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_MODULES[name]), name)

    def __dir__():
        return sorted({*globals(), *__all__})
