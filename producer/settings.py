"""The settings: paths, Redis, storage, model and limits. The only reader of `SVDQ_` variables.

Sources in order of precedence: command-line flags, `SVDQ_*` environment variables, `./svdq.toml` unless that is in a
watched folder, `<home>/svdq.toml`, defaults.
"""

import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar, Self
from urllib.parse import urlsplit

import platformdirs
from pydantic import AfterValidator, ByteSize, Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.model_names import has_weights
from svdq.producer.job import PARAMETER_KEYS
from svdq.producer.regular_file import open_regular

ENV_PREFIX = "SVDQ_"
FILE_NAME = "svdq.toml"
#: Bytes; a file has a few hundred.
MAX_FILE_BYTES = 1 << 16
#: Keys of the same file that are no settings: what `svdq watch` makes of the photos in the file's folder.
PHOTO_KEYS = (*PARAMETER_KEYS, "priority")


def absolute(path: Path) -> Path:
    """Expand `~` and make a path absolute.

    Raises:
        InputError: there is no such user, or no file system has such a path.
    """
    if "\0" in str(path):
        raise InputError(f"The folder {str(path)!r} has a null byte in its name; correct it.")
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:
        raise InputError(
            f"The folder {str(path)!r} begins with {path.parts[0]}, which is no user's home; correct it."
        ) from error


def absolute_model(name: str) -> str:
    """Make the name of a model absolute if it is a folder, for a process with another working folder.

    Raises:
        InputError: as `absolute`.
    """
    if has_weights(name) and os.path.isdir(folder := absolute(Path(name))):
        return str(folder)
    return name


def _local_folder(storage: str) -> Path | None:
    """Return the folder of a path or of a URL such as file:///data; None for a remote storage.

    Raises:
        InputError: a URL of a folder names none.
    """
    scheme, colon, rest = storage.partition("://")
    if not colon:
        return Path(storage)
    if scheme not in ("file", "local"):
        return None
    if not rest:
        raise InputError(f"The storage {storage!r} names no folder; give one, such as file:///data/svdq.")
    return Path(rest)


def _default_home() -> Path:
    return platformdirs.user_data_path("svdq")


#: Settings that are secret whatever they are.
SECRETS = ("serve_token", "notify")


class Settings(BaseSettings):
    """The frozen settings of one process; create them with `Settings.load`."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_ignore_empty=True, frozen=True, extra="forbid")
    #: Whether `./svdq.toml` is a source.
    reads_working_folder: ClassVar[bool] = True

    #: Folder of the embedded Redis server and, by default, of the storage.
    home: Annotated[Path, AfterValidator(absolute)] = Field(default_factory=_default_home, validate_default=True)
    #: Redis server, or None for the embedded one. Not in repr: it may hold a password.
    redis_url: str | None = Field(None, min_length=1, repr=False)
    #: An absolute folder or an fsspec URL. Not in repr: it may hold a password.
    storage: str = Field(default_factory=lambda data: str(data["home"] / "storage"), min_length=1, repr=False)
    #: `preview`, or the folder or hub id of a model in diffusers' layout.
    model: str = Field("preview", min_length=1)
    #: Largest number of pixels of a photo.
    max_pixels: int = Field(100_000_000, ge=1)
    #: Number of crashes of a rank after which the job it computes is set aside as failed.
    max_attempts: int = Field(2, ge=1)
    #: Seconds that the first step of its kind may take before its rank counts as stalled and is restarted.
    stall_s: float = Field(1800.0, gt=0, allow_inf_nan=False)
    #: Memory limit for a rank's weights and activations, such as 24GB; None: its GPU's memory, or no limit on a CPU.
    memory_limit: Annotated[ByteSize, Field(ge=1)] | None = None
    #: Token of `svdq serve`; None: the one in its file. Not in repr: it is a secret.
    serve_token: str | None = Field(None, min_length=16, pattern=r"^[!-~]+$", repr=False)

    #: apprise URLs that `svdq worker` notifies; a variable separates them by spaces. Not in repr: they hold secrets.
    notify: Annotated[tuple[str, ...], NoDecode] = Field((), repr=False)

    @field_validator("notify", mode="before")
    @classmethod
    def _words_of_a_text(cls, notify: object) -> object:
        return tuple(notify.split()) if isinstance(notify, str) else notify

    @field_validator("storage")
    @classmethod
    def _folders_are_absolute(cls, storage: str) -> str:
        """Make a relative folder absolute, since jobs outlive the process and its working folder."""
        folder = _local_folder(storage)
        return storage if folder is None else str(absolute(folder))

    @classmethod
    def load(cls, **flags: Any) -> Self:
        """Read all sources; a flag of None was not given.

        Raises:
            InputError: a value is not allowed, or a file cannot be read.
        """
        given = {name: value for name, value in flags.items() if value is not None}
        try:
            return cls(**given)
        except ValidationError as error:
            raise InputError(_sentence(error)) from error

    @classmethod
    def load_for_watching(cls, folder: Path, **flags: Any) -> "Settings":
        """Read all sources but a file in `folder` or below it: who may drop photos there chooses no Redis or storage.

        Raises:
            InputError: as `load`.
        """
        is_inside = Path.cwd().is_relative_to(absolute(folder).resolve())
        return (_SettingsFromElsewhere if is_inside else cls).load(**flags)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Add the two files after flags and environment, which determine the home."""
        here = _read_file(Path(FILE_NAME)) if cls.reads_working_folder else {}
        homes = (source["home"] for source in (init_settings(), env_settings(), here) if "home" in source)
        home = absolute(Path(str(next(homes, _default_home()))))
        there = _read_file(home / FILE_NAME)
        return (
            init_settings,
            env_settings,
            InitSettingsSource(settings_cls, here),
            InitSettingsSource(settings_cls, there),
        )

    def environment(self) -> dict[str, str]:
        """Return the variables with which a child process has these settings, flags included."""
        # An empty variable counts as not set; the words of a list are separated by spaces.
        texts = {name: " ".join(value) if isinstance(value, tuple) else value for name, value in self}
        return {f"{ENV_PREFIX}{name.upper()}": "" if text is None else str(text) for name, text in texts.items()}


