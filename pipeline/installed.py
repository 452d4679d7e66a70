"""Checks for optional packages, and says how to install them."""

import importlib.util
from types import ModuleType

from svdq.pipeline.errors import InputError


def how_to_install(extra: str) -> str:
    """Return how to install an extra of svdq, as a clause. No package index has svdq, so it is done in a checkout."""
    return f"run `pip install '.[{extra}]'` in a checkout of svdq"


def require_torch(what: str) -> None:
    """Check that PyTorch is installed, which `what` needs, such as "a worker".

    Raises:
        InputError: PyTorch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise InputError(
            f"This machine can submit photos only: {what} needs PyTorch; to install it, {how_to_install('worker')}."
        )


def headless_pyplot() -> ModuleType:
    """Return matplotlib's pyplot, configured to write files without a display.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise InputError("--plot needs matplotlib, which is not installed; pip install matplotlib.") from error
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot
