"""Checks Redis, the storage, the model and the installation, and describes how to correct problems. Does not use torch.

Its only change is a small file in the storage, which is written, read and removed.
"""

import contextlib
import importlib.metadata
import math
import platform
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from svdq.pipeline.errors import InputError, SvdqError
from svdq.pipeline.installed import how_to_install
from svdq.pipeline.models.families import family_of, layout_of
from svdq.pipeline.models.folder_check import find_problems
from svdq.pipeline.models.folder_files import DTYPES, is_untrained, loaded_files, stored_shapes, variants
from svdq.pipeline.models.memory import WORKSPACE_BYTES, Activity, shape_for, size_text
from svdq.pipeline.models.model_names import find_folder, has_weights, resolve
from svdq.producer.queue import session
from svdq.producer.settings import Settings, without_secrets
from svdq.producer.storage.storage import Storage

#: Oldest server version that supports the commands we use.
OLDEST_REDIS = (6, 2)
#: Free bytes of a local storage below which a night's videos may not fit.
LITTLE_SPACE = 2 * 1024**3


class Finding(NamedTuple):
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
    return Finding(subject, "fail", str(error).rstrip("."))


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
        return Finding("redis", "fail", f"{where} is {product}", "install Redis 6.2 or newer, or Valkey")
    return Finding("redis", "ok", f"{where}, {product}")


def _persistence(info: dict[str, object]) -> Finding:
    subject = "persistence"
    if info.get("aof_last_write_status", "ok") != "ok" or info.get("rdb_last_bgsave_status", "ok") != "ok":
        return Finding(subject, "fail", "the server could not write its data to disk", "see its log; free its disk")
    if info.get("aof_enabled"):
        return Finding(subject, "ok", "append-only file")
    return Finding(
        subject,
        "warn",
        "no append-only file: a crash of the server may lose jobs",
        "set `appendonly yes` in redis.conf",
    )


def _eviction(info: dict[str, object]) -> Finding:
    policy = info.get("maxmemory_policy", "noeviction")
    subject = "maxmemory-policy"
    if policy == "noeviction":
        return Finding(subject, "ok", "noeviction")
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
            "storage", "fail", f"{storage.shown} returned other bytes than were written", "use another storage"
        )
        return
    yield Finding("storage", "ok", f"{storage.shown}: written, read and removed a file")
    if storage.folder is not None:
        free = shutil.disk_usage(storage.folder).free
        yield Finding(
            subject="free space",
            level="warn" if free < LITTLE_SPACE else "ok",
            text=f"{free / 1024**3:.1f} GiB",
            advice="`svdq prune --older-than 30d` removes old videos" if free < LITTLE_SPACE else "",
        )


def check_model(name: str) -> Iterator[Finding]:
    """Check the model with a name as in SVDQ_MODEL; nothing is fetched.

    The name is `preview`, `simulated[:…]`, a folder or a hub id.
    """
    if name == "preview":
        yield Finding("model", "ok", "preview (no diffusion model); SVDQ_MODEL chooses another")
        return
    try:
        if has_weights(name):
            yield from _check_folder(find_folder(name), name)
        else:
            resolve(name)
            yield Finding("model", "ok", f"{name} (its compute is a sleep, it makes no pictures)")
    except InputError as error:
        yield failure("model", error)


def _check_folder(folder: Path, name: str) -> Iterator[Finding]:
    layout = layout_of(folder, name)
    problems = list(find_problems(folder, name, layout))
    for problem in problems:
        yield Finding("model", "fail", problem.text, problem.advice)
    if problems:
        return
    found = {component: variants(folder, component) for component in layout.weighted}
    if half_only := [component for component, kinds in found.items() if kinds == {True}]:
        yield Finding(
            "model",
            "warn",
            f"{name} has only half precision weights ({', '.join(half_only)})",
            "they suffice for GPUs; to render on a CPU, fetch the full ones, too",
        )
    # Of files that no component needs, the hub's cache may have links without their targets.
    size = sum(path.stat().st_size for path in folder.glob("*/*.safetensors") if path.is_file())
    notice = ", untrained: shows noise" if is_untrained(folder) else ""
    yield Finding("model", "ok", f"{name}, a whole {layout.pipeline}, {size_text(size)}{notice}")
    if not notice:
        yield Finding("memory", "ok", _memory(folder, name))


def _memory(folder: Path, name: str) -> str:
    """Describe how much GPU memory the default video needs, as a worker estimates it, on a rank with all components."""
    family, layout = family_of(folder, name), layout_of(folder, name)
    facts, dtype = resolve(name).facts, DTYPES[family.half]
    open_video = family.parameters.model_validate({"seed": 0, "decode_chunk_size": 1})
    video = family.complete(open_video, facts)
    weights = {
        component: 2 * sum(map(math.prod, stored_shapes(loaded_files(folder, component, (True, False))).values()))
        for component in layout.weighted
    }
    activities: tuple[Activity, ...] = ("encode", "step", "decode")
    peak = max(family.memory(each, shape_for(each, video), dtype, facts, has_decoder=True) for each in activities)
    need = size_text(sum(weights.values()) + peak + WORKSPACE_BYTES)
    shape = f"{video.width}x{video.height} with {video.num_frames} frames"
    experts = [component for component in layout.denoisers if weights.get(component)]
    alone = min(sum(weights.values()) - sum(weights[other] for other in experts if other != each) for each in experts)
    text = f"{shape} needs at most about {need} of a GPU in {dtype}"
    if len(experts) == 1:
        return text
    return f"{text}, or {size_text(alone + peak + WORKSPACE_BYTES)} on a rank with one of the two experts"


def check_packages() -> Iterator[Finding]:
    """List the installed versions."""
    yield Finding("versions", "ok", f"Python {platform.python_version()}, {_versions('svdq', 'redis', 'rq', 'fsspec')}")
    names = [
        name[0]
        for line in importlib.metadata.requires("svdq") or []
        if re.search(r"extra == ['\"]worker['\"]", line) and (name := re.match(r"[\w.-]+", line))
    ]
    if missing := [name for name in names if not _versions(name)]:
        yield Finding(
            "worker extra",
            "warn",
            f"not installed ({', '.join(missing)}): this machine can submit photos, not render them",
            f"to render here, {how_to_install('worker')}",
        )
    else:
        yield Finding("worker extra", "ok", _versions("torch", "diffusers", "transformers", "safetensors"))


def _versions(*names: str) -> str:
    """List the versions of those packages that are installed."""
    found = []
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found)
