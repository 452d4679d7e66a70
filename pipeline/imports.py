"""Names the installed package that cannot be imported, and how to fix it. Does not import torch."""

import contextlib
import importlib.metadata
import traceback
from collections.abc import Iterator

from svdq.pipeline.errors import InputError, SvdqError, how_to_install, reason_of

_OURS = "svdq"


@contextlib.contextmanager
def plain_imports() -> Iterator[None]:
    """Raise an error of importing a package, in a block, as a sentence."""
    try:
        yield
    except SvdqError:
        raise
    except Exception as error:
        if (broken := import_failure(error)) is not None:
            raise broken from error
        raise


def import_failure(error: BaseException) -> InputError | None:
    """Return the sentence about an error of importing a package, such as a torchvision for another torch; else None."""
    while error.__cause__ is not None:  # diffusers and transformers raise errors of their own, from it
        error = error.__cause__
    importing = [
        str(frame.f_globals.get("__name__", "")).partition(".")[0]
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name == "<module>"
    ]
    package = next((name for name in reversed(importing) if name not in (_OURS, "__main__")), "")
    if isinstance(error, ModuleNotFoundError) and error.name and not package:
        package = error.name.partition(".")[0]
    if not package or package == _OURS:
        return None
    reason = reason_of(error)[:200] if isinstance(error, Exception) else type(error).__name__
    return InputError(f"The package {_with_version(package)} cannot be imported ({reason}); {_mend(package)}.")


def _with_version(package: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return f"{package} {importlib.metadata.version(package)}"
    return package


def _mend(package: str) -> str:
    """Return how to install a package that fits the others, as a clause."""
    if package in ("torchvision", "torchaudio"):
        return (
            f"it must be for {_with_version('torch')} and from the same index: run `pip uninstall {package}`, then "
            f"`pip install {package}` with the --index-url that torch was installed with, if something needs it"
        )
    if package == "torch":
        return f"to install it again, {how_to_install('worker')} with --force-reinstall"
    return (
        f"it does not fit the other packages: run `pip install --force-reinstall {package}`, or "
        f"`pip uninstall {package}` if nothing needs it"
    )
