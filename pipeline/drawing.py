"""Matplotlib without a screen, for the commands that write pictures. Knows nothing of what is drawn."""

from types import ModuleType

from svdq.pipeline.errors import InputError


def headless_pyplot() -> ModuleType:
    """Give matplotlib's pyplot, set up to write files only.

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
