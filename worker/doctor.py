"""Checks Redis, storage, model, GPUs, ffmpeg and the installation, and describes how to correct problems.

It needs only the base install. `python -m svdq.worker.doctor DEVICE PARENT` multiplies matrices on a GPU, which may
crash or hang the process; exit code 1 and the reason if that fails.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import signal
import sys
import uuid
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

from svdq.pipeline.errors import InputError, SvdqError, UnavailableError, how_to_install
from svdq.pipeline.imports import plain_imports
from svdq.pipeline.media.ffmpeg import ffmpeg_version
from svdq.pipeline.models.compute.memory import size_text
from svdq.pipeline.models.families import FAMILIES, family_of, layout_of
from svdq.pipeline.models.model_name import has_weights, is_model_file
from svdq.pipeline.models.names.model_names import find_folder, resolve
from svdq.pipeline.models.names.sized_model import sized_model
from svdq.pipeline.models.needs import Residency, published
from svdq.pipeline.models.upscaler_file import find_upscaler
from svdq.pipeline.models.weights.comfy_quant import ON_PROCESSORS, formats_of_gpu
from svdq.pipeline.models.weights.model_folder import find_problems, is_untrained, variants
from svdq.producer.connection import session
from svdq.producer.pauses import read_pauses
from svdq.producer.processes import die_with_parent
from svdq.producer.settings import Settings, shown_redis_url
from svdq.producer.storage.storage import Storage
from svdq.producer.text import duration
from svdq.producer.threads import within
from svdq.worker.cards import Cards
from svdq.worker.fit import NUM_VIDEOS, lack_of_disk, to_fetch, ways
from svdq.worker.launcher.gpu_users import users_of_gpus
from svdq.worker.launcher.gpus import GPUS_BY_BUS, least_capability, memory_of_gpus

OLDEST_REDIS = (6, 2)  # oldest server version that supports the commands we use
LITTLE_SPACE = 2 * 1024**3  # free bytes of a local storage
SIDE = 4096  # side of the matrices, 64 MiB each; sums of so many ones are exact


class Finding(NamedTuple):
    """The result of one check."""

    subject: str  # such as `redis`
    level: Literal["ok", "warn", "fail"]  # `warn` works with restrictions; `fail` does not work
    text: str
    advice: str = ""  # what to do, as a clause; "" if there is nothing to do


def _failure(subject: str, error: SvdqError) -> Finding:
    return Finding(subject, "fail", str(error).rstrip("."))


def limited(seconds: float, check: Callable[[Settings], Iterable[Finding]], settings: Settings) -> Iterator[Finding]:
    """Yield the findings of a check of the storage, or that it does not answer in time."""
    try:
        yield from within(seconds, lambda: [*check(settings)])
    except TimeoutError:
        advice = "check the server, the mount and the network"
        yield Finding("storage", "fail", f"no answer in {seconds:g} s", advice)


def check_redis(settings: Settings) -> Iterator[Finding]:
    """Check the Redis server; start the embedded one if it is configured and not running."""
    where = shown_redis_url(settings.redis_url) if settings.redis_url else f"embedded in {settings.home}"
    try:
        with session(settings) as connection:
            info = connection.info()
            pauses = read_pauses(connection)
    except SvdqError as error:
        yield _failure("redis", error)
        return
    assert isinstance(info, dict)
    version = str(info.get("redis_version", "0"))
    product = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {version}"
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < OLDEST_REDIS:
        yield Finding("redis", "fail", f"{where} is {product}", "install Redis 6.2 or newer, or Valkey")
    else:
        yield Finding("redis", "ok", f"{where}, {product}")
    if info.get("aof_last_write_status", "ok") != "ok" or info.get("rdb_last_bgsave_status", "ok") != "ok":
        text = "the server could not write its data to disk"
        yield Finding("persistence", "fail", text, "see its log; free its disk")
    elif info.get("aof_enabled"):
        yield Finding("persistence", "ok", "append-only file")
    else:
        text = "no append-only file: a crash of the server may lose jobs"
        yield Finding("persistence", "warn", text, "set `appendonly yes` in redis.conf")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy == "noeviction":
        yield Finding("maxmemory-policy", "ok", "noeviction")
    else:
        limit = "" if info.get("maxmemory") else ", once it has a maxmemory"
        text, advice = f"{policy}: a full server drops jobs{limit}", "set `maxmemory-policy noeviction` in redis.conf"
        yield Finding("maxmemory-policy", "warn" if limit else "fail", text, advice)
    for pause in pauses:
        yield Finding("intake", "warn", pause.text.rstrip("."))


def check_storage(settings: Settings) -> Iterator[Finding]:
    """Write, read and remove a small file in the storage; check the free space of a folder."""
    try:
        storage = Storage(settings.storage)
        key = f"doctor-{uuid.uuid4().hex}.txt"
        storage.write_bytes(key, b"")
        try:
            storage.read(key)
        finally:
            storage.remove(key)
    except SvdqError as error:
        yield _failure("storage", error)
        return
    yield Finding("storage", "ok", f"{storage.shown}: written, read and removed a file")
    if storage.folder is not None:
        free = shutil.disk_usage(storage.folder).free
        advice = "`svdq prune --older-than 30d` removes old videos" if free < LITTLE_SPACE else ""
        yield Finding("free space", "warn" if advice else "ok", f"{free / 1024**3:.1f} GiB", advice)


def check_model(name: str, weights: str = "auto") -> Iterator[Finding]:
    """Check a model by its name, as in SVDQ_MODEL, whose weights are held as SVDQ_WEIGHTS says; nothing is fetched."""
    if name == "preview":
        yield Finding("model", "ok", "preview (no diffusion model); SVDQ_MODEL chooses another")
        return
    try:
        if has_weights(name):
            yield from _check_folder(name, weights)
        else:
            resolve(name)
            yield Finding("model", "ok", f"{name} (its compute is a sleep, it makes no pictures)")
    except InputError as error:
        yield _failure("model", error)
        if published(name) is not None or is_model_file(name):
            yield from _check_fit(name)


def _check_folder(name: str, weights: str) -> Iterator[Finding]:
    if is_model_file(name):
        model = resolve(name)
        if can_read := importlib.util.find_spec("torch") is not None:
            from svdq.pipeline.models.weights.components import check_model_file

            list(check_model_file(model, layout_of(model)))
        files = "its files belong together" if can_read else "its files are not checked, which needs torch"
        yield Finding("model", "ok", f"{model.name}, from {model.base}; {files}")
        yield from _check_formats(model.formats, weights)
        yield from _check_fit(name)
        return
    folder = find_folder(name)
    _, layout = family_of(folder, name)
    if problems := list(find_problems(folder, name, layout)):
        yield from (Finding("model", "fail", problem.rstrip(".")) for problem in problems)
        return
    formats = resolve(name).formats  # which also checks what only the family knows
    if half_only := [component for component in layout.weighted if variants(folder, component) == {True}]:
        text = f"{name} has only half precision weights ({', '.join(half_only)})"
        yield Finding("model", "warn", text, "they suffice for GPUs; to render on a CPU, fetch the full ones, too")
    # Of files that no component needs, the hub's cache may have links without their targets.
    size = size_text(sum(path.stat().st_size for path in folder.glob("*/*.safetensors") if path.is_file()))
    if is_untrained(folder):
        yield Finding("model", "ok", f"{name}, a whole {layout.pipeline}, {size}, untrained: shows noise")
    else:
        yield Finding("model", "ok", f"{name}, a whole {layout.pipeline}, {size}")
        yield from _check_formats(formats, weights)
        yield from _check_fit(name)


def _check_formats(formats: Collection[str], weights: str) -> Iterator[Finding]:
    """Say in which formats of a model's files its layers multiply on this machine."""
    if not formats:
        return
    capability = least_capability()
    kernels = ON_PROCESSORS if weights == "native" else frozenset[str]()
    kernels = kernels if capability is None else formats_of_gpu(capability)
    if weights in ("stored", "made") or importlib.util.find_spec("comfy_kitchen") is None:
        kernels = frozenset()
    native, others = ([each for each in formats if (each in kernels) == is_native] for is_native in (True, False))
    texts = [f"layers multiply in {' and '.join(native)}, as the files store them"] if native else []
    texts += [f"weights in {' and '.join(others)} are made in the type computed in"] if others else []
    yield Finding("weights", "ok", "; ".join(texts))


