"""The jobs of one photo and their ids: what makes another job, and what the same submission finds again."""

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path

import pytest

from svdq.pipeline.errors import InputError
from svdq.pipeline.media.capture import Capture
from svdq.producer.job import Job
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.parameters import MAX_VIDEOS
from svdq.producer.submitting.photos import Photo, nearest_side

PHOTO = Photo(path=Path("a/cup.jpg"), sha256="0" * 64, extension="jpg", num_bytes=1, name="cup")
COPY = Photo(path=Path("b/copy.jpg"), sha256="0" * 64, extension="jpg", num_bytes=1, name="copy")


def jobs(spec: JobSpec, photo: Photo = PHOTO, first_index: int = 1) -> list[Job]:
    spec.check()
    return [entry.job for entry in spec.entries(photo, first_index)]


def ids(spec: JobSpec, photo: Photo = PHOTO, first_index: int = 1) -> list[str]:
    spec.check()
    return [entry.job_id for entry in spec.entries(photo, first_index)]


def test_drawn_seeds_of_variations() -> None:
    one, four = JobSpec(), JobSpec(variations=4)
    assert len({job.seed for job in jobs(four)}) == 4
    assert len(set(ids(four))) == 4
    assert ids(four) == ids(four)
    assert ids(four)[:1] == ids(one)  # the one that was submitted before counts
    assert ids(JobSpec(variations=4, force=True)) != ids(JobSpec(variations=4, force=True))


def test_given_seeds_of_variations() -> None:
    spec = JobSpec(drafts=(Draft(seed=10),), variations=3)
    assert [job.seed for job in jobs(spec)] == [10, 11, 12]
    assert ids(spec)[2:] == ids(JobSpec(drafts=(Draft(seed=12),)))


def test_a_sweep_with_variations() -> None:
    spec = JobSpec(drafts=(Draft(seed=1, fps=7), Draft(seed=1, fps=8)), variations=2)
    assert spec.num_jobs == 4
    assert [(job.fps, job.seed) for job in jobs(spec)] == [(7, 1), (7, 2), (8, 1), (8, 2)]
    assert len(set(ids(spec))) == 4


def test_a_name_that_is_given_counts() -> None:
    assert ids(JobSpec(), PHOTO) == ids(JobSpec(), COPY)
    named = JobSpec(name="{stem}-{seed}", folder="x")
    (job,) = jobs(named)
    assert job.name == f"cup-{job.seed}"
    assert job.folder == "x"
    assert len({*ids(JobSpec()), *ids(named), *ids(named, COPY), *ids(JobSpec(name="{stem}"))}) == 4


def test_the_same_named_submission_is_found_again() -> None:
    spec = JobSpec(name="{stem}-{index:03}-{variation}-{seed}", variations=2)
    assert ids(spec) == ids(spec, first_index=5)  # in another place of another list
    names = [job.name.rpartition("-")[0] for job in jobs(spec, first_index=5)]
    assert names == ["cup-005-1", "cup-006-2"]


def test_each_owner_may_have_a_folder() -> None:
    ana, ben = (JobSpec(owner=owner).with_output("{owner}/{stem}") for owner in ("ana", "ben"))
    assert [(job.folder, job.name) for job in jobs(ana) + jobs(ben)] == [("ana", "cup"), ("ben", "cup")]
    assert ids(ana) != ids(ben)


def test_names_have_parameters() -> None:
    spec = JobSpec(drafts=(Draft(frames=14),), name="{frames}-{fps}-{width}x{height}-{fit}")
    assert [job.name for job in jobs(spec)] == ["14-7-1024x576-crop"]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (JobSpec(priority="highest"), "priority 'highest'"),
        (JobSpec(at=datetime(2099, 1, 1, tzinfo=UTC), depends_on=("a",)), "--at and --depends-on"),
        (JobSpec(variations=0), "ask for 0 videos"),
        (JobSpec(variations=MAX_VIDEOS // 2 + 1, drafts=(Draft(), Draft(fps=8))), "for 10,002 videos"),
        (JobSpec(drafts=(Draft(), Draft(fps=0))), "--fps 0"),
        (JobSpec(drafts=(Draft(seed=2**63 - 2),), variations=3), "--seed"),
        (JobSpec(drafts=(Draft(model=""),)), "--model '' is not allowed: it must be at least one"),
        (JobSpec(drafts=(Draft(model=".."),)), "--model .. is not allowed: it must be a name that a file may"),
        (JobSpec(name="{colour}"), "colour"),
        (JobSpec(name="{frames}"), "left to the model"),
        (JobSpec(name="{stem:d}"), "cannot be made"),
    ],
)
def test_specs_that_are_not_allowed(spec: JobSpec, says: str) -> None:
    with pytest.raises(InputError, match=says):
        spec.check()