class _SettingsFromElsewhere(Settings):
    """Settings that are not read from the working folder."""

    reads_working_folder: ClassVar[bool] = False


def origins(**flags: Any) -> dict[str, str]:
    """Return the source of each setting: `flag`, the name of a variable, the path of a file, or `default`.

    Raises:
        InputError: as `Settings.load`.
    """
    found = dict.fromkeys(Settings.model_fields, "default")
    for path in (Settings.load(**flags).home / FILE_NAME, Path(FILE_NAME).absolute()):
        found |= dict.fromkeys(_read_file(path), str(path))
    found |= {name: f"{ENV_PREFIX}{name.upper()}" for name in EnvSettingsSource(Settings)()}
    return found | {name: "flag" for name, value in flags.items() if value is not None}


def _read_file(path: Path) -> dict[str, Any]:
    """Read one svdq.toml, if it exists; relative folders in it are relative to the file."""
    try:
        with open_regular(path) as file:
            values = read_toml(file, path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise cannot_be_read(path, error.strerror) from error
    values = {name: value for name, value in values.items() if name.replace("-", "_") not in PHOTO_KEYS}
    folder = path.absolute().parent
    for name in ("home", "storage"):
        value = values.get(name)
        if value == "":  # else it would be the folder of the file
            raise cannot_be_read(path, f"its {name} is empty")
        local = _local_folder(value) if isinstance(value, str) else None
        if local is not None:
            values[name] = str(absolute(local) if str(local).startswith("~") else folder / local)
    model = values.get("model")
    # A folder of the working folder keeps its name, which is recorded with videos.
    if isinstance(model, str) and model and has_weights(model) and not os.path.isdir(model):
        values["model"] = str(folder / model) if os.path.isdir(folder / model) else model
    return values


def read_toml(file: BinaryIO, path: Path) -> dict[str, Any]:
    """Read an open svdq.toml.

    Raises:
        InputError: it is too large or not valid; `path` is for the message.
        OSError: it cannot be read.
    """
    data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise cannot_be_read(path, f"it is larger than {MAX_FILE_BYTES:,} bytes")
    try:
        return tomllib.loads(data.decode())
    except RecursionError as error:
        raise cannot_be_read(path, "it is nested too deeply") from error
    except ValueError as error:
        raise cannot_be_read(path, error) from error


def cannot_be_read(path: Path, reason: object) -> InputError:
    """Create the error for an svdq.toml that cannot be used."""
    return InputError(f"The file {str(path)!r} cannot be read ({reason}); correct or remove it.")


def _sentence(error: ValidationError) -> str:
    """Describe the first error for a person who set a flag, a variable or a line of svdq.toml."""
    first = error.errors(include_url=False, include_context=False)[0]
    name = str(first["loc"][0]) if first["loc"] else "?"
    if first["type"] == "extra_forbidden":
        known = ", ".join(Settings.model_fields)
        return f"There is no setting {name!r}, which a svdq.toml names; the settings are {known}."
    value = "***" if name in SECRETS else without_secrets(str(first["input"]))
    return (
        f"The setting {ENV_PREFIX}{name.upper()} (or {name} in {FILE_NAME}) is {value!r}: "
        f"{first['msg'][0].lower()}{first['msg'][1:]}; correct or unset it."
    )


def without_secrets(url: str) -> str:
    """Return a URL for messages: the password masked, and the query removed, which may contain tokens."""
    try:
        parts = urlsplit(url)
        if not parts.scheme or not (parts.netloc or parts.query):
            return url
        if ":" in parts.netloc and "@" in url.partition(parts.netloc)[2]:  # a password with a `/`, `?` or `#` in it
            return f"{parts.scheme}://***@{url.rpartition('@')[2].partition('?')[0]}"
        user, at, host = parts.netloc.rpartition("@")
        name, colon, _ = user.partition(":")
        return parts._replace(netloc=f"{name}{colon and ':***'}{at}{host}", query="", fragment="").geturl()
    except ValueError:  # such as an IPv6 address without its bracket
        scheme, _, rest = url.partition("://")
        return f"{scheme}://{rest.rpartition('@')[2]}"
