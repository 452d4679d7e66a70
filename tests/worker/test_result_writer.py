"""The last rank's writer when the storage refuses: videos wait, nothing is lost, and a stop is not held up."""

import contextlib
import hashlib
import json
import logging
import shutil
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from svdq.pipeline.errors import UnavailableError
from svdq.pipeline.loop.protocols import Report
from svdq.pipeline.loop.sample import Resumption, Sample
from svdq.pipeline.models.svd.family import FAMILY, SvdParameters
from svdq.pipeline.models.video_model import ModelInfo
from svdq.pipeline.models.wan.family import FAMILY as WAN
from svdq.pipeline.trace import Tracer
from svdq.producer.job import Job
from svdq.producer.records import SOURCE_NOTE
from svdq.producer.storage.storage import Storage
from svdq.worker import outages
from svdq.worker.active_job import SampleJob
from svdq.worker.intake.prefetcher import find_result
from svdq.worker.output.video_files import notice_for
from svdq.worker.output.writer import MAX_WAITING, ResultWriter
from tests.queued import SvdJob, WanJob

pytestmark = pytest.mark.usefixtures("short_delays")

MODEL = ModelInfo(name="fake", notice="")
IMAGE = f"inputs/{'a' * 64}.png"
FRAMES = np.zeros((2, 64, 64, 3), np.uint8)


def job_of(job: Job, source: str = "", owner: str = "", **notes: str) -> dict[str, Any]:
    notes = {SOURCE_NOTE: source, **notes}
    taken = SampleJob(job=job, notes=notes, execution=("registry", "execution"), owner=owner)
    return taken.model_dump(mode="json")


def sample_of(name: str, formats: tuple[str, ...] = ("gif", "png"), folder: str = "") -> Sample:
    shape = {"seed": 1, "steps": 4, "frames": 2, "width": 64, "height": 64, "decode_chunk_size": 2}
    return Sample(
        job_id=f"id-{name}",
        parameters=SvdParameters(**shape),
        boundaries=(0, 6),
        step=4,
        job=job_of(SvdJob(**shape, image=IMAGE, name=name, formats=formats, folder=folder)),
        stages=((0, 4, 0.5),),
        memory={"step": 9},
        resumed=(Resumption(from_step=2, steps_done_again=1),),
    )


