"""What is wanted of a photo in a watched folder: the command's flags, and the `svdq.toml` nearest to the photo.

The folder's file wins: flags are for the whole tree, and it was put there for a part of it. Knows no queue.
"""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.producer.settings import FILE_NAME, PARAMETER_KEYS, Settings
from svdq.producer.submitting.fields import read_field
from svdq.producer.submitting.order import Order
from svdq.producer.submitting.photos import safe_name


class FolderDefaults:
    """The order of one command, and the files in one watched folder."""

    def __init__(self, root: Path, order: Order) -> None:
        """Make it.

        Args:
            root: the watched folder, resolved.
            order: what is wanted where no file says otherwise, with options of one kind.

        Raises:
            InputError: the order is not allowed, or neither is what the watched folder's own file says.
        """
        order.check()
        self._root = root
        self._order = order
        #: File -> when it was written and how long it was, and what it orders or what is wrong with it.
        self._known: dict[Path, tuple[tuple[int, int], Order | InputError]] = {}
        self.order_for("any.jpg")

    def order_for(self, path: str) -> Order:
        """Say what is wanted of a photo, by its path from the watched folder.

        Raises:
            InputError: the file that counts for it cannot be read, or says what is not allowed.
        """
        *folders, _ = path.split("/")
        order: Order | None = None
        for depth in range(len(folders), -1, -1):
            order = self._read(Path(self._root, *folders[:depth], FILE_NAME))
            if order is not None:
                break
        return replace(order or self._order, folder="/".join(map(safe_name, folders)))

    def _read(self, file: Path) -> Order | None:
        """Return what a file orders, read anew when it has changed, or None when there is none."""
        try:
            status = file.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise InputError(f"The file {str(file)!r} cannot be read ({error.strerror}); check its rights.") from error
        version = (status.st_mtime_ns, status.st_size)
        known = self._known.get(file)
        if known is None or known[0] != version:
            try:
                known = version, _read(file, self._order)
            except InputError as error:
                known = version, error
            self._known[file] = known
        if isinstance(known[1], InputError):
            raise InputError(str(known[1]))  # a fresh one, for each raise adds to an exception's traceback
        return known[1]


def _read(file: Path, order: Order) -> Order:
    """Read a file and put what it says over an order."""
    try:
        lines = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"The file {str(file)!r} cannot be read: {error}; mend or remove it.") from error
    try:
        values: dict[str, Any] = {}
        for key, value in lines.items():
            name = key.replace("-", "_")
            if name in PARAMETER_KEYS:
                values |= _values(name, value)
            # In the working folder the file has the settings, too.
            elif name not in Settings.model_fields or file != Path(FILE_NAME).resolve():
                raise InputError(f"there is no key {key!r}; the keys are {', '.join(PARAMETER_KEYS)}.")
        priority = values.pop("priority", order.priority)
        order = replace(order, options=(replace(order.options[0], **values),), priority=priority)
        order.check(spell=lambda field: "format" if field == "formats" else field)
    except InputError as error:
        raise InputError(f"In the file {str(file)!r}: {error}") from error
    return order


def _values(name: str, value: Any) -> dict[str, Any]:
    """Bring one line of a file into the form that orders have."""
    if name == "size":
        return read_field("size", str(value), "size")
    if name == "format":
        return {"formats": tuple(dict.fromkeys(map(str, value))) if isinstance(value, list) else (value,)}
    return {name: value}
