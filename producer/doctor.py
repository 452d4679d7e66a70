"""Checks Redis, the storage and the installation, and says how to fix what is wrong.

Its only change is a small file in the storage, which is written, read and removed.
"""

import importlib.metadata
import platform
import re
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from svdq.pipeline.errors import SvdqError
from svdq.producer.queue import session
from svdq.producer.settings import Settings, without_secrets
from svdq.producer.storage.storage import Storage

#: Oldest server version that supports the commands we use.
OLDEST_REDIS = (6, 2)
#: Free bytes of a local storage below which a night's videos may not fit.
LITTLE_SPACE = 2 * 1024**3
#: Extras for kinds of storage; a missing one is reported when the storage is opened.
_STORAGE_EXTRAS = ("azure", "gcs", "s3", "sftp")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check."""

    #: What was checked, such as `redis`.
    subject: str
    #: `warn` works with restrictions; `fail` does not work.
    level: Literal["ok", "warn", "fail"]
    #: The result.
    text: str
    #: What to do, as a clause; "" if there is nothing to do.
    advice: str = ""


def failure(subject: str, error: SvdqError) -> Finding:
    """Return the finding for an error of ours, whose sentence includes the advice."""
    return Finding(subject=subject, level="fail", text=str(error).rstrip("."))


def check_redis(settings: Settings) -> Iterator[Finding]:
    """Check the Redis server; start the embedded one if it is configured and not running."""
    where = without_secrets(settings.redis_url) if settings.redis_url else f"embedded in {settings.home}"
    try:
        with session(settings) as connection:
            info = connection.info()
    except SvdqError as error:
        yield failure("redis", error)
        return
    assert isinstance(info, dict)
    yield _version(info, where)
    yield _persistence(info)
    yield _eviction(info)


def _version(info: dict[str, object], where: str) -> Finding:
    version = str(info.get("redis_version", "0"))
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    product = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {version}"
    if numbers < OLDEST_REDIS:
        return Finding(
            subject="redis", level="fail", text=f"{where} is {product}", advice="install Redis 6.2 or newer, or Valkey"
        )
    return Finding(subject="redis", level="ok", text=f"{where}, {product}")


def _persistence(info: dict[str, object]) -> Finding:
    subject = "persistence"
    if info.get("aof_last_write_status", "ok") != "ok" or info.get("rdb_last_bgsave_status", "ok") != "ok":
        return Finding(
            subject=subject,
            level="fail",
            text="the server could not write its data to disk",
            advice="see its log; free its disk",
        )
    if info.get("aof_enabled"):
        return Finding(subject=subject, level="ok", text="append-only file")
    return Finding(
        subject=subject,
        level="warn",
        text="no append-only file: a crash of the server may lose jobs",
        advice="set `appendonly yes` in redis.conf",
    )


def _eviction(info: dict[str, object]) -> Finding:
    policy = info.get("maxmemory_policy", "noeviction")
    subject = "maxmemory-policy"
    if policy == "noeviction":
        return Finding(subject=subject, level="ok", text="noeviction")
    limited = bool(info.get("maxmemory"))
    return Finding(
        subject=subject,
        level="fail" if limited else "warn",
        text=f"{policy}: a full server drops jobs" + ("" if limited else ", once it has a maxmemory"),
        advice="set `maxmemory-policy noeviction` in redis.conf",
    )


def check_storage(settings: Settings) -> Iterator[Finding]:
    """Write, read and remove a small file in the storage; check the free space of a folder."""
    try:
        storage = Storage(settings.storage)
        key = f"doctor-{uuid.uuid4().hex}.txt"
        written = uuid.uuid4().bytes
        storage.write_bytes(key, written)
        try:
            read = storage.read(key)
        finally:
            storage.remove(key)
    except SvdqError as error:
        yield failure("storage", error)
        return
    if read != written:
        yield Finding(
            subject="storage",
            level="fail",
            text=f"{storage.shown} returned other bytes than were written",
            advice="use another storage",
        )
        return
    yield Finding(subject="storage", level="ok", text=f"{storage.shown}: written, read and removed a file")
    if storage.folder is not None:
        free = shutil.disk_usage(storage.folder).free
        yield Finding(
            subject="free space",
            level="warn" if free < LITTLE_SPACE else "ok",
            text=f"{free / 1024**3:.1f} GiB",
            advice="`svdq prune --older-than 30d` removes old videos" if free < LITTLE_SPACE else "",
        )


def check_packages() -> Iterator[Finding]:
    """List the installed versions and extras."""
    required = _requirements()
    versions = {name: _installed(name) for names in required.values() for name in names}
    base = ", ".join(f"{name} {versions[name]}" for name in ("redis", "rq", "fsspec", "pillow") if versions.get(name))
    yield Finding(
        subject="versions", level="ok", text=f"svdq {_installed('svdq')}, Python {platform.python_version()}, {base}"
    )
    missing = [name for name in required.get("worker", ()) if versions[name] is None]
    if missing:
        yield Finding(
            subject="worker extra",
            level="warn",
            text=f"not installed ({', '.join(missing)}): this machine can submit photos, not render them",
            advice="to render here, pip install 'svdq[worker]'",
        )
    else:
        shown = ("torch", "diffusers", "transformers", "safetensors")
        yield Finding(
            subject="worker extra",
            level="ok",
            text=", ".join(f"{name} {versions[name]}" for name in shown if versions.get(name)),
        )
    extras = [name for name in _STORAGE_EXTRAS if all(map(versions.get, required.get(name, [name])))]
    yield Finding(subject="storage extras", level="ok", text=", ".join(extras) or "none; folders need none")


def _requirements() -> dict[str, list[str]]:
    """Return the names of the packages that svdq requires, by extra; "" for the base packages."""
    found: dict[str, list[str]] = {}
    for line in importlib.metadata.requires("svdq") or []:
        name, extra = re.match(r"[\w.-]+", line), re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        if name:
            found.setdefault(extra[1] if extra else "", []).append(name[0])
    return found


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
