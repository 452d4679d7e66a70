"""The settings: paths, Redis, storage, model and limits. `settings_loader` reads them."""

import base64
import getpass
import os
import re
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import platformdirs
from pydantic import AfterValidator, BaseModel, ByteSize, ConfigDict, Field, field_validator

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.model_name import with_presets
from svdq.producer.text import parse_duration

ENV_PREFIX = "SVDQ_"
MAX_OWNER = 64  # characters of the name of an owner
_OWNER = re.compile(rf"[^./\\\s][^/\\]{{0,{MAX_OWNER - 1}}}")  # it can be the name of a folder
HIDDEN = "***"  # stands for what is or may be a secret
_OF_REDIS = ("redis:", "rediss:", "unix:")
#: All of a Redis URL; what is anywhere else is not what redis-py reads, and may be a password.
_REDIS_URL = re.compile(
    r"(?P<scheme>rediss?://)(?:[^/?#@]*@)?(?P<server>(?:[\w.-]+|\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\])?(?::(?P<port>\d{1,5}))?)"
    r"(?:/\d*)?/?(?:\?[^@#]*)?"
)
_SOCKET_URL = re.compile(r"unix://(?:[^/?#@]*@)?(?P<path>(?:/(?:[\w.~+-]|%[0-9A-Fa-f]{2})*)+)(?:\?[^@#]*)?")
_URL = re.compile(r"\b[a-zA-Z][a-zA-Z0-9+.-]*://[^\s'\"<>]*[^\s'\"<>.,;:)\]]")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://")
#: A credential as a pair of name and value, such as `;secret=…`, and all behind it.
_ASSIGNED = re.compile(
    r"(\b[\w.-]*(?:passw|pwd|secret|token|(?:access|account|api)[_-]?key|signature)[\w.-]*=).*",
    re.IGNORECASE | re.DOTALL,
)


def given_path(text: str | Path, folder: Path | None = None) -> Path:
    """Read a path as a person gives it, perhaps relative to a folder: `~` is the home, as in a shell.

    A file or folder there whose own name begins with `~` counts first. Raises InputError if no user or file system has
    such a path.
    """
    if "\0" in (text := os.fspath(text)):
        raise InputError(f"The path {text!r} has a null byte in its name; correct it.")
    first, there = text.split("/")[0], folder or Path()
    if not first.startswith("~") or (first != "~" and os.path.lexists(there / first)):
        return there / text
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise InputError(f"The path {text!r} begins with {first}, which is no user's home; correct it.") from error


def absolute(path: Path) -> Path:
    """Make a path absolute that a person has given; raises as `given_path`."""
    return given_path(path).absolute()


def local_folder(storage: str) -> Path | None:
    """Return the folder of a path or a file:// URL, None for a remote storage; raises InputError for a broken URL."""
    scheme, colon, rest = storage.partition("://")
    if not colon:
        if storage.startswith(("s3:", "gs:", "az:", "file:")):  # and no folder of that name
            raise InputError(f"The storage {storage!r} lacks its two slashes, as in s3://bucket/prefix.")
        return Path(storage)
    if scheme not in ("file", "local"):
        return None
    if not rest:
        raise InputError(f"The storage {storage!r} names no folder; give one, such as file:///data/svdq.")
    return Path(rest)


def default_home() -> Path:
    """Return the default of `Settings.home`; raises InputError if the user has no home, as in some containers."""
    try:
        return platformdirs.user_data_path("svdq")
    except RuntimeError as error:
        raise InputError("This user has no home, and HOME is not set; set SVDQ_HOME to a folder for svdq.") from error


def default_owner() -> str:
    """Return the default of `Settings.owner`: the name of this process's user, or its number if it has no name.

    Characters that an owner cannot have become _, as in CORP_ana.
    """
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # containers may run as any user
        name = f"uid{os.getuid()}"
    name = "".join(each if each.isprintable() and each not in "/\\" else "_" for each in name[:MAX_OWNER])
    return f"_{name[1:]}" if name[0] == "." or name[0].isspace() else name


def checked_owner(name: object) -> str:
    """Return the name of an owner; raises ValueError if it is none."""
    if not isinstance(name, str) or not _OWNER.fullmatch(name) or not name.isprintable():
        raise ValueError(f"it must be 1 to {MAX_OWNER} characters without / and \\, and no dot in front")
    return name


def _checked_webhook_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and parts.username is None
    except ValueError:
        is_right = False
    if not is_right or not re.fullmatch(r"[!-~]+", url):
        raise ValueError("it must be a URL such as https://example.com/hooks/videos, without a user and a password")
    return url