def test_errors_name_parameters_as_the_user_does() -> None:
    with pytest.raises(InputError, match=r"^motion_bucket_id -1 is not allowed"):
        JobSpec(drafts=(Draft(motion_bucket_id=-1),)).check(spell=str)
    with pytest.raises(InputError, match=r"^size 100x100 is not allowed"):
        JobSpec(drafts=(Draft(width=100, height=100),)).check(spell=str)


@pytest.mark.parametrize(("pixels", "side"), [(-1, 64), (0, 64), (95, 64), (97, 128), (10**400, 4096)])
def test_the_nearest_size_of_any_number(pixels: int, side: int) -> None:
    assert nearest_side(pixels, 64) == side
    with pytest.raises(InputError, match=rf"the nearest such size is {side}x576"):
        JobSpec(drafts=(Draft(width=pixels),)).check()


def placed(spec: JobSpec, source: str = "trip/day 1/cup.jpg") -> list[str]:
    photo = replace(PHOTO, source=source)
    return [f"{job.folder}/{job.name}" for job in jobs(spec, photo)]


def test_one_template_for_folder_and_name() -> None:
    seeded = JobSpec(drafts=(Draft(seed=7, family="wan", prompt="A wave: it breaks / rolls."),))
    assert placed(seeded.with_output("{folder}/{photo}-{seed}-{n}")) == ["day 1/cup-7-1"]
    assert placed(seeded.with_output("a/{prompt:.8}")) == ["a/A wave_"]
    assert placed(seeded.with_output("{folder}/{photo}"), "trip/cup.jpg") == ["trip/cup"]
    assert placed(seeded.with_output("{folder}/{photo}"), "trip/a/b/cup.jpg") == ["a/b/cup"]
    assert placed(seeded.with_output("{date}/")) == [f"{date.today()}/cup"]
    assert placed(seeded.with_output("{model}/x")) == ["wan/x/cup"]
    assert placed(seeded.with_output("holiday").below("day {1}")) == ["holiday/day {1}/cup"]
    assert placed(seeded.with_output("{prompt}/{photo}")) == ["A wave_ it breaks _ rolls/cup"]
    with pytest.raises(InputError, match="colour"):
        jobs(JobSpec().with_output("{colour}/{photo}"))


def test_ids_depend_neither_on_the_day_nor_on_the_place_in_a_list() -> None:
    spec = JobSpec(then=("",)).with_output("{date}/{seed}-{n}/{photo}")
    assert ids(spec) == ids(spec, first_index=5)
    assert ids(JobSpec().with_output("x/{photo}")) == ids(JobSpec(name="{photo}", folder="x"))
    assert {job.folder for job in jobs(spec)} == {f"{date.today()}/{jobs(spec)[0].seed}-1"}


def test_the_day_at_which_a_photo_was_taken() -> None:
    spec = JobSpec().with_output("{taken:%Y-%m}/{photo} {taken}")
    dated = replace(PHOTO, capture=Capture(time=datetime(2024, 5, 31, 23, 30, tzinfo=timezone(timedelta(hours=9)))))
    assert [f"{job.folder}/{job.name}" for job in jobs(spec, dated)] == ["2024-05/cup 2024-05-31"]
    assert placed(spec) == ["undated/cup undated"]
    assert ids(spec, dated) == ids(spec, dated, first_index=5)


def test_200_photos_of_three_folders() -> None:
    spec = JobSpec().with_output("{folder}/{photo}-{n:03}")
    photos = [
        replace(PHOTO, source=f"trip/{'abc'[n % 3]}/p{n}.jpg", name=f"p{n}", sha256=f"{n:064x}") for n in range(200)
    ]
    made = [f"{job.folder}/{job.name}" for n, photo in enumerate(photos, 1) for job in jobs(spec, photo, n)]
    assert made == [f"{'abc'[n % 3]}/p{n}-{n + 1:03}" for n in range(200)]
