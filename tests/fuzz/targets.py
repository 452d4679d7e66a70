"""The readers of foreign data, each with valid input, its mutation and the exceptions that it documents."""

import contextlib
import io
import itertools
import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import numpy as np
import pillow_heif
import torch
from PIL import Image, features

from svdq.pipeline.errors import InputError, SampleError
from svdq.pipeline.media.image import load_photo, prepare_photo
from svdq.pipeline.media.video import write_video
from svdq.pipeline.models.base import ModelInfo, State, check_tensor
from svdq.pipeline.models.svd.parameters import SvdParameters
from svdq.producer.job import SvdJob
from svdq.producer.results.finished_videos import find_results, notice_of, read_provenance
from svdq.producer.settings_loader import load_settings, origins
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.parameters import SubmitOptions
from svdq.producer.submitting.photo_lists import read_batch
from svdq.producer.submitting.photos import check_data
from svdq.producer.watching.folder_config import FolderConfig
from svdq.worker.checkpoint.store import Codec
from svdq.worker.output.sidecar import find_result
from tests import icc
from tests.finished import add_video
from tests.fuzz.messages import framed, messages, mutate_checkpoint, mutate_message, read_message, sample
from tests.fuzz.mutate import mutate_bytes, mutate_csv, mutate_json, mutate_toml
from tests.fuzz.records import job_records
from tests.fuzz.run import Target

_MAX_PIXELS = 1_000_000
_NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)
_JOB = SvdJob(image=f"inputs/{'0' * 64}.jpg", name="photo", seed=1, steps=4, width=64, height=64, frames=2)
_PARAMETERS = SvdParameters(seed=3, steps=9, frames=2, width=64, height=64)


def photos(folder: Path, stack: ExitStack) -> Target:
    """Photos as they are submitted, and as the worker loads and prepares them."""
    path = folder / "photo.jpg"

    def read(data: bytes) -> None:
        with contextlib.suppress(InputError):
            check_data(data, path, _MAX_PIXELS)
        prepare_photo(load_photo(data, _MAX_PIXELS), 64, 64)

    return Target(seeds=_photo_seeds(), mutate=mutate_bytes, read=read, allowed=(SampleError,))


def _photo_seeds() -> list[bytes]:
    noise = Image.effect_noise((48, 32), 60)
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "words"
    seeds = []
    formats = [("JPEG", "RGB"), ("JPEG", "CMYK"), ("JPEG", "L"), ("PNG", "RGBA"), ("PNG", "P"), ("PNG", "I;16")]
    formats += [("WEBP", "RGBA"), ("TIFF", "RGB"), ("TIFF", "F"), ("GIF", "P"), ("BMP", "RGB"), ("PPM", "RGB")]
    formats += [("AVIF", "RGB")] * features.check("avif") + [("JPEG2000", "RGB")] * features.check("jpg_2000")
    for kind, mode in formats:
        image = Image.new(mode, noise.size, 300) if mode == "I;16" else noise.convert("RGB").convert(mode)
        options = {"exif": exif} if kind in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF") and mode != "F" else {}
        image.save(file := io.BytesIO(), kind, **options)
        seeds.append(file.getvalue())
    frames = [noise.convert("RGB")] * 2
    for kind in ("MPO", "GIF", "WEBP", "TIFF"):
        frames[0].save(file := io.BytesIO(), kind, save_all=True, append_images=frames[1:])
        seeds.append(file.getvalue())
    heic = pillow_heif.from_pillow(frames[0])
    heic.save(file3 := io.BytesIO(), exif=exif.tobytes())
    heic.add_from_pillow(frames[0].resize((16, 24)))
    heic.save(file4 := io.BytesIO(), primary_index=1)
    gray, display = icc.gray_profile(1.8), icc.rgb_profile(icc.DISPLAY_P3, None)
    inks = icc.cmyk_profile(dict.fromkeys(itertools.product((0, 1), repeat=4), (50, 0, 0)))
    for kind, mode, profile in (("TIFF", "CMYK", inks), ("PNG", "LA", gray), ("TIFF", "RGB", display)):
        noise.convert("RGB").convert(mode).save(file := io.BytesIO(), kind, icc_profile=profile)
        seeds.append(file.getvalue())
    noise.save(file := io.BytesIO(), "TIFF", compression="tiff_lzw")
    noise.convert("RGB").save(file2 := io.BytesIO(), "JPEG", progressive=True)
    return [*seeds, *(one.getvalue() for one in (file, file2, file3, file4))]


