"""Photos that have another one for the last frame: folders of pairs, lists and one photo for all."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import redis
from PIL import Image

from svdq.pipeline.errors import InputError
from svdq.producer.job_control import cancel
from svdq.producer.queue import fetch, read_job
from svdq.producer.results.prune import find_removals
from svdq.producer.results.remove import forget
from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.entries import Submission
from svdq.producer.submitting.photo_requests import read_batch
from svdq.producer.submitting.sources import find_photos
from svdq.producer.submitting.submission import submit, submit_all
from tests.queued import WanJob

NOW = datetime.now(UTC)


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Two pairs, the last frame of one in another format, and two photos without one."""
    folder = tmp_path / "pairs"
    folder.mkdir()
    names = ("a.jpg", "a.last.jpg", "b.1.png", "b.1.LAST.webp", "c.jpg", "d.last.jpg")
    for number, name in enumerate(names):
        Image.new("RGB", (80, 64), (40 * number, 9, 9)).save(folder / name)
    return folder


def job_of(connection: redis.Redis, submission: Submission) -> WanJob:
    job = read_job(fetch(connection, submission.id))
    assert isinstance(job, WanJob)
    return job


def test_a_folder_of_pairs(connection: redis.Redis, settings: Settings, pairs: Path) -> None:
    found = {photo.path.name: photo.last and photo.last.name for photo in find_photos([str(pairs)]).photos}
    assert found == {"a.jpg": "a.last.jpg", "b.1.png": "b.1.LAST.webp", "c.jpg": None, "d.last.jpg": None}
    made = submit(settings, [pairs], Draft(family="wan"))
    jobs = [job_of(connection, each) for each in made]
    assert [job.name for job in jobs] == ["a", "b.1", "c", "d.last"]
    assert [job.last_image is None for job in jobs] == [False, False, True, True]
    stored = {f"inputs/{path.name}" for path in Path(settings.storage, "inputs").iterdir()}
    assert stored == {key for job in jobs for key in job.photos}
    assert len(stored) == 6
    assert [each.is_new for each in submit(settings, [pairs], Draft(family="wan"))] == [False] * 4


def test_files_given_by_name_are_pairs_too(pairs: Path) -> None:
    [photo] = find_photos([str(pairs / "a.last.jpg"), str(pairs / "a.jpg")]).photos
    assert (photo.path.name, photo.last) == ("a.jpg", pairs / "a.last.jpg")
    [photo] = find_photos([str(pairs / "a.jpg")]).photos
    assert photo.last is None


def test_the_last_frame_is_part_of_the_id(connection: redis.Redis, settings: Settings, pairs: Path) -> None:
    photo, wan = pairs / "c.jpg", Draft(family="wan")
    made = [
        submit(settings, [photo], wan),
        submit(settings, [photo], wan, last_image=pairs / "a.jpg"),
        submit(settings, [photo], Draft(), last_image=pairs / "a.last.jpg"),  # decides the family
        submit(settings, [photo], Draft(loop=True)),
    ]
    assert len({each.id for [each] in made}) == 4
    [again] = submit(settings, [photo], wan, last_image=pairs / "a.jpg")
    assert (again.id, again.is_new) == (made[1][0].id, False)
    assert (job_of(connection, made[3][0]).loop, job_of(connection, made[3][0]).last_image) == (True, None)


def test_a_list_with_a_column_for_it(connection: redis.Redis, settings: Settings, pairs: Path) -> None:
    path = pairs / "list.csv"
    path.write_text("photo,last,prompt\nc.jpg,a.jpg,opens\nc.jpg,,stays\nc.jpg,d.last.jpg,\n")
    made = list(submit_all(settings, read_batch(path, lambda: NOW)))
    given = [job_of(connection, each) if number != 1 else None for number, each in enumerate(made)]
    assert [job.prompt if job else None for job in given] == ["opens", None, ""]
    assert len({job.last_image for job in given if job}) == 2


@pytest.mark.parametrize(
    ("options", "last", "words"),
    [
        (
            {"family": "svd"},
            "a.jpg",
            r"last does not apply to Stable Video Diffusion \(.*family svd\), only to Wan and LTX-2;",
        ),
        ({"family": "svd", "loop": True}, None, r"loop does not apply to Stable Video Diffusion"),
        ({"loop": True}, "a.jpg", r"^loop and last_image exclude each other; change one of them\.$"),
        ({"frames": 1}, "a.jpg", r"^frames 1 leaves no room for last_image; change one of them\.$"),
        ({"boomerang": True, "loop": True}, None, r"^loop and boomerang exclude each other; change one"),
        ({}, "none.jpg", r"^There is no file .*none\.jpg'; check its path\."),
        ({}, "text.jpg", r"^The file .*text\.jpg' is not a photo"),
    ],
)
def test_impossible_last_frames_are_sentences(
    home: Path, settings: Settings, pairs: Path, options: dict[str, object], last: str | None, words: str
) -> None:
    (pairs / "text.jpg").write_text("no photo")
    with pytest.raises(InputError) as caught:
        submit(settings, [pairs / "c.jpg"], Draft(**options), last_image=last and pairs / last)
    assert "\n" not in str(caught.value)
    caught.match(words)
    assert not home.exists()


def test_a_command_names_its_own_options(svdq, pairs: Path) -> None:
    done = svdq("submit", pairs / "c.jpg", "--last", pairs / "a.jpg", "--loop")
    assert (done.returncode, done.stderr) == (2, "Error: --loop and --last exclude each other; change one of them.\n")
    done = svdq("submit", pairs, "--family", "svd")
    assert done.stderr.startswith(f"Error: The last frame '{pairs / 'a.last.jpg'}' does not apply to Stable Video Diff")
    (pairs / "list.csv").write_text("photo,last,family\nc.jpg,a.jpg,svd\n")
    assert "list.csv, line 2: last does not apply to Stable Video" in svdq("batch", pairs / "list.csv").stderr


def test_both_photos_are_kept_while_they_are_needed(
    connection: redis.Redis, settings: Settings, pairs: Path, tmp_path: Path
) -> None:
    [made] = submit(settings, [pairs / "c.jpg"], last_image=pairs / "a.jpg")
    storage, home = Storage(settings.storage), Storage(str(tmp_path / "home"))

    def removed() -> set[str]:
        later = NOW + timedelta(days=99)
        return {removal.witness.key for removal in find_removals(connection, storage, home, timedelta(days=1), later)}

    photos = set(job_of(connection, made).photos)
    assert len(photos) == 2
    assert not photos & removed()
    cancel(connection, made.id)
    assert not photos & removed(), "a canceled job may be retried"
    assert forget(connection, made.id)
    assert photos <= removed()
