"""The jobs of one photo and their ids: what makes another job, and what the same submission finds again."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from svdq.pipeline.errors import InputError
from svdq.producer.job import Job
from svdq.producer.submitting.options import MAX_VIDEOS, SubmitOptions, nearest_side
from svdq.producer.submitting.order import Order
from svdq.producer.submitting.photos import Photo

PHOTO = Photo(path=Path("a/cup.jpg"), sha256="0" * 64, extension="jpg", name="cup")
COPY = Photo(path=Path("b/copy.jpg"), sha256="0" * 64, extension="jpg", name="copy")


def jobs(order: Order, photo: Photo = PHOTO, first_index: int = 1) -> list[Job]:
    order.check()
    return [job for job, _ in order.jobs(photo, first_index)]


def ids(order: Order, photo: Photo = PHOTO, first_index: int = 1) -> list[str]:
    order.check()
    return [job_id for _, job_id in order.jobs(photo, first_index)]


def test_drawn_seeds_of_variations() -> None:
    one, four = Order(), Order(variations=4)
    assert len({job.seed for job in jobs(four)}) == 4
    assert len(set(ids(four))) == 4
    assert ids(four) == ids(four)
    assert ids(four)[:1] == ids(one)  # the one that was submitted before counts
    assert ids(Order(variations=4, force=True)) != ids(Order(variations=4, force=True))


def test_given_seeds_of_variations() -> None:
    order = Order(options=(SubmitOptions(seed=10),), variations=3)
    assert [job.seed for job in jobs(order)] == [10, 11, 12]
    assert ids(order)[2:] == ids(Order(options=(SubmitOptions(seed=12),)))


def test_a_sweep_with_variations() -> None:
    order = Order(options=(SubmitOptions(seed=1, fps=7), SubmitOptions(seed=1, fps=8)), variations=2)
    assert order.num_jobs == 4
    assert [(job.fps, job.seed) for job in jobs(order)] == [(7, 1), (7, 2), (8, 1), (8, 2)]
    assert len(set(ids(order))) == 4


def test_a_name_that_is_given_counts() -> None:
    assert ids(Order(), PHOTO) == ids(Order(), COPY)
    named = Order(name="{stem}-{seed}", folder="x")
    (job,) = jobs(named)
    assert job.name == f"cup-{job.seed}"
    assert job.folder == "x"
    assert len({*ids(Order()), *ids(named), *ids(named, COPY), *ids(Order(name="{stem}"))}) == 4


def test_the_same_named_submission_is_found_again() -> None:
    order = Order(name="{stem}-{index:03}-{variation}-{seed}", variations=2)
    assert ids(order) == ids(order, first_index=5)  # in another place of another list
    names = [job.name.rpartition("-")[0] for job in jobs(order, first_index=5)]
    assert names == ["cup-005-1", "cup-006-2"]


def test_names_have_parameters() -> None:
    order = Order(options=(SubmitOptions(frames=14),), name="{frames}-{fps}-{width}x{height}-{fit}")
    assert [job.name for job in jobs(order)] == ["14-7-1024x576-crop"]


@pytest.mark.parametrize(
    ("order", "says"),
    [
        (Order(priority="highest"), "priority 'highest'"),
        (Order(at=datetime(2099, 1, 1, tzinfo=UTC), after=("a",)), "--at and --after"),
        (Order(variations=0), "--variations"),
        (Order(variations=MAX_VIDEOS // 2 + 1, options=(SubmitOptions(), SubmitOptions(fps=8))), "--variations"),
        (Order(options=(SubmitOptions(), SubmitOptions(fps=0))), "--fps 0"),
        (Order(options=(SubmitOptions(seed=2**63 - 2),), variations=3), "--seed"),
        (Order(name="{colour}"), "colour"),
        (Order(name="{frames}"), "left to the model"),
        (Order(name="{stem:d}"), "cannot be made"),
    ],
)
def test_what_is_not_allowed(order: Order, says: str) -> None:
    with pytest.raises(InputError, match=says):
        order.check()


def test_errors_name_parameters_as_the_user_does() -> None:
    with pytest.raises(InputError, match=r"^motion_bucket_id -1 is not allowed"):
        Order(options=(SubmitOptions(motion_bucket_id=-1),)).check(spell=str)
    with pytest.raises(InputError, match=r"^size 100x100 is not allowed"):
        Order(options=(SubmitOptions(width=100, height=100),)).check(spell=str)


@pytest.mark.parametrize(("pixels", "side"), [(-1, 64), (0, 64), (95, 64), (97, 128), (10**400, 4096)])
def test_the_nearest_size_of_any_number(pixels: int, side: int) -> None:
    assert nearest_side(pixels) == side
    with pytest.raises(InputError, match=rf"the nearest such size is {side}x576"):
        Order(options=(SubmitOptions(width=pixels),)).check()