def _check_fit(name: str) -> Iterator[Finding]:
    """Say what a known model needs, of the GPUs of this machine if it has any."""
    try:
        known = sized_model(name)
    except InputError:
        return
    if fetch := to_fetch(known):
        lack = lack_of_disk(known)
        advice = "free some, or set HF_HOME to a folder on a larger disk" if lack else ""
        yield Finding("download", "fail" if lack else "ok", "; ".join(filter(None, [fetch, lack])), advice)
    video, cards = known.video(), Cards.here()
    shape = f"{video.width}x{video.height} with {video.num_frames} frames"
    if cards is None:
        needs = {each: known.peak(video, each) for each in get_args(Residency)}
        text = f"{shape} needs at most about {size_text(needs['resident'])} of a GPU in {known.dtype}"
        if known.has_experts:
            bound, rounds = size_text(needs["bound"]), size_text(needs["rounds"])
            text += f", {bound} on a rank with one of the two experts, or {rounds} on a rank that works in rounds"
        yield Finding("memory", "ok", text)
        return
    if known.has_blocks:
        yield Finding("files", "ok", f"of the transformer, take {cards.files()}")
    step = cards.step_of(known.published)
    found = ways(known, video, cards, NUM_VIDEOS, step.step_s if step else None)
    for way in found:
        fits = f"fits the {size_text(cards.room_bytes)} of {cards}" if way.fits else f"too much for {cards}"
        time = f", {NUM_VIDEOS} videos in {duration(way.time_s)}" if way.fits and way.time_s is not None else ""
        host = f" and {size_text(way.host_bytes)} of host memory" if way.host_bytes else ""
        need = f"{shape} needs {size_text(way.need_bytes)}{host}"
        yield Finding("memory", "ok", f"`{way.command}`: {need}: {fits}{time}")
    if not any(way.fits for way in found):
        yield Finding("memory", "warn", f"{shape} does not fit {cards}", "see docs/gpus.md for what does")
    elif step is not None:
        # For how long depends on disk and memory.
        start = f"a worker reads {size_text(sum(map(replace(known, kept=True).weights, known.num_weights)))}"
        text = f"by steps of {step.step_s:g} s ({step.source}), not measured here; {start} for its first video"
        yield Finding("times", "ok", text)


