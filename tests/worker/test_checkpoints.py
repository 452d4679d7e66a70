"""Half-done videos on disk and in object stores: what is kept comes back bit by bit, and nothing stays behind."""

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.sample import Resumption, Sample
from svdq.producer.storage.storage import Storage
from svdq.worker.recovery.checkpoints import MAX_BYTES, MAX_WAITING, Archive, Codec, Spool, resumed
from svdq.worker.recovery.shelf import FOLDER, FolderShelf, Shelf, StorageShelf, open_shelf

CODEC = Codec(model="tiny", device=torch.device("cpu"))
PARAMETERS = VideoParameters(seed=3, steps=9, frames=2, width=64, height=64)


def sample_at(step: int, job_id: str = "job") -> Sample:
    generator = torch.Generator().manual_seed(step)
    payload = torch.randn(2 * 4 * 64, generator=generator)
    return Sample(
        job_id=job_id,
        parameters=PARAMETERS,
        boundaries=(0, 4, 9),
        step=step,
        # As they are received: views into one payload, of several types, one of them not contiguous.
        tensors={
            "latents": payload[:512].view(1, 2, 4, 8, 8),
            "image_latents": payload[256:].view(1, 4, 8, 8).transpose(2, 3),
            "image_embedding": payload[:5].view(1, 1, 5).to(torch.float16),
        },
        ticket={"name": "größe"},
        stages=((0, step, 0.25),),
        seconds={"encode": 0.5},
        resumed=(Resumption(from_step=1, steps_done_again=0),),
    )


@pytest.fixture(params=["folder", "memory"])
def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> Shelf:
    if request.param == "folder":
        return FolderShelf(tmp_path / "checkpoints")
    return StorageShelf(Storage(f"memory://{tmp_path.name}"))


@pytest.fixture
def archive(shelf: Shelf) -> Archive:
    return Archive(shelf=shelf, codec=CODEC)


def assert_same(found: Sample | None, expected: Sample) -> None:
    assert found is not None
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)
    assert {**vars(found), "tensors": {}} == {**vars(expected), "tensors": {}}


def test_the_furthest_checkpoint_comes_back_bit_by_bit_and_those_before_it_are_gone(
    shelf: Shelf, archive: Archive
) -> None:
    archive.open("job")
    spool = Spool(shelf, CODEC)
    for step in (2, 9, 4):
        spool.keep(sample_at(step))
        assert spool.flush(60)
    assert shelf.steps("job") == [9]
    assert_same(archive.furthest("job", PARAMETERS), sample_at(9))
    assert archive.furthest("another", PARAMETERS) is None

    spool.forget("job")
    assert spool.flush(60)
    assert archive.furthest("job", PARAMETERS) is None
    assert shelf.ages_s() == {}


def test_nothing_is_left_on_disk_when_a_job_has_ended_however_late_a_rank_is(tmp_path: Path) -> None:
    shelf = FolderShelf(tmp_path / "checkpoints")
    late, rank0 = Spool(shelf, CODEC), Spool(shelf, CODEC)
    shelf.open("job")
    late.keep(sample_at(3))
    assert late.flush(60)
    rank0.forget("job")
    assert rank0.flush(60)
    late.keep(sample_at(5))
    shelf.write("job", 6, b"between the look and the write")
    assert late.flush(60)
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: b"\xff" * 100,
        lambda data: data.replace(b'"latents"', b'"patents"', 1),
        lambda data: data.replace(b'\\"step\\"', b'\\"stop\\"', 1),
    ],
)
def test_what_cannot_be_read_is_passed_over_with_a_line_in_the_log(
    shelf: Shelf, archive: Archive, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    archive.open("job")
    good, bad = CODEC.encode(sample_at(2)), CODEC.encode(sample_at(5))
    assert damage(bad) != bad
    shelf.write("job", 5, damage(bad))
    shelf.write("job", 2, good)  # older ones go when a newer one is written, not the other way round
    assert_same(archive.furthest("job", PARAMETERS), sample_at(2))
    assert "The checkpoint of job job at step 5 is of no use" in caplog.text


@pytest.mark.parametrize(
    ("codec", "job_id", "parameters"),
    [
        (Codec(model="other", device=CODEC.device), "job", PARAMETERS),
        (Codec(model="tiny", device=torch.device("meta")), "job", PARAMETERS),
        (CODEC, "other", PARAMETERS),
        (CODEC, "job", PARAMETERS.model_copy(update={"seed": 4})),
    ],
)
def test_what_would_give_other_bits_is_refused(codec: Codec, job_id: str, parameters: VideoParameters) -> None:
    with pytest.raises(ValueError, match="another model, with other parameters or on another kind of device"):
        codec.decode(CODEC.encode(sample_at(4)), job_id, parameters)


def test_what_memory_decided_at_the_beginning_stays() -> None:
    now = PARAMETERS.model_copy(update={"decode_chunk_size": 1, "frames": 1})
    assert (PARAMETERS.decode_chunk_size, PARAMETERS.frames) == (None, 2)
    assert_same(CODEC.decode(CODEC.encode(sample_at(4)), "job", now), sample_at(4))


@pytest.mark.parametrize("step", [-1, 10])
def test_a_step_that_the_video_does_not_have_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match="nothing to go on with"):
        CODEC.decode(
            CODEC.encode(
                sample_at(step) if step > 0 else sample_at(1).__class__(**{**vars(sample_at(1)), "step": step})
            ),
            "job",
            PARAMETERS,
        )


def test_resuming_counts_what_was_done_before_and_is_done_again() -> None:
    assert resumed(sample_at(4), 6).resumed[-1] == Resumption(from_step=4, steps_done_again=2)
    assert resumed(sample_at(4), 3).resumed[-1] == Resumption(from_step=4, steps_done_again=0)
    assert len(resumed(resumed(sample_at(4), 6), 6).resumed) == 3


class SlowShelf(FolderShelf):
    """A disk that does not write until it is let."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_write = threading.Event()
        self.is_writing = threading.Event()
        self.written: list[tuple[str, int]] = []

    def write(self, job_id: str, step: int, data: bytes) -> None:
        self.is_writing.set()
        assert self.may_write.wait(60)
        self.written.append((job_id, step))
        super().write(job_id, step, data)


def test_a_slow_disk_never_stands_in_the_way_and_holds_no_more_than_a_few_samples(tmp_path: Path) -> None:
    shelf = SlowShelf(tmp_path)
    spool = Spool(shelf, CODEC)
    for number in range(20):
        shelf.open(f"job-{number}")
    spool.keep(sample_at(1, "job-0"))
    assert shelf.is_writing.wait(60)
    for step in range(1, 9):
        for number in range(20):  # returns, though nothing is written
            spool.keep(sample_at(step, f"job-{number}"))
    assert not spool.flush(0)
    shelf.may_write.set()
    assert spool.flush(60)
    newest = [(f"job-{number}", 8) for number in range(20 - MAX_WAITING, 20)]
    assert shelf.written == [("job-0", 1), *newest]


def test_a_newer_sample_of_a_job_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    shelf = SlowShelf(tmp_path)
    spool = Spool(shelf, CODEC)
    for job_id in ("first", "second"):
        shelf.open(job_id)
    spool.keep(sample_at(1, "first"))
    assert shelf.is_writing.wait(60)
    for step in range(2, 9):
        spool.keep(sample_at(step, "second"))
    shelf.may_write.set()
    assert spool.flush(60)
    assert shelf.written == [("first", 1), ("second", 8)]


def test_what_is_large_broken_or_at_its_end_is_not_kept(tmp_path: Path) -> None:
    shelf = FolderShelf(tmp_path)
    spool = Spool(shelf, CODEC)
    sample = sample_at(3)
    large = {"latents": torch.zeros(MAX_BYTES // 4 + 1)}
    broken = {"latents": torch.full((1, 2, 4, 8, 8), torch.nan)}
    shelf.open("job")
    for tensors in (large, broken, {}):
        spool.keep(Sample(**{**vars(sample), "tensors": tensors}))
        assert spool.flush(60)
    assert shelf.steps("job") == []


def test_trouble_is_logged_once_and_is_over_when_it_is_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class FullShelf(FolderShelf):
        is_full = True

        def write(self, job_id: str, step: int, data: bytes) -> None:
            if self.is_full:
                raise OSError(28, os.strerror(28))
            super().write(job_id, step, data)

    caplog.set_level(logging.INFO)
    shelf = FullShelf(tmp_path)
    shelf.open("job")
    spool = Spool(shelf, CODEC)
    for step in (1, 2, 3):
        spool.keep(sample_at(step))
        assert spool.flush(60)
    shelf.is_full = False
    for step in (4, 5):
        spool.keep(sample_at(step))
        assert spool.flush(60)
    assert shelf.steps("job") == [5]
    assert caplog.text.count("No space left on device") == 1
    assert caplog.text.count("Checkpoints can be written again") == 1


def test_a_sweep_removes_what_has_ended_and_what_nobody_has_known_for_a_day(tmp_path: Path) -> None:
    shelf = FolderShelf(tmp_path)
    for job_id in ("ended", "started", "unknown", "old"):
        shelf.open(job_id)
    os.utime(tmp_path / "old", (0, 0))
    shelf.open("removed")
    (tmp_path / "removed").rename(tmp_path / ".removed-0123abcd")  # a kill in the middle of `clear`
    Archive(shelf=shelf, codec=CODEC).sweep(lambda job_ids: {"ended": True, "started": False})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["started", "unknown"]


def test_where_checkpoints_lie(tmp_path: Path) -> None:
    home, storage = tmp_path / "home", Storage(str(tmp_path / "storage"))
    for where, folder in (("local", home), ("storage", tmp_path / "storage")):
        shelf = open_shelf(where, home, storage)
        assert shelf is not None
        shelf.open("job")
        assert (folder / FOLDER / "job").is_dir()
    assert open_shelf("off", home, storage) is None
    assert isinstance(open_shelf("storage", home, Storage("memory://x")), StorageShelf)


@pytest.mark.parametrize("name", ["my model", "5", ".git", f".models-{'0' * 8}", "a-job", "0" * 20])
def test_folders_of_others_are_left_alone_however_old(tmp_path: Path, name: str) -> None:
    """`SVDQ_STORAGE=~ --checkpoints storage` makes `~/checkpoints` the folder for checkpoints."""
    shelf = FolderShelf(tmp_path)
    (tmp_path / name).mkdir()
    for file in ("100.safetensors", "config.json"):
        (tmp_path / name / file).write_bytes(b"mine")
    os.utime(tmp_path / name, (0, 0))
    Archive(shelf=shelf, codec=CODEC).sweep(lambda job_ids: dict.fromkeys(job_ids, True))
    if not name.startswith("."):
        shelf.open(name)
        shelf.clear(name)
    assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["100.safetensors", "config.json"]


def test_folders_of_earlier_versions_are_still_known(tmp_path: Path) -> None:
    shelf, job_id = FolderShelf(tmp_path), "0123456789abcdef0123"
    for name in (job_id, f".{job_id}-01234567"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "7.safetensors").touch()
        (tmp_path / name / ".8-01234567").touch()
    assert list(shelf.ages_s()) == [job_id]
    assert [path.name for path in tmp_path.iterdir()] == [job_id]
    shelf.clear(job_id)
    assert list(tmp_path.iterdir()) == []
