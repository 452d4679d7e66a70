"""Every reader of data that others may write, with valid input that is changed at random.

A reader raises what it documents and nothing else. `--hypothesis-profile long` tries more inputs, and others each time.
"""

import contextlib
import io
import itertools
import json
import re
import zlib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pillow_heif
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, features
from rq.results import Result

from svdq.cli.view import lines_of
from svdq.pipeline.errors import InputError, SampleError
from svdq.pipeline.media.image import load_photo, prepare_photo
from svdq.pipeline.media.video import write_video
from svdq.producer.queue import fetch
from svdq.producer.results.finished_videos import find_results, read_provenance
from svdq.producer.status import snapshot
from svdq.producer.status.job_view import view_many
from svdq.producer.status.selection import list_jobs
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.photo_requests import read_batch
from svdq.producer.submitting.photos import check_data
from svdq.producer.watching.folder_config import FolderConfig
from tests import icc
from tests.finished import add_video
from tests.queued import SvdJob, WanJob, enqueue

#: The readers get folders and a server of a whole test, which its inputs share on purpose.
pytestmark = pytest.mark.slow
shared = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

DEEP = 2000
NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)
#: A value of JSON, TOML or CSV: a string, a number or a word.
TOKEN = re.compile(rb'"[^"\n]*"|[^\s,:=\[\]{}"]+')
ODD = [
    *("", " ", "null", "true", "-1", "0", "0.5", "1e308", "1e999", "NaN", "inf", "9" * 400, "9" * 5000, str(2**63)),
    *('""', '"7"', r'"\ud800"', r'"\u0000"', r'"\u001b[31m"', '"../../x"', '"9999-12-31T23:59:59Z"', "0001-01-01"),
    *("[]", "{}", "[[]]", '[1, "a", {}]', '{"a": null}', "[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP),
    *(
        "{a = 1}",
        "{stem.__class__}",
        "{seed:9999999999}",
        "0x10",
        "576x320",
        "99999999x1",
        "x" * 100_000,
        "\x00",
        '"a\nb"',
    ),
]
LENGTHS = [0, 1, 2**15, 2**16 - 1, 2**31, 2**32 - 1, 2**40, 2**64 - 1]


@st.composite
def changed(draw: st.DrawFn, seeds: Sequence[bytes]) -> bytes:
    """Valid input with one to four changes of values or bytes."""
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(1, 4))):
        tokens = list(TOKEN.finditer(data[:20_000])) if draw(st.booleans()) else []
        if tokens:
            token = draw(st.sampled_from(tokens))
            start, end, part = *token.span(), draw(st.sampled_from(ODD)).encode()
        else:
            start = draw(st.integers(0, len(data)))
            end = start + draw(st.sampled_from([0, 1, 4, 16, 256, len(data)]))
            length = draw(st.sampled_from(LENGTHS)) % 2**32
            part = draw(st.binary(max_size=16) | st.just(data[start:end] * 3) | st.just(length.to_bytes(4, "big")))
        data = data[:start] + part + data[end:]
    return data


