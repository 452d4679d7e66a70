"""The parameters of a photo in a watched folder: the command's flags, overridden by the nearest `svdq.toml`.

The file wins, because flags apply to the whole tree and the file to a part of it.
"""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.producer.settings import FILE_NAME, MAX_FILE_BYTES, PARAMETER_KEYS, Settings
from svdq.producer.submitting.fields import read_field
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.photos import safe_name
from svdq.producer.watching.directory import open_file, open_folder, split


class FolderConfig:
    """The parameters of one command, and the files in one watched folder."""

    def __init__(self, root: Path, spec: JobSpec) -> None:
        """Initialize.

        Args:
            root: the watched folder, resolved.
            spec: the parameters of the command, with options of one kind.

        Raises:
            InputError: a parameter, or the file in the watched folder itself, is not valid.
        """
        spec.check()
        self._root = root
        self._spec = spec
        self.spec_for("any.jpg")

    def spec_for(self, path: str) -> JobSpec:
        """Return the parameters of a photo, by its path from the watched folder.

        Raises:
            InputError: the nearest file cannot be read or is not valid.
        """
        folder = split(path)[0]
        folders = folder.split("/") if folder else []
        spec: JobSpec | None = None
        for depth in range(len(folders), -1, -1):
            spec = self._read("/".join(folders[:depth]))
            if spec is not None:
                break
        return replace(spec or self._spec, folder="/".join(map(safe_name, folders)))

    def _read(self, folder: str) -> JobSpec | None:
        """Return the parameters by the file in a folder, or None if it has none."""
        file_path = self._root / folder / FILE_NAME
        try:
            with open_folder(self._root, folder) as descriptor, open_file(FILE_NAME, descriptor) as file:
                data = file.read(MAX_FILE_BYTES + 1)
            if len(data) > MAX_FILE_BYTES:
                raise InputError(f"The file {str(file_path)!r} is larger than {MAX_FILE_BYTES:,} bytes; shorten it.")
            return self._parse(tomllib.loads(data.decode()), file_path)
        except FileNotFoundError:
            return None
        except RecursionError as error:
            raise InputError(f"The file {str(file_path)!r} is nested too deeply; correct or remove it.") from error
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise InputError(f"The file {str(file_path)!r} cannot be read ({reason}); correct or remove it.") from error

    def _parse(self, document: dict[str, Any], file_path: Path) -> JobSpec:
        spec = self._spec
        try:
            values: dict[str, Any] = {}
            for key, value in document.items():
                name = key.replace("-", "_")
                if name in PARAMETER_KEYS:
                    values |= _fields(name, value)
                # In the working folder the same file can have settings.
                elif name not in Settings.model_fields or file_path != Path(FILE_NAME).resolve():
                    raise InputError(f"there is no key {key!r}; the keys are {', '.join(PARAMETER_KEYS)}.")
            priority = values.pop("priority", spec.priority)
            spec = replace(spec, options=(replace(spec.options[0], **values),), priority=priority)
            spec.check(spell=lambda field: "format" if field == "formats" else field)
        except InputError as error:
            raise InputError(f"In the file {str(file_path)!r}: {error}") from error
        return spec


def _fields(name: str, value: Any) -> dict[str, Any]:
    """Convert one line of a file to fields of `SubmitOptions`."""
    if name == "size":
        return read_field("size", str(value), "size")
    if name == "format":
        return {"formats": tuple(dict.fromkeys(map(str, value))) if isinstance(value, list) else (value,)}
    return {name: value}
