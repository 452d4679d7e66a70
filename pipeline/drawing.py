"""Imports matplotlib without a display, for commands that write plots."""

from types import ModuleType

from svdq.pipeline.errors import InputError


def headless_pyplot() -> ModuleType:
    """Return matplotlib's pyplot, configured to write files only.

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
