from pathlib import Path

import pytest
import redis

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.producer.queue import fetch, read_job
from svdq.producer.settings import Settings
from svdq.producer.submit import SubmitOptions, submit


def test_the_same_again_is_the_same_job(connection: redis.Redis, settings: Settings, photo: Path) -> None:
    options = SubmitOptions(frames=8, formats=("mp4", "gif"))
    (first,) = submit(settings, [photo], options)
    (again,) = submit(settings, [photo], options, priority="high")
    assert first.is_new
    assert not again.is_new
    assert (again.id, again.seed, again.status) == (first.id, first.seed, "queued")
    (forced,) = submit(settings, [photo], options, force=True)
    assert forced.id != first.id
    assert forced.image == first.image
    (seeded,) = submit(settings, [photo], SubmitOptions(frames=8, formats=("mp4", "gif"), seed=first.seed))
    assert seeded.id != first.id
    job = read_job(fetch(connection, first.id))
    assert job is not None
    assert (job.seed, job.frames, job.formats, job.name) == (first.seed, 8, ("mp4", "gif"), "a photo")
    assert len(list(Path(settings.storage, "inputs").iterdir())) == 1


def test_all_is_checked_before_anything_is_done(home: Path, settings: Settings, photo: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        submit(settings, [photo, tmp_path / "none.jpg"], SubmitOptions())
    with pytest.raises(InputError, match="--frames 0"):
        submit(settings, [photo], SubmitOptions(frames=0))
    with pytest.raises(InputError, match="priority"):
        submit(settings, [photo], SubmitOptions(), priority="highest")
    assert not home.exists()


def test_nothing_is_stored_when_redis_is_away(home: Path, photo: Path) -> None:
    with pytest.raises(UnavailableError):
        submit(Settings.load(redis_url="redis://127.0.0.1:1"), [photo], SubmitOptions())
    assert not home.exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (SubmitOptions(width=1000, height=500), "--size 1000x500 .* 1024x512"),
        (SubmitOptions(width=1, height=9999), "64x4096"),
        (SubmitOptions(motion_bucket_id=-1), "--motion-bucket-id -1"),
        (SubmitOptions(min_guidance_scale=5.0), "--min-guidance-scale 5.0 .* --max-guidance-scale 3.0"),
        (SubmitOptions(formats=("avi",)), "--format avi"),
        (SubmitOptions(fit="squeeze"), "--fit squeeze"),
        (SubmitOptions(seed=-1), "--seed -1"),
    ],
)
def test_bad_parameters(settings: Settings, photo: Path, options: SubmitOptions, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        submit(settings, [photo], options)
    assert "\n" not in str(caught.value)


def test_like(settings: Settings) -> None:
    recorded = {"image": "x", "name": "y", "frames": 9, "seed": 5, "formats": ["gif"], "decode_chunk_size": None}
    options = SubmitOptions(frames=3).over(recorded)
    assert (options.frames, options.seed, options.formats) == (3, 5, ["gif"])
    with pytest.raises(InputError, match="sparkle"):
        SubmitOptions().over({"sparkle": 1})