def _lists(name: str, seeds: Sequence[bytes], mutate: Callable[..., bytes]) -> Callable[[Path, ExitStack], Target]:
    def make(folder: Path, stack: ExitStack) -> Target:
        path = folder / name

        def read(data: bytes) -> None:
            path.write_bytes(data)
            read_batch(path, _NOW)

        return Target(seeds=seeds, mutate=mutate, read=read, allowed=(InputError,))

    return make


_CSV = b"""photo,frames,size,seed,motion_bucket_id,format,fit,priority,name,at,output
a.jpg,25,576x320,7,127,mp4 gif,crop,high,{stem}-{seed},,holiday/day 1
b.jpg,,,,60,,,,,2030-01-01 07:00,
"""
_JSONL = b"""{"photo": "a.jpg", "frames": 25, "size": "576x320", "format": ["mp4", "gif"], "name": "{stem}"}
{"photo": "b.jpg", "noise_aug_strength": 0.1, "at": "2030-01-01 07:00", "output": "x", "priority": "low"}
{"photo": "c.jpg", "family": "wan", "prompt": "a cat", "negative_prompt": "", "guidance_scale": 3.5, "flow_shift": 5}
"""
_WAN_CSV = b"""photo,frames,size,family,prompt,negative_prompt,guidance_scale,guidance_scale_2,flow_shift
a.jpg,17,832x480,wan,"A cat, jumping.",blur,3.5,1,5
b.jpg,,,,A dog.,,,,
"""


