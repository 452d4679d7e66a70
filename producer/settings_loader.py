"""Reads the settings. The only reader of `SVDQ_` variables and of svdq.toml.

Sources in order of precedence: command-line flags, `SVDQ_*` environment variables, `./svdq.toml` unless that is in a
watched folder, `<home>/svdq.toml`, defaults. Ranks read what their launcher has written instead.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from svdq.pipeline.errors import InputError, first_error
from svdq.pipeline.models.model_name import has_weights, is_model_file
from svdq.pipeline.toml_file import MAX_BYTES, parse_toml
from svdq.producer.files import open_regular, write_file
from svdq.producer.settings import (
    ENV_PREFIX,
    HIDDEN,
    SECRETS,
    Settings,
    absolute,
    default_home,
    local_folder,
    shown_redis_url,
    without_secrets,
)

FILE_NAME = "svdq.toml"


def load_settings(**flags: Any) -> Settings:
    """Read all sources; a flag of None was not given. Raises InputError."""
    return _load(_read_file(Path(FILE_NAME)), flags)


def load_for_watching(folder: Path, **flags: Any) -> Settings:
    """Read all sources but a file in `folder`, whose writers must choose no Redis or storage; raises InputError."""
    is_inside = Path.cwd().is_relative_to(absolute(folder).resolve())
    return _load({} if is_inside else _read_file(Path(FILE_NAME)), flags)


def _load(working_file: dict[str, Any], flags: dict[str, Any]) -> Settings:
    given = {name: value for name, value in flags.items() if value is not None}
    variables = _variables()
    # All but the file in the home determine the home.
    homes = (source["home"] for source in (given, variables, working_file) if "home" in source)
    home = absolute(Path(str(next(homes, None) or default_home())))
    try:
        return Settings(**_read_file(home / FILE_NAME, may_be_watched=False) | working_file | variables | given)
    except ValidationError as error:
        raise InputError(_sentence(error)) from error


def _variables() -> dict[str, str]:
    """Return the settings in the environment; an empty variable counts as not set."""
    found = {name: os.environ.get(f"{ENV_PREFIX}{name.upper()}") for name in Settings.model_fields}
    return {name: value for name, value in found.items() if value}


def absolute_model(name: str) -> str:
    """Make the path of a model absolute, for a process with another working folder; raises InputError."""
    path = absolute(Path(name))
    return str(path) if has_weights(name) and (path.is_dir() or is_model_file(name)) else name


def origins(**flags: Any) -> dict[str, str]:
    """Return the source of each setting: `flag`, the name of a variable, the path of a file, or `default`."""
    found = dict.fromkeys(Settings.model_fields, "default")
    for path in (load_settings(**flags).home / FILE_NAME, Path(FILE_NAME).absolute()):
        found |= dict.fromkeys(_read_file(path), str(path))
    found |= {name: f"{ENV_PREFIX}{name.upper()}" for name in _variables()}
    return found | {name: "flag" for name, value in flags.items() if value is not None}


def _read_file(path: Path, may_be_watched: bool = True) -> dict[str, Any]:
    """Read one svdq.toml, if it exists; relative folders in it are relative to the file.

    What a file says of photos, as in a folder that `may_be_watched`, is left out.
    """
    try:
        with open_regular(path) as file:
            values = read_toml(file, path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise cannot_be_read(path, error.strerror) from error
    others = [name for name in values if name not in Settings.model_fields]
    if others and may_be_watched:
        from svdq.producer.job import PHOTO_KEYS  # imports all families

        values = {name: value for name, value in values.items() if name.replace("-", "_") not in PHOTO_KEYS}
    folder = path.absolute().parent
    for name in ("home", "storage", "loras"):
        value = values.get(name)
        if value == "":  # else it would be the folder of the file
            raise cannot_be_read(path, f"its {name} is empty")
        local = local_folder(value) if isinstance(value, str) else None
        if local is not None:
            values[name] = str(absolute(local) if str(local).startswith("~") else folder / local)
    model = values.get("model")
    # A folder of the working folder keeps its name, which is recorded with videos.
    if isinstance(model, str) and model and has_weights(model) and not os.path.isdir(model):
        inside = absolute(Path(model)) if model.startswith("~") else folder / model
        values["model"] = str(inside) if is_model_file(model) or os.path.isdir(inside) else model
    return values


def read_toml(file: BinaryIO, path: Path) -> dict[str, Any]:
    """Read an open svdq.toml; raises InputError, which names `path`, if it is too large or invalid, or OSError."""
    try:
        return parse_toml(file.read(MAX_BYTES + 1))
    except ValueError as error:
        raise cannot_be_read(path, error) from error


def change_file(path: Path, values: Mapping[str, str | None]) -> dict[str, Any]:
    """Set settings in an svdq.toml, None: remove, and keep all other lines; return what those were that changed.

    Raises InputError if the file cannot be read or written, or has one of them on several lines.
    """
    path = path.resolve()  # a link stays one
    try:
        text = path.read_text("utf-8") if path.exists() else ""
        before = parse_toml(text.encode())
    except (OSError, ValueError) as error:
        raise cannot_be_read(path, error) from error
    changed = {name: value for name, value in values.items() if before.get(name) != value}
    if not changed:
        return {}
    left = {name: f"{name} = {_toml_string(value)}" for name, value in changed.items() if value is not None}
    lines = []
    for line in text.splitlines():
        name = line.partition("=")[0].strip()
        if name not in changed:
            lines.append(line)
        elif name in left:
            lines.append(left.pop(name))
    text = "".join(f"{line}\n" for line in [*lines, *left.values()])
    try:
        is_right = parse_toml(text.encode()) == {k: v for k, v in (before | changed).items() if v is not None}
    except ValueError:
        is_right = False
    if not is_right:
        raise InputError(f"The file {str(path)!r} cannot be changed line by line; set {', '.join(changed)} in it.")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, [text])
    return {name: before.get(name) for name in changed}


def _toml_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def cannot_be_read(path: Path, reason: object) -> InputError:
    """Create the error for an svdq.toml that cannot be used."""
    return InputError(f"The file {str(path)!r} cannot be read ({reason}); correct or remove it.")


def _sentence(error: ValidationError) -> str:
    """Describe the first error for a person who set a flag, a variable or a line of svdq.toml."""
    first = first_error(error)
    name = str(first["loc"][0]) if first["loc"] else "?"
    if first["type"] == "extra_forbidden":
        from svdq.producer.job import PHOTO_KEYS

        if name.replace("-", "_") in PHOTO_KEYS:
            return (
                f"{name!r} in svdq.toml of SVDQ_HOME is a parameter of videos and no setting; give it when submitting."
            )
        known = ", ".join(Settings.model_fields)
        return f"There is no setting {name!r}, which a svdq.toml names; the settings are {known}."
    shown = shown_redis_url if name == "redis_url" else without_secrets
    value = HIDDEN if name in SECRETS else shown(str(first["input"]))
    reason = first["msg"].replace("Input should", "it must").partition(", unable")[0]
    return (
        f"The setting {ENV_PREFIX}{name.upper()} (or {name} in {FILE_NAME}) is {value!r}: "
        f"{reason[0].lower()}{reason[1:]}; correct or unset it."
    )