def photo_files() -> list[bytes]:
    noise = Image.effect_noise((48, 32), 60)
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "words"
    files = []

    def save(image: Image.Image, kind: str, **options: object) -> None:
        image.save(file := io.BytesIO(), kind, **options)
        files.append(file.getvalue())

    formats = [("JPEG", "RGB"), ("JPEG", "CMYK"), ("JPEG", "L"), ("PNG", "RGBA"), ("PNG", "P"), ("PNG", "I;16")]
    formats += [("WEBP", "RGBA"), ("TIFF", "RGB"), ("TIFF", "F"), ("GIF", "P"), ("BMP", "RGB"), ("PPM", "RGB")]
    formats += [("AVIF", "RGB")] * features.check("avif") + [("JPEG2000", "RGB")] * features.check("jpg_2000")
    for kind, mode in formats:
        image = Image.new(mode, noise.size, 300) if mode == "I;16" else noise.convert("RGB").convert(mode)
        save(image, kind, **({"exif": exif} if kind in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF") and mode != "F" else {}))
    color = noise.convert("RGB")
    for kind in ("MPO", "GIF", "WEBP", "TIFF"):
        save(color, kind, save_all=True, append_images=[color])
    inks = icc.cmyk_profile(dict.fromkeys(itertools.product((0, 1), repeat=4), (50, 0, 0)))
    save(color.convert("CMYK"), "TIFF", icc_profile=inks)
    save(color.convert("LA"), "PNG", icc_profile=icc.gray_profile(1.8))
    save(color, "TIFF", icc_profile=icc.rgb_profile(icc.DISPLAY_P3, None))
    heic = pillow_heif.from_pillow(color)
    heic.add_from_pillow(color.resize((16, 24)))
    heic.save(file := io.BytesIO(), primary_index=1, exif=exif.tobytes())
    return [*files, file.getvalue()]


@shared
@given(changed(photo_files()))
def test_a_photo_is_read_or_refused(tmp_path: Path, data: bytes) -> None:
    """As it is submitted, and as a worker prepares it."""
    with contextlib.suppress(InputError):
        check_data(data, tmp_path / "photo.jpg", 1_000_000)
    with contextlib.suppress(SampleError):
        prepare_photo(load_photo(data, 1_000_000), 64, 64)


CSV = b"""photo,frames,size,seed,motion_bucket_id,format,fit,priority,name,at,output
a.jpg,25,576x320,7,127,mp4 gif,crop,high,{stem}-{seed},,holiday/day 1
b.jpg,,,,60,,,,,2030-01-01 07:00,
"""
WAN_CSV = b"""photo,frames,size,family,prompt,negative_prompt,guidance_scale,guidance_scale_2,flow_shift
a.jpg,17,832x480,wan,"A cat, jumping.",blur,3.5,1,5
b.jpg,,,,A dog.,,,,
"""
JSONL = b"""{"photo": "a.jpg", "frames": 25, "size": "576x320", "format": ["mp4", "gif"], "name": "{stem}"}
{"photo": "b.jpg", "noise_aug_strength": 0.1, "at": "2030-01-01 07:00", "output": "x", "priority": "low"}
{"photo": "c.jpg", "family": "wan", "prompt": "a cat", "negative_prompt": "", "guidance_scale": 3.5, "flow_shift": 5}
"""


@pytest.mark.parametrize(
    ("name", "seeds"), [("list.csv", (CSV, CSV.replace(b",", b";"), WAN_CSV)), ("list.jsonl", (JSONL,))]
)
def test_a_list_is_read_or_refused(tmp_path: Path, name: str, seeds: Sequence[bytes]) -> None:
    path = tmp_path / name

    @shared
    @given(changed(seeds))
    def read(data: bytes) -> None:
        path.write_bytes(data)
        with contextlib.suppress(InputError):
            read_batch(path, lambda: NOW)

    read()


FOLDER = b"""frames = 25
steps = 4
size = "576x320"
seed = 7
noise_aug_strength = 0.1
format = ["mp4", "gif"]
fit = "pad"
priority = "low"
"""
WAN_FOLDER = b"""family = "wan"
prompt = "A cat jumps."
negative_prompt = "blur"
guidance_scale = 3.5
guidance_scale_2 = 1
flow_shift = 5.0
frames = 17
"""


@shared
@given(changed([FOLDER, WAN_FOLDER]))
def test_the_settings_of_a_watched_folder_are_read_or_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "svdq.toml").write_bytes(data)
    with contextlib.suppress(InputError):
        list(FolderConfig(tmp_path, JobSpec()).spec_for("a.jpg").drafts)


def read_like(path: Path) -> None:
    """Read as `svdq submit --like` and `svdq inspect` do."""
    with contextlib.suppress(InputError):
        JobSpec(drafts=(Draft().with_defaults_from(read_provenance(path).job),)).check()


def test_a_broken_sidecar_hides_no_other_video(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    good, job_id = add_video(storage, 2), add_video(storage, 1)
    path = tmp_path / "outputs" / f"photo-{job_id}.json"

    @shared
    @given(changed([path.read_bytes()]))
    def read(data: bytes) -> None:
        path.write_bytes(data)
        assert good in [result.job_id for result in find_results(storage)]
        read_like(path)

    read()


@pytest.mark.parametrize("kind", ["mp4", "gif", "webp", "png"])
def test_the_comment_of_a_video_is_read_or_refused(tmp_path: Path, kind: str) -> None:
    job = SvdJob(image=f"inputs/{'0' * 64}.jpg", name="photo", seed=1, steps=4).model_dump(mode="json")
    model = {"name": "preview", "notice": "preview", "compute": {"dtype": "float32"}}
    path = tmp_path / f"video.{kind}"
    comment = json.dumps({"svdq": "0.1", "job_id": "1" * 20, "job": job, "model": model})
    write_video(np.zeros((2, 64, 64, 3), np.uint8), path, kind, 7, comment)
    path = path / "frame_0001.png" if kind == "png" else path

    @shared
    @given(changed([path.read_bytes()]))
    def read(data: bytes) -> None:
        path.write_bytes(data)
        read_like(path)

    read()


JOBS = (
    SvdJob(image=f"inputs/{'0' * 64}.jpg", name="photo", seed=1, steps=4),
    WanJob(image=f"inputs/{'0' * 64}.jpg", name="photo", prompt="A cat jumps.", seed=1),
)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: type(job).__name__)
def test_a_broken_record_hides_no_other_job(connection: redis.Redis, job: SvdJob | WanJob) -> None:
    """Who may write to Redis breaks listings of that job at most."""
    bad, good = "b" * 20, "a" * 20
    enqueue(connection, JOBS[0], good)
    enqueue(connection, job, bad)
    rq_job = fetch(connection, bad)
    rq_job.meta = {"step": 2, "rank": 0, "used": {"frames": 25}}
    rq_job.save_meta()
    Result.create(rq_job, Result.Type.SUCCESSFUL, ttl=1000, return_value={"outputs": ["/x.mp4"], "model": "tiny"})
    ((entry, result),) = connection.xrange(Result.get_key(bad))
    record = connection.hgetall(f"rq:job:{bad}")
    packed = {name for name, value in record.items() if value[:1] == b"x"}

    def unpacked(value: bytes) -> bytes:
        with contextlib.suppress(zlib.error):
            return zlib.decompress(value)
        return value

    fields: dict[tuple[str, bytes], bytes] = {("job", name): unpacked(value) for name, value in record.items()}
    fields |= {("result", name): value for name, value in result.items()}

    @shared
    @given(st.data())
    def read(draw: st.DataObject) -> None:
        of, name = draw.draw(st.sampled_from(sorted(fields)))
        data = draw.draw(changed([fields[of, name]]))
        if of == "job":
            connection.hset(f"rq:job:{bad}", mapping=record | {name: zlib.compress(data) if name in packed else data})
        else:
            connection.delete(Result.get_key(bad))
            connection.xadd(Result.get_key(bad), result | {name: data}, id=entry)
        views = view_many(connection, [bad, good])
        assert views[-1].is_readable
        everything = snapshot.take(connection)
        snapshot.estimate(connection, views, everything.groups)
        assert good in [view.id for view in list_jobs(connection)]
        json.dumps([everything.as_json(), *(view.as_json() for view in views)], allow_nan=False).encode()
        lines_of(everything)

    read()