def _mutate_jsonl(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    lines = data.splitlines()
    number = random.randrange(len(lines))
    lines[number] = mutate_json(random, lines[number], lines)
    return b"\n".join(lines)


_SETTINGS = b"""redis_url = "redis://:secret@127.0.0.1:6379/0"
storage = "videos"
model = "preview"
max_pixels = 1000000
max_attempts = 2
stall_s = 60.5
memory_limit = "24GB"
"""
_FOLDER = b"""frames = 25
steps = 4
size = "576x320"
seed = 7
noise_aug_strength = 0.1
format = ["mp4", "gif"]
fit = "pad"
priority = "low"
"""


_WAN_FOLDER = b"""family = "wan"
prompt = "A cat jumps."
negative_prompt = "blur"
guidance_scale = 3.5
guidance_scale_2 = 1
flow_shift = 5.0
frames = 17
"""


def settings(folder: Path, stack: ExitStack) -> Target:
    """The settings file of the working folder and of the home."""
    home, here = folder / "home", folder / "here"
    home.mkdir()
    here.mkdir()
    stack.callback(os.chdir, Path.cwd())
    os.chdir(here)

    def read(data: bytes) -> None:
        for place in (here, home):
            (place / "svdq.toml").write_bytes(data)
            try:
                load_settings(home=home)
                origins(home=home)
            finally:
                (place / "svdq.toml").unlink()

    return Target(seeds=[_SETTINGS, _SETTINGS + _FOLDER], mutate=mutate_toml, read=read, allowed=(InputError,))


def folder_config(folder: Path, stack: ExitStack) -> Target:
    """The settings file of a watched folder."""
    (folder / "inner").mkdir()

    def read(data: bytes) -> None:
        (folder / "inner" / "svdq.toml").write_bytes(data)
        list(FolderConfig(folder, JobSpec()).spec_for("inner/a.jpg").options)

    return Target(seeds=[_FOLDER, _WAN_FOLDER], mutate=mutate_toml, read=read, allowed=(InputError,))


def _document() -> bytes:
    model = {"name": "preview", "notice": "preview", "compute": {"dtype": "float32"}}
    outputs = [f"/x/outputs/photo-{'1' * 20}.mp4"]
    document = {"svdq": "0.1", "job_id": "1" * 20, "job": _JOB.model_dump(mode="json"), "model": model}
    more = {"outputs": outputs, "finished_at": "2026-05-01T00:00:00+00:00", "seconds": {"encode": 1.0}}
    return json.dumps(document | more).encode()


def _read_like(path: Path) -> None:
    """Read as `svdq submit --like` and `svdq inspect` do."""
    document = read_provenance(path)
    notice_of(document)
    JobSpec(options=(SubmitOptions().with_defaults_from(document["job"]),)).check()


def sidecar(folder: Path, stack: ExitStack) -> Target:
    """A sidecar as `--like` reads it, as `find_results` does, and as the last rank does."""
    storage = Storage(str(folder / "storage"))
    good = add_video(storage, 2)
    job_id = add_video(storage, 1)
    path = folder / "storage" / "outputs" / f"photo-{job_id}.json"
    seeds = [path.read_bytes(), _document().replace(b"1" * 20, job_id.encode())]
    job = SvdJob.model_validate(json.loads(seeds[0])["job"])
    model = ModelInfo(name="preview", notice="")
    assert find_result(storage, model, job, job_id), "the seed is find_resultd"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        assert good in [result.job_id for result in find_results(storage)], "the other video is missing"
        json.dumps(find_result(storage, model, job, job_id)).encode()
        _read_like(path)

    return Target(seeds=seeds, mutate=mutate_json, read=read, allowed=(InputError,))


def video_comment(folder: Path, stack: ExitStack) -> Target:
    """The comment in a video file."""
    frames = np.zeros((2, 64, 64, 3), np.uint8)
    seeds = []
    for kind in ("mp4", "gif", "webp", "png"):
        path = folder / f"seed.{kind}"
        write_video(frames, path, kind, 7, _document().decode())
        seeds.append((path / "frame_0001.png" if kind == "png" else path).read_bytes())
    path = folder / "video.mp4"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        _read_like(path)

    return Target(seeds=seeds, mutate=mutate_bytes, read=read, allowed=(InputError,))


def rank_message(folder: Path, stack: ExitStack) -> Target:
    """What a neighboring rank sends, through a socket."""
    return Target(
        seeds=[framed(message) for message in messages(_PARAMETERS)],
        mutate=mutate_message,
        read=read_message,
        # Memory that cannot be had, below what the largest sample takes, ends the link as well.
        allowed=(ConnectionError, ValueError, RuntimeError),
    )


def checkpoint(folder: Path, stack: ExitStack) -> Target:
    """A checkpoint."""

    def check_state(state: State, parameters: SvdParameters) -> None:
        check_tensor(state, "latents", (1, parameters.num_frames, 4, 8, 8), "float32")

    codec = Codec(model="tiny", device=torch.device("cpu"), compute={"dtype": "float32"}, check_state=check_state)
    seeds = [codec.encode(replace(sample(_PARAMETERS), step=step)) for step in (1, 5)]

    def read(data: bytes) -> None:
        found = codec.decode(data, "job", _PARAMETERS)
        assert found.tensors["latents"].shape == (1, 2, 4, 8, 8)

    return Target(seeds=seeds, mutate=mutate_checkpoint, read=read, allowed=(ValueError,))


TARGETS: dict[str, Callable[[Path, ExitStack], Target]] = {
    "photo": photos,
    "list-csv": _lists("list.csv", [_CSV, _CSV.replace(b",", b";"), _WAN_CSV], mutate_csv),
    "list-jsonl": _lists("list.jsonl", [_JSONL], _mutate_jsonl),
    "settings": settings,
    "folder-config": folder_config,
    "sidecar": sidecar,
    "video-comment": video_comment,
    "job-records": job_records,
    "rank-message": rank_message,
    "checkpoint": checkpoint,
}