def check_upscaler(settings: Settings) -> Iterator[Finding]:
    """Load the upscaler as a worker does, if the settings name one."""
    if settings.upscaler is None:
        return
    try:
        file = find_upscaler(settings.upscaler, settings.loras)
        import torch

        from svdq.pipeline.models.upscaler import Upscaler

        Upscaler(file, torch.device("cpu"))
    except InputError as error:
        yield _failure("upscaler", error)
    else:
        yield Finding("upscaler", "ok", str(file))


def check_machine() -> Iterator[Finding]:
    """Check GPUs, torch and ffmpeg; a machine without GPUs renders on its CPU."""
    rows, failure = memory_of_gpus()
    for index, name, total, free in rows:
        yield Finding(f"GPU {index}", "ok", f"{name}, {_gib(total)}, {_gib(free)} free")
    for user in users_of_gpus() if rows else ():
        yield Finding(f"GPU {user.gpu}", "warn", str(user), user.advice)
    if failure:
        advice = "see `dmesg`; a GPU that is lost needs a reset or a reboot"
        yield Finding("GPUs", "warn" if rows else "fail", failure, advice)
    elif not rows:
        yield Finding("GPUs", "ok", "none; videos are rendered on the processors")
    has_torch = importlib.util.find_spec("torch") is not None
    if rows and has_torch:
        import torch

        if not torch.cuda.is_available():
            advice = "install a CUDA build of torch and a driver that is new enough for it"
            yield Finding("torch", "warn", f"torch {torch.__version__} cannot use the GPUs", advice)
    try:
        yield Finding("ffmpeg", "ok", ffmpeg_version())
    except UnavailableError as error:
        sentence, _, advice = str(error).partition("; ")
        yield Finding("ffmpeg", "fail" if has_torch else "warn", sentence, advice.rstrip("."))


def _gib(mebibytes: str) -> str:
    # nvidia-smi says "[N/A]" of a GPU that uses the host's memory.
    return f"{int(mebibytes) / 1024:.0f} GiB" if mebibytes.isdigit() else "memory unknown"


def check_packages() -> Iterator[Finding]:
    """List the installed versions."""
    yield Finding("versions", "ok", f"Python {platform.python_version()}, {_versions('svdq', 'redis', 'rq', 'fsspec')}")
    names = ("torch", "diffusers", "transformers", "safetensors")
    if missing := [name for name in names if not _versions(name)]:
        text = f"not installed ({', '.join(missing)}): this machine can submit photos, not render them"
        yield Finding("worker extra", "warn", text, f"to render here, {how_to_install('worker')}")
        return
    try:
        with plain_imports():
            from svdq.pipeline.models.weights.components import check_installation

            check_installation(layout for family in FAMILIES for layout in family.layouts.values())
    except InputError as error:
        yield _failure("worker extra", error)
    else:
        yield Finding("worker extra", "ok", _versions(*names))


def _versions(*names: str) -> str:
    found = []
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found)


def multiply(device: str, parent: int) -> None:
    """Multiply matrices on one device, named as in CUDA_VISIBLE_DEVICES; end the process if that fails."""
    if follow_parent := die_with_parent(signal.SIGKILL, parent=parent):
        follow_parent()
    # Before torch looks for devices.
    os.environ.update(GPUS_BY_BUS | os.environ | {"CUDA_VISIBLE_DEVICES": device})
    warnings.simplefilter("ignore")
    import torch

    from svdq.pipeline.models.compute.failures import is_out_of_memory

    try:
        ones = torch.ones((SIDE, SIDE), device="cuda")
        is_right = bool((ones @ ones == SIDE).all())
    except Exception as error:  # noqa: BLE001 - torch raises many types
        if is_out_of_memory(error):
            return  # other programs use it, which shows that it works
        sys.exit(str(error).strip().partition("\n")[0] or type(error).__name__)
    if not is_right:
        sys.exit("it multiplies wrongly")


if __name__ == "__main__":
    multiply(sys.argv[1], int(sys.argv[2]))
