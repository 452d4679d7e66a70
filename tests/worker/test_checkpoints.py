"""Half-done videos on disk and in object stores: what is kept comes back bit by bit, and nothing stays behind."""

import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from svdq.pipeline.loop.sample import Resumption, Sample
from svdq.pipeline.models.svd.family import SvdParameters
from svdq.producer.storage.storage import CHECKPOINTS, MARKER, Storage
from svdq.worker.checkpoint import checkpoints as checkpoints_module
from svdq.worker.checkpoint.checkpoints import Checkpoints, resumed
from svdq.worker.checkpoint.store import CheckpointStore, Codec, open_checkpoint_store

CODEC = Codec(model="tiny", device=torch.device("cpu"))
PARAMETERS = SvdParameters(seed=3, steps=9, frames=2, width=64, height=64)


def sample_at(step: int, job_id: str = "job") -> Sample:
    generator = torch.Generator().manual_seed(step)
    payload = torch.randn(2 * 4 * 64, generator=generator)
    return Sample(
        job_id=job_id,
        parameters=PARAMETERS,
        boundaries=(0, 5, 11),
        step=step,
        # As they are received: views into one payload, of several types, one of them not contiguous.
        tensors={
            "latents": payload[:512].view(1, 2, 4, 8, 8),
            "image_latents": payload[256:].view(1, 4, 8, 8).transpose(2, 3),
            "image_embedding": payload[:5].view(1, 1, 5).to(torch.float16),
        },
        job={"name": "größe"},
        stages=((0, step, 0.25),),
        seconds={"encode": 0.5},
        resumed=(Resumption(from_step=1, steps_done_again=0),),
    )