def _checked_webhook_secret(secret: str) -> str:
    try:
        key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except ValueError:
        key = b""
    if not secret.startswith("whsec_") or not 24 <= len(key) <= 64:
        raise ValueError("it must be whsec_ and the base64 of 24 to 64 random bytes")
    return secret


def checked_idle_time(text: str) -> str:
    """Return a duration, or `off`; raises ValueError if it is neither."""
    try:
        _ = text == "off" or parse_duration(text, "")
    except InputError as error:
        raise ValueError("it must be a duration such as 10m, or off") from error
    return text


#: Settings that are secret as a whole, not in parts as a URL.
SECRETS = ("serve_token", "notify", "webhook_url", "webhook_secret")


class Settings(BaseModel):
    """The settings of a process and of what it starts; `settings_loader.load_settings` creates them.

    Those that hold or may hold a secret are in no text (`repr`) and in no dump (`exclude`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    #: Folder of the embedded Redis server and, by default, of the storage.
    home: Annotated[Path, AfterValidator(absolute)] = Field(default_factory=default_home, validate_default=True)
    #: Redis server, or None for the embedded one. It may hold a password.
    redis_url: str | None = Field(None, min_length=1, repr=False, exclude=True)
    #: An absolute folder or an fsspec URL. It may hold a password.
    storage: str = Field(
        default_factory=lambda data: str(data["home"] / "storage"), min_length=1, repr=False, exclude=True
    )
    #: `preview`, the folder or hub id of a model in diffusers' layout, a model file, or the name of a preset.
    model: Annotated[str, Field(min_length=1), AfterValidator(with_presets)] = "preview"
    #: Whose jobs are submitted; by default the user of this process.
    owner: Annotated[str, AfterValidator(checked_owner)] = Field(default_factory=default_owner)
    fair: bool = True  # whether owners take turns in the queues; what the worker that started last has counts
    #: Whether jobs that no worker of the last days can make wait for one that can; they fail otherwise.
    wait_for_able: bool = False
    #: Largest number of jobs of an owner that wait; None: any. What the submitting process has counts.
    max_waiting: int | None = Field(None, ge=1)
    max_pixels: int = Field(100_000_000, ge=1)  # largest number of pixels of a photo
    max_attempts: int = Field(2, ge=1)  # crashes of a rank until its job is set aside as failed
    #: Seconds that the first step of its kind may take before its rank counts as stalled and is restarted.
    stall_s: float = Field(1800.0, gt=0, allow_inf_nan=False)
    #: Memory limit for a rank's weights and activations, such as 24GB; None: its GPU's memory, or no limit on a CPU.
    memory_limit: Annotated[ByteSize, Field(ge=1)] | None = None
    #: Whether layers multiply in the formats of quantized files (native), or weights stay as the file has them; auto:
    #: native where the GPUs have kernels, else stored where there is no room for made ones.
    weights: Literal["auto", "native", "stored", "made"] = "auto"
    #: Whether `svdq worker` waits for memory of its GPUs that other programs hold, and gives them way.
    wait_for_gpu: bool = True
    #: Options of `svdq worker` as in a shell, such as `--experts rounds`; those that are typed win.
    worker_options: str = ""
    #: How long the ranks of `svdq worker` wait for a job until they end and free their GPUs, such as 10m; the worker
    #: starts them again when there is a job. None or off: they wait for ever.
    on_demand: Annotated[str, AfterValidator(checked_idle_time)] | None = None
    #: Folder of the LoRAs that jobs may choose, such as ComfyUI's models/loras; None: there are none.
    loras: Annotated[Path, AfterValidator(absolute)] | None = None
    #: Template for the folder and name of videos below outputs/, for submissions that give none.
    output: str = ""
    #: File of the upscaler that jobs may ask for, or its name in ComfyUI's models/upscale_models; None: there is none.
    upscaler: str | None = Field(None, min_length=1)
    #: Whether workers keep the latents of finished videos, from which they are upscaled later.
    keep_latents: bool = False
    mark: bool = True  # whether workers mark files as made by a model, where jobs do not say otherwise
    #: PEM files of a certificate with its chain and of its key, by which workers sign files (C2PA); None: they do not.
    c2pa_cert: Annotated[Path, AfterValidator(absolute)] | None = None
    c2pa_key: Annotated[Path, AfterValidator(absolute)] | None = None
    #: Token of `svdq serve`; None: the one in its file.
    serve_token: str | None = Field(None, min_length=16, pattern=r"^[!-~]+$", repr=False, exclude=True)

    metrics_address: str = "127.0.0.1"  # local address that `svdq worker --metrics-port` listens on
    #: File to which `svdq worker` writes a Chrome trace at its end.
    trace: Annotated[Path, AfterValidator(absolute)] | None = None
    #: apprise URLs that `svdq worker` notifies; a variable separates them by spaces.
    notify: tuple[str, ...] = Field((), repr=False, exclude=True)
    #: URL to which `svdq worker` sends the events of videos; None: it sends none. It may hold a token.
    webhook_url: Annotated[str, AfterValidator(_checked_webhook_url)] | None = Field(None, repr=False, exclude=True)
    #: `whsec_` and the base64 of the key by which these events are signed.
    webhook_secret: Annotated[str, AfterValidator(_checked_webhook_secret)] | None = Field(
        None, repr=False, exclude=True
    )

    @field_validator("notify", mode="before")
    @classmethod
    def _words_of_a_text(cls, notify: object) -> object:
        return tuple(notify.split()) if isinstance(notify, str) else notify

    @field_validator("storage")
    @classmethod
    def _folders_are_absolute(cls, storage: str) -> str:
        """Make a relative folder absolute, since jobs outlive the process and its working folder."""
        folder = local_folder(storage)
        return storage if folder is None else str(absolute(folder))

    @property
    def on_demand_s(self) -> float | None:
        """Seconds without a job after which ranks end until there is one; None: they do not."""
        if self.on_demand in (None, "off"):
            return None
        return parse_duration(self.on_demand, "on_demand").total_seconds()

    def environment(self) -> dict[str, str]:
        """Return the variables with which a child process has these settings, flags included."""
        # An empty variable counts as not set; the words of a list are separated by spaces.
        texts = {name: " ".join(value) if isinstance(value, tuple) else value for name, value in self}
        return {f"{ENV_PREFIX}{name.upper()}": "" if text is None else str(text) for name, text in texts.items()}


def shown_redis_url(url: str) -> str:
    """Return scheme, host and port of a Redis URL, or scheme and path of a socket; `***` unless all of it is clear."""
    if (found := _REDIS_URL.fullmatch(url)) and int(found["port"] or 0) < 1 << 16:
        return found["scheme"] + found["server"]
    found = _SOCKET_URL.fullmatch(url)
    return f"unix://{found['path']}" if found else HIDDEN


def without_secrets(url: str) -> str:
    """Return a URL for messages: what is or may be a password masked, and the query removed, which may contain tokens.

    URLs need not be well-formed: a password may lack its colon, or have the characters that would end it.
    """
    if url.lower().startswith(_OF_REDIS):
        return shown_redis_url(url)
    url = _ASSIGNED.sub(rf"\1{HIDDEN}", url)
    scheme, colon, rest = url.partition("://")
    if not colon:  # a path, or a URL with a mistake
        is_path = "@" not in url or url.startswith(("/", "~", "."))
        return url if is_path else f"{HIDDEN}@{url.rpartition('@')[2].partition('?')[0]}"
    scheme, authority = f"{scheme}://", re.split("[/?#]", rest, maxsplit=1)[0]
    user, _, tail = rest.rpartition("@")
    tail = tail.partition("?")[0]
    if "@" in authority or ("@" in rest and ":" in authority):
        name, colon, _ = user.partition(":")
        # What is before the colon is no password only if nothing else looks like one.
        is_name = colon and name and "@" not in user and user == authority.rpartition("@")[0]
        return f"{scheme}{name}:{HIDDEN}@{tail}" if is_name else f"{scheme}{HIDDEN}@{tail}"
    host, colon, port = authority.rpartition(":")
    if colon and port and not port.isdigit() and not authority.startswith("["):
        return f"{scheme}{host}:{HIDDEN}{rest.removeprefix(authority).partition('?')[0]}"
    return f"{scheme}{rest.partition('?')[0]}"


def without_urls_secrets(text: str) -> str:
    """Return a text in which each URL is as `without_secrets` returns it."""
    return _URL.sub(lambda match: without_secrets(match[0]), text)


def scheme_of(url: str) -> str:
    """Return the scheme of a URL that is secret as a whole, such as `ntfy://***`; `***` if it has none."""
    found = _SCHEME.match(url)
    return f"{found[0]}{HIDDEN}" if found else HIDDEN