class Reports:
    def __init__(self) -> None:
        self.all: list[Report] = []
        self._came = threading.Condition()

    def __call__(self, report: Report) -> None:
        with self._came:
            self.all.append(report)
            self._came.notify_all()

    def wait(self, number: int) -> None:
        with self._came:
            assert self._came.wait_for(lambda: len(self.all) >= number, 60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "storage"
    (folder / "inputs").mkdir(parents=True)
    return folder


def open_writer(folder: Path, **options) -> ResultWriter:
    return ResultWriter(Storage(str(folder)), MODEL, Tracer(), **options)


def wait_for_refusal(until, caplog: pytest.LogCaptureFixture) -> None:
    until(lambda: "Videos wait to be written" in caplog.text)


def test_source_and_owner_are_beside_a_boomerang_and_its_frames_in_it(folder: Path) -> None:
    writer, reports = open_writer(folder), Reports()
    sample = sample_of("one", formats=("mp4", "png"))
    made = SampleJob.model_validate(sample.job).job
    job = made.model_copy(update={"frames": 4, "interpolate": 24, "boomerang": True})
    frames = np.stack([np.full((64, 64, 3), value, np.uint8) for value in (0, 80, 160, 240)])
    parameters = sample.parameters.model_copy(update={"frames": 4})
    writer.deliver(replace(sample, job=job_of(job, "holiday/cup.jpg", "ana"), parameters=parameters), frames, reports)
    writer.deliver(sample_of("two", formats=("mp4",)), FRAMES, reports)
    reports.wait(2)
    writer.close()
    assert [report.failure for report in reports.all] == [None, None]
    document = json.loads((folder / "outputs/one-id-one.json").read_text())
    assert document["shown"] == {"frames": 21, "fps": 24}  # 0 1 2 3 2 1 at 7 frames a second
    assert (document["job"]["interpolate"], document["job"]["boomerang"], document["job"]["fps"]) == (24, True, 7)
    assert len(list((folder / "outputs/one-id-one").iterdir())) == 21
    comment = json.loads(read_provenance_text(folder / "outputs/one-id-one.mp4"))
    assert comment["shown"] == document["shown"]
    assert (document["source"], document["owner"]) == ("holiday/cup.jpg", "ana")
    assert not {"source", "owner"} & comment.keys()
    plain = json.loads((folder / "outputs/two-id-two.json").read_text())
    assert not {"shown", "source", "owner"} & plain.keys()
    assert not {"interpolate", "boomerang"} & plain["job"].keys()


@pytest.mark.parametrize(
    ("model_name", "is_wanted", "marks_files", "expected"),
    [
        ("svd", True, True, "trainedAlgorithmicMedia"),
        ("preview", True, True, "algorithmicallyEnhanced"),
        ("svd", False, True, None),
        ("svd", True, False, None),
    ],
)
def test_files_and_sidecar_say_what_made_the_video(
    folder: Path, model_name: str, is_wanted: bool, marks_files: bool, expected: str | None
) -> None:
    model = MODEL if model_name == "preview" else replace(MODEL, name="/models/of ana.toml", family=FAMILY)
    writer, reports = ResultWriter(Storage(str(folder)), model, Tracer(), marks_files=marks_files), Reports()
    sample = sample_of("one", formats=("mp4", "webp"))
    made = SampleJob.model_validate(sample.job).job.model_copy(update={"mark": is_wanted})
    writer.deliver(replace(sample, job=job_of(made)), FRAMES, reports)
    reports.wait(1)
    writer.close()
    document = json.loads((folder / "outputs/one-id-one.json").read_text())
    assert document.get("digital_source_type") == expected
    assert document["job"].get("mark", True) == is_wanted
    for kind in ("mp4", "webp"):
        data = (folder / f"outputs/one-id-one.{kind}").read_bytes()
        if expected is None:
            assert b"<x:xmpmeta" not in data
        else:
            assert f'digitalsourcetype/{expected}"'.encode() in data
            assert b"/models" not in data.partition(b"<x:xmpmeta")[2]


def test_a_video_has_the_date_of_its_photo_or_else_of_its_render(folder: Path) -> None:
    writer, reports = open_writer(folder), Reports()
    started = datetime.now(UTC).replace(microsecond=0)
    for name, notes in (("photo", {"taken": "2024-05-06T23:08:09-02:00"}), ("render", {})):
        sample = sample_of(name, formats=("mp4",))
        writer.deliver(replace(sample, job=job_of(SampleJob.model_validate(sample.job).job, **notes)), FRAMES, reports)
    reports.wait(2)
    writer.close()
    times = []
    for name in ("photo", "render"):
        path = folder / f"outputs/{name}-id-{name}.mp4"
        assert path.stat().st_mtime >= started.timestamp()
        with av.open(str(path)) as container:
            times.append(datetime.fromisoformat(container.metadata["creation_time"]))
            assert "location" not in container.metadata
    assert times[0] == datetime(2024, 5, 7, 1, 8, 9, tzinfo=UTC)
    assert started <= times[1] <= datetime.now(UTC)


def test_the_notice_of_a_preview_has_the_prompt_that_it_ignored() -> None:
    preview = ModelInfo(name="preview", notice="preview (no diffusion model)")
    tiny = ModelInfo(name="/models/tiny", notice="untrained", family=FAMILY)
    prompted = WanJob(image=IMAGE, name="photo", prompt="a cat", seed=1)
    assert notice_for(preview, prompted, ()) == "preview (no diffusion model), ignored the prompt: a cat"
    for job in (prompted.model_copy(update={"prompt": ""}), SvdJob(image=IMAGE, name="photo", seed=1)):
        assert notice_for(preview, job, (1.0, 0.0)) == preview.notice
    assert notice_for(tiny, prompted, (1.0, 5.0)) == "untrained"


def test_a_video_with_skipped_steps_says_how_many_were_computed() -> None:
    model = ModelInfo(name="/models/wan", notice="", family=WAN, facts=WAN.published)
    job = WanJob(image=IMAGE, name="photo", seed=1, step_cache=0.06)
    costs = WAN.unit_costs(WAN.complete(job.parameters, WAN.published), WAN.published).steps
    assert notice_for(model, job, costs) == "approximate (23 of 40 steps computed)"


def read_provenance_text(path: Path) -> str:
    with av.open(str(path)) as container:
        return container.metadata["comment"]


def test_an_idle_writer_holds_no_frames(folder: Path, until) -> None:
    """Those of a large video are 44 MB and more, and several threads write."""
    writer, reports = open_writer(folder), Reports()
    frames = FRAMES.copy()
    is_held = weakref.ref(frames)
    writer.deliver(sample_of("one"), frames, reports)
    del frames
    reports.wait(1)
    until(lambda: is_held() is None)
    writer.close()


def test_videos_wait_for_a_storage_that_refuses(folder: Path, until, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (folder / "outputs").write_text("a file is in the way")
    writer, reports = open_writer(folder), Reports()
    writer.deliver(sample_of("one"), FRAMES, reports)
    writer.deliver(sample_of("two"), FRAMES, reports)
    wait_for_refusal(until, caplog)
    assert reports.all == []
    (folder / "outputs").unlink()
    reports.wait(2)
    writer.close()
    assert [(report.job_id, report.failure) for report in reports.all] == [("id-one", None), ("id-two", None)]
    assert sorted(path.name for path in (folder / "outputs").iterdir()) == sorted(
        f"{name}-id-{name}{suffix}" for name in ("one", "two") for suffix in (".gif", "", ".json")
    )
    assert list((folder / "tmp").iterdir()) == []
    assert caplog.text.count("Videos wait to be written") == 1
    assert caplog.text.count("The storage can be used again") == 1


def test_delivering_waits_while_many_videos_wait_until_a_stop(folder: Path, until) -> None:
    (folder / "outputs").write_text("a file is in the way")
    writer, reports = open_writer(folder), Reports()
    delivered = threading.Semaphore(0)

    def deliver() -> None:
        for number in range(MAX_WAITING + 2):  # one more than are being written and wait
            writer.deliver(sample_of(str(number)), FRAMES, reports)
            delivered.release()

    loop = threading.Thread(target=deliver)
    loop.start()
    condition = until(lambda: writer.condition)
    assert condition.job_ids[0] == "id-0"
    for _ in range(MAX_WAITING + 1):
        assert delivered.acquire(timeout=60)
    assert loop.is_alive()
    writer.release()
    loop.join(60)
    writer.wait(60)
    assert not loop.is_alive()
    assert writer.condition is None
    assert reports.all == [], "their jobs go back to the queue"
    assert list((folder / "tmp").iterdir()) == []


class Slow(Storage):
    """A storage that publishes when it is told to."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.may_go_on = threading.Event()

    def publish(self, local_path: Path, key: str) -> None:
        self.may_go_on.wait(60)
        super().publish(local_path, key)


def test_writers_that_fall_behind_are_told_once(folder: Path, until, caplog: pytest.LogCaptureFixture) -> None:
    storage, reports = Slow(str(folder)), Reports()
    writer = ResultWriter(storage, MODEL, Tracer(), behind_s=0.01)
    last = threading.Thread(target=lambda: [writer.deliver(sample_of(str(each)), FRAMES, reports) for each in range(6)])
    last.start()
    until(lambda: "the last rank waits" in caplog.text)
    storage.may_go_on.set()
    last.join(60)
    reports.wait(6)
    writer.close()
    assert [report.failure for report in reports.all] == [None] * 6
    assert caplog.text.count("Videos are made faster than they are written, 1 at a time") == 1


@pytest.mark.parametrize(
    ("taken", "reason"),
    [
        ("p4-1.mp4", "File exists"),
        ("p4-1.mp4/x", "Not a directory"),
        ("one-id-one.gif/", "Is a directory"),
        ("one-id-one", "Not a directory"),
        ("one-id-one.json/", "Is a directory"),
    ],
)
def test_a_taken_name_fails_that_job_alone(folder: Path, taken: str, reason: str) -> None:
    """As `--output p4-1.mp4` where a video of that name is."""
    output = "" if taken.startswith("one-") else taken.rstrip("/")
    path = folder / "outputs" / taken.partition("/")[0]
    path.parent.mkdir()
    if taken.endswith("/"):
        (path / "mine").mkdir(parents=True)
    else:
        path.write_text("mine")
    writer, reports = open_writer(folder), Reports()
    writer.deliver(sample_of("one", folder=output), FRAMES, reports)
    for name in ("two", "three"):
        writer.deliver(sample_of(name), FRAMES, reports)
    writer.close()
    assert [report.job_id for report in reports.all] == ["id-one", "id-two", "id-three"]
    assert reason in str(reports.all[0].failure)
    assert [report.failure for report in reports.all[1:]] == [None, None]
    if path.is_file():
        assert path.read_text() == "mine"
    assert list((folder / "tmp").iterdir()) == []
    assert not (folder / "outputs/.svdq-probe").exists()


class Denied(Storage):
    """A storage that can be used, but for one folder."""

    def publish(self, local_path: Path, key: str) -> None:
        if key.startswith("outputs/denied/"):
            raise UnavailableError("The storage cannot be used.") from PermissionError(13, "Permission denied", key)
        super().publish(local_path, key)


def test_a_refused_folder_fails_its_job_after_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "FILE_TIMEOUT_S", 0.2)
    writer = ResultWriter(Denied(str(folder)), MODEL, Tracer())
    reports = Reports()
    writer.deliver(sample_of("one", folder="denied"), FRAMES, reports)
    writer.deliver(sample_of("two"), FRAMES, reports)
    writer.close()
    failure, other = [report.failure for report in reports.all]
    assert other is None
    assert "though the storage can be used otherwise: Permission denied at 'outputs/denied/one-id-one" in str(failure)


def test_a_job_that_was_taken_over_is_not_published(folder: Path) -> None:
    writer, reports = open_writer(folder, is_held=lambda sample: False), Reports()
    writer.deliver(sample_of("one"), FRAMES, reports)
    writer.close()
    assert not (folder / "outputs").exists()
    assert (reports.all[0].result, reports.all[0].failure) == ({}, None)


def test_a_finished_video_is_recognised_by_its_sidecar_and_all_its_files(folder: Path) -> None:
    storage, sample, reports = Storage(str(folder)), sample_of("one"), Reports()
    writer = open_writer(folder)
    writer.deliver(sample, FRAMES, reports)
    writer.close()
    job = SampleJob.model_validate(sample.job).job
    assert find_result(storage, MODEL, job, "id-one").model_dump(mode="json") == reports.all[0].result
    sidecar = folder / "outputs/one-id-one.json"
    assert json.loads(sidecar.read_text())["resumed"] == [{"from_step": 2, "steps_done_again": 1}]
    assert json.loads(sidecar.read_text())["memory_bytes"] == {"step": 9}

    # A decode that ran out of memory has used another chunk size than the job asked for, and earlier versions drew
    # another seed if Redis had forgotten the job.
    for change in ({"decode_chunk_size": 1}, {"seed": 2}):
        found = find_result(storage, MODEL, job.model_copy(update=change), "id-one")
        assert found is not None
        assert found.used["seed"] == job.seed
    other = ModelInfo(name="other", notice="")
    assert find_result(storage, other, job, "id-one").model == MODEL.name  # a finished video is not overwritten
    assert find_result(storage, MODEL, job, "id-two") is None
    for data, is_found in ((sidecar.read_bytes(), False), (b"of another video", True)):
        replaced = hashlib.sha256(data).hexdigest()
        assert (find_result(storage, MODEL, job, "id-one", replaced) is not None) == is_found
    document = json.loads(sidecar.read_text())
    for notice, is_found in (("preview (no diffusion model)", False), ("approximate (int8)", True)):
        sidecar.write_text(json.dumps(document | {"model": {"name": "before", "notice": notice}}))
        assert (find_result(storage, other, job, "id-one") is not None) == is_found
    for outputs in (None, "x", [7]):
        sidecar.write_text(json.dumps(document | {"outputs": outputs}))
        assert find_result(storage, MODEL, job, "id-one") is None
    sidecar.write_text("[" * 2000 + "]" * 2000)
    assert find_result(storage, MODEL, job, "id-one") is None
    sidecar.write_text(json.dumps(document))
    shutil.rmtree(folder / "outputs/one-id-one")
    assert find_result(storage, MODEL, job, "id-one") is None
    sidecar.write_text("{}")
    assert find_result(storage, MODEL, job, "id-one") is None


def test_several_videos_are_written_at_the_same_time(folder: Path) -> None:
    together = threading.Barrier(3)

    @contextlib.contextmanager
    def mark(job_id: str) -> Iterator[None]:
        together.wait(60)  # broken, and an error, unless all three are here
        yield

    writer, reports = open_writer(folder, num_writers=3, mark=mark), Reports()
    for name in ("one", "two", "three"):
        writer.deliver(sample_of(name), FRAMES, reports)
    writer.close()
    assert sorted((report.job_id, report.failure) for report in reports.all) == [
        ("id-one", None),
        ("id-three", None),
        ("id-two", None),
    ]
