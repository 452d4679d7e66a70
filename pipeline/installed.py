"""Whether this machine has what renders, or only what submits. Imports none of it."""

import importlib.util

from svdq.pipeline.errors import InputError


def require_torch(what: str) -> None:
    """Refuse what a machine with the base install alone cannot do, in a sentence in place of an ImportError.

    Args:
        what: needs it, such as "a worker".

    Raises:
        InputError: PyTorch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise InputError(f"This machine can submit photos only: {what} needs PyTorch; pip install 'svdq[worker]'.")