def with_header(data: bytes, header: object) -> bytes:
    """Give a checkpoint another header."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + int.from_bytes(data[:8], "little") :]


def store_at(folder: Path) -> CheckpointStore:
    return CheckpointStore(Storage(str(folder)))


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(Storage(str(tmp_path) if request.param == "folder" else f"memory://{tmp_path.name}"))


@pytest.fixture
def reader(store: CheckpointStore) -> Checkpoints:
    return Checkpoints(store, CODEC)


def assert_same(found: Sample | None, expected: Sample) -> None:
    assert found is not None
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)
    assert {**vars(found), "tensors": {}} == {**vars(expected), "tensors": {}}


def test_the_furthest_checkpoint_has_the_same_bits_and_is_the_only_one(
    store: CheckpointStore, reader: Checkpoints
) -> None:
    reader.open("job")
    writer = Checkpoints(store, CODEC)
    for step in (2, 9, 4):
        writer.save(sample_at(step))
        assert writer.flush(60)
    assert store.steps("job") == [9]
    assert_same(reader.furthest("job", PARAMETERS), sample_at(9))
    assert reader.furthest("another", PARAMETERS) is None

    writer.forget("job")
    assert writer.flush(60)
    assert reader.furthest("job", PARAMETERS) is None
    assert store.ages_s() == {}


def test_no_checkpoint_is_left_of_an_ended_job_however_late_a_rank_is(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    late, rank0 = Checkpoints(store, CODEC), Checkpoints(store, CODEC)
    store.open("job")
    late.save(sample_at(3))
    assert late.flush(60)
    rank0.forget("job")
    assert rank0.flush(60)
    late.save(sample_at(5))
    assert late.flush(60)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_job_that_ends_during_a_write_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job_id = "0123456789abcdef0123"

    class Ending(Storage):
        """Rank 0 removes the folder of a job when another rank is about to write into it."""

        def write_bytes(self, key: str, data: bytes) -> None:
            if key.endswith(".safetensors"):
                self.remove(f"checkpoints/{job_id}")
            super().write_bytes(key, data)

    store = CheckpointStore(Ending(str(tmp_path)))
    late = Checkpoints(store, CODEC)
    store.open(job_id)
    late.save(replace(sample_at(5), job_id=job_id))
    assert late.flush(60)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert late.condition is None
    assert not caplog.records


def test_jobs_that_end_while_other_ranks_write_leave_nothing(tmp_path: Path) -> None:
    """A folder is removed whole, though files appear and disappear in it meanwhile."""
    first, last = store_at(tmp_path), store_at(tmp_path)
    data = CODEC.encode(sample_at(1))
    for number in range(50):
        job_id = f"{number:020x}"
        first.open(job_id)
        writer = threading.Thread(target=lambda job_id=job_id: [last.write(job_id, step, data) for step in range(4)])
        writer.start()
        while not first.steps(job_id) and writer.is_alive():
            pass
        first.clear(job_id)
        writer.join()
        assert not (tmp_path / CHECKPOINTS / job_id).exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: data.replace(b'"latents"', b'"patents"', 1),
        lambda data: data.replace(b'\\"step\\"', b'\\"stop\\"', 1),
        lambda data: data.replace(b'\\"made_with\\"', b'\\"made_when\\"', 1),
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: with_header(data, []),
        lambda data: with_header(data, {"__metadata__": {"svdq": "[" * 100_000}}),
    ],
)
def test_a_damaged_checkpoint_is_ignored_and_logged(
    store: CheckpointStore, reader: Checkpoints, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    reader.open("job")
    good, bad = CODEC.encode(sample_at(2)), CODEC.encode(sample_at(5))
    assert damage(bad) != bad
    store.write("job", 5, damage(bad))
    store.write("job", 2, good)  # older ones go when a newer one is written, not the other way round
    assert_same(reader.furthest("job", PARAMETERS), sample_at(2))
    assert "The checkpoint of job job at step 5 cannot be used" in caplog.text


@pytest.mark.parametrize(
    ("codec", "job_id", "parameters", "reason"),
    [
        (Codec(model="other", device=CODEC.device), "job", PARAMETERS, "made with format 2, model tiny, device cpu, "),
        (Codec(model="tiny", device=torch.device("meta")), "job", PARAMETERS, "now it is format 2, model tiny, device"),
        (CODEC, "other", PARAMETERS, "other parameters"),
        (CODEC, "job", PARAMETERS.model_copy(update={"seed": 4}), "other parameters"),
    ],
)
def test_a_checkpoint_that_would_give_other_bits_is_refused(
    codec: Codec, job_id: str, parameters: SvdParameters, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        codec.decode(CODEC.encode(sample_at(4)), job_id, parameters)


def test_a_resumed_video_keeps_its_chunk_size() -> None:
    now = PARAMETERS.model_copy(update={"decode_chunk_size": 1})
    assert PARAMETERS.decode_chunk_size is None
    assert_same(CODEC.decode(CODEC.encode(sample_at(4)), "job", now), sample_at(4))


def test_a_resumption_counts_the_steps_done_again() -> None:
    assert resumed(sample_at(4), 6).resumed[-1] == Resumption(from_step=4, steps_done_again=2)
    assert resumed(sample_at(4), 3).resumed[-1] == Resumption(from_step=4, steps_done_again=0)
    assert len(resumed(resumed(sample_at(4), 6), 6).resumed) == 3


class SlowStore(CheckpointStore):
    """A disk that does not write until it is let."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Storage(str(folder)))
        self.may_write = threading.Event()
        self.is_writing = threading.Event()
        self.written: list[tuple[str, int]] = []

    def write(self, job_id: str, step: int, data: bytes) -> None:
        self.is_writing.set()
        assert self.may_write.wait(60)
        self.written.append((job_id, step))
        super().write(job_id, step, data)


def test_a_slow_disk_delays_no_step_and_limits_waiting_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_waiting = 3
    size = sum(tensor.nbytes for tensor in sample_at(1).tensors.values())
    monkeypatch.setattr(checkpoints_module, "MAX_WAITING_BYTES", (num_waiting + 1) * size - 1)
    store = SlowStore(tmp_path)
    writer = Checkpoints(store, CODEC)
    for number in range(20):
        store.open(f"job-{number}")
    writer.save(sample_at(1, "job-0"))
    assert store.is_writing.wait(60)
    for step in range(1, 9):
        for number in range(20):  # returns, though nothing is written
            writer.save(sample_at(step, f"job-{number}"))
    assert not writer.flush(0)
    store.may_write.set()
    assert writer.flush(60)
    newest = [(f"job-{number}", 8) for number in range(20 - num_waiting, 20)]
    assert store.written == [("job-0", 1), *newest]


def test_a_job_that_is_retried_right_after_its_end_is_kept(tmp_path: Path) -> None:
    """Its folder was removed after it was made anew, so no rank wrote checkpoints of it."""
    store = SlowStore(tmp_path)
    writer = Checkpoints(store, CODEC)
    for job_id in ("first", "second"):
        writer.open(job_id)
    writer.save(sample_at(1, "first"))
    assert store.is_writing.wait(60)
    writer.forget("second")
    writer.open("second")
    writer.save(sample_at(4, "second"))
    store.may_write.set()
    assert writer.flush(60)
    assert store.steps("second") == [4]


def test_a_state_with_nan_or_without_tensors_is_not_kept(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    writer = Checkpoints(store, CODEC)
    broken = {"latents": torch.full((1, 2, 4, 8, 8), torch.nan)}
    store.open("job")
    for tensors in (broken, {}):
        writer.save(replace(sample_at(3), tensors=tensors))
        assert writer.flush(60)
    assert store.steps("job") == []


def test_a_full_disk_is_logged_once_and_its_end_as_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class FullStore(CheckpointStore):
        is_full = True

        def write(self, job_id: str, step: int, data: bytes) -> None:
            if self.is_full:
                raise OSError(28, os.strerror(28))
            super().write(job_id, step, data)

    caplog.set_level(logging.INFO)
    store = FullStore(Storage(str(tmp_path)))
    store.open("job")
    writer = Checkpoints(store, CODEC)
    for step in (1, 2, 3):
        writer.save(sample_at(step))
        assert writer.flush(60)
    store.is_full = False
    for step in (4, 5):
        writer.save(sample_at(step))
        assert writer.flush(60)
    assert store.steps("job") == [5]
    assert caplog.text.count("No space left on device") == 1
    assert caplog.text.count("Checkpoints can be written again") == 1


def test_a_sweep_removes_ended_jobs_and_those_unknown_for_a_day(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    for job_id in ("ended", "started", "unknown", "old"):
        store.open(job_id)
    os.utime(tmp_path / CHECKPOINTS / "old" / MARKER, (0, 0))
    Checkpoints(store, CODEC).sweep(lambda job_ids: {"ended": True, "started": False})
    assert sorted(path.name for path in (tmp_path / CHECKPOINTS).iterdir()) == ["started", "unknown"]


def test_a_sweep_removes_the_empty_folder_that_a_kill_has_left(tmp_path: Path) -> None:
    ended, started = "0123456789abcdef0123", "1123456789abcdef0123"
    for job_id in (ended, started):
        (tmp_path / CHECKPOINTS / job_id).mkdir(parents=True)
    Checkpoints(store_at(tmp_path), CODEC).sweep(lambda _: {ended: True, started: False})
    assert [path.name for path in (tmp_path / CHECKPOINTS).iterdir()] == [started]


def test_the_option_chooses_the_folder_of_checkpoints(tmp_path: Path) -> None:
    home, storage = tmp_path / "home", Storage(str(tmp_path / "storage"))
    for where, folder in (("local", home), ("storage", tmp_path / "storage")):
        store = open_checkpoint_store(where, home, storage)
        assert store is not None
        store.open("job")
        assert (folder / CHECKPOINTS / "job").is_dir()
    assert open_checkpoint_store("off", home, storage) is None


@pytest.mark.parametrize("name", ["my model", "5", ".git", "a-job", "0" * 20])
def test_folders_of_others_are_left_alone_however_old(tmp_path: Path, name: str) -> None:
    """`SVDQ_STORAGE=~ --checkpoints storage` makes `~/checkpoints` the folder for checkpoints."""
    store, folder = store_at(tmp_path), tmp_path / CHECKPOINTS / name
    folder.mkdir(parents=True)
    for file in ("100.safetensors", "config.json"):
        (folder / file).write_bytes(b"mine")
        os.utime(folder / file, (0, 0))
    Checkpoints(store, CODEC).sweep(lambda job_ids: dict.fromkeys(job_ids, True))
    store.open(name)
    store.clear(name)
    assert store.steps(name) is None
    assert sorted(path.name for path in folder.iterdir()) == ["100.safetensors", "config.json"]


def test_folders_of_earlier_versions_are_removed(tmp_path: Path) -> None:
    store, job_id = store_at(tmp_path), "0123456789abcdef0123"
    (tmp_path / CHECKPOINTS / job_id).mkdir(parents=True)
    for name in ("7.safetensors", ".8-01234567"):
        (tmp_path / CHECKPOINTS / job_id / name).touch()
    assert list(store.ages_s()) == [job_id]
    store.clear(job_id)
    assert list((tmp_path / CHECKPOINTS).iterdir()) == []
