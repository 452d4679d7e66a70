"""Checks whether the packages for rendering are installed, without importing them."""

import importlib.util

from svdq.pipeline.errors import InputError


def require_torch(what: str) -> None:
    """Refuse a command that needs the worker extra, with a sentence instead of an ImportError.

    Args:
        what: what needs PyTorch, such as "a worker".

    Raises:
        InputError: PyTorch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise InputError(f"This machine can submit photos only: {what} needs PyTorch; pip install 'svdq[worker]'.")
