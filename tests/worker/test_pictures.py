"""Pictures of videos in flight: while somebody looks, small, one a second for a group, and never in a video's way."""

import io
import weakref
from collections.abc import Callable, Iterator

import pytest
import redis
import torch
from PIL import Image

from svdq.pipeline.loop.sample import Sample
from svdq.pipeline.models.svd.family import SvdParameters
from svdq.producer import keys
from svdq.worker.health.pictures import MAX_BYTES, Pictures, animated
from tests.waiting import wait_until

PARAMETERS = SvdParameters(seed=1, steps=8, frames=14, width=64, height=64)


def sample(job_id: str) -> Sample:
    return Sample(job_id=job_id, parameters=PARAMETERS, boundaries=(0, 10), step=0)


def noise(*shape: int) -> torch.Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def pictures(connection: redis.Redis) -> Iterator[Pictures]:
    pictures = Pictures(connection, "group")
    yield pictures
    pictures.close()


def look(connection: redis.Redis) -> None:
    connection.set(keys.LOOKING, 1, ex=60)


def steps(connection: redis.Redis) -> dict[str, int]:
    """The step of each picture by job."""
    found = [key.decode() for key in connection.scan_iter(f"{keys.PICTURE}*")]
    return {key.removeprefix(keys.PICTURE): int(connection.hget(key, "step") or -1) for key in found}


@pytest.mark.parametrize("shape", [(1, 8, 8, 3), (8, 72, 128, 3), (8, 160, 90, 3)])
def test_the_noisiest_picture_is_small_and_moves(shape: tuple[int, ...]) -> None:
    data = animated(noise(*shape), 2.0)
    assert len(data) <= MAX_BYTES
    with Image.open(io.BytesIO(data)) as image:
        assert (image.format, getattr(image, "n_frames", 1)) == ("WEBP", shape[0])


def offer(pictures: Pictures, step: int, draw: Callable[[], torch.Tensor | None]) -> "weakref.ref[Sample]":
    """Offer a picture of a sample that nothing else holds."""
    offered = sample("a")
    pictures.offer(offered, step, draw)
    return weakref.ref(offered)


def wait_until_freed(offered: "weakref.ref[Sample]") -> None:
    """Wait until the memory of a sample is free, after its picture was drawn or left out."""
    wait_until(lambda: offered() is None)


def test_pictures_are_drawn_only_while_somebody_looks(connection: redis.Redis, pictures: Pictures) -> None:
    drawn: list[int] = []

    def draw() -> torch.Tensor:
        drawn.append(1)
        return noise(3, 8, 8, 3)

    wait_until_freed(offer(pictures, 1, draw))
    assert drawn == []
    look(connection)
    pictures.offer(sample("seen"), 5, draw)
    wait_until(lambda: steps(connection) == {"seen": 5})
    assert 0 < connection.ttl(f"{keys.PICTURE}seen") <= keys.PICTURE_TTL_S


def test_a_broken_picture_stops_no_later_one(connection: redis.Redis, pictures: Pictures) -> None:
    look(connection)

    def broken() -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    wait_until_freed(offer(pictures, 1, broken))
    wait_until_freed(offer(pictures, 2, lambda: None))  # a model without pictures
    pictures.offer(sample("a"), 3, lambda: noise(3, 8, 8, 3))
    wait_until(lambda: steps(connection) == {"a": 3})


def test_the_ranks_of_a_group_take_turns(connection: redis.Redis, pictures: Pictures) -> None:
    look(connection)
    connection.set(f"{keys.PICTURE_TURN}group", 1)
    first = offer(pictures, 1, lambda: noise(3, 8, 8, 3))
    pictures.offer(sample("a"), 2, lambda: noise(3, 8, 8, 3))
    wait_until_freed(first)
    assert steps(connection) == {}
    connection.delete(f"{keys.PICTURE_TURN}group")
    wait_until(lambda: steps(connection) == {"a": 2})
