"""Chains as workers render them: exact last frames, files that begin with the chain so far, failures and kills."""

import json
import subprocess
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from svdq.pipeline.loop.protocols import Report
from svdq.pipeline.loop.sample import SOUND, Sample
from svdq.pipeline.media.video import write_video
from svdq.pipeline.models.svd.family import SvdParameters
from svdq.pipeline.models.video_model import ModelInfo
from svdq.pipeline.trace import Tracer
from svdq.producer import job_control
from svdq.producer.job import last_frame_key
from svdq.producer.pauses import read_pauses
from svdq.producer.queue import fetch
from svdq.producer.results.finished_videos import read_provenance
from svdq.producer.status.selection import Selection, select
from svdq.producer.storage.storage import Storage
from svdq.worker.active_job import SampleJob
from svdq.worker.intake.prefetcher import find_result
from svdq.worker.output.writer import ResultWriter
from svdq.worker.queue.group_worker import GroupWorker
from tests.queued import SvdJob
from tests.waiting import wait_until
from tests.worker.conftest import Site
from tests.worker.jobs import pop

MODEL = ModelInfo(name="fake", notice="")
SHAPE = {"seed": 1, "steps": 4, "frames": 5, "width": 64, "height": 64, "decode_chunk_size": 2}
CHAIN = ["--family", "svd", "--frames", "5", "--steps", "4", "--size", "64x64", "--then", "", "--then", ""]


def decoded(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        found = list(container.decode(video=0))
        # The frames are evenly spaced, also where two links meet.
        assert len({after.pts - before.pts for before, after in pairwise(found)}) == 1
        return np.stack([frame.to_ndarray(format="rgb24") for frame in found])


def write(
    writer: ResultWriter,
    job_id: str,
    image: str,
    frames: np.ndarray,
    fps: int,
    interpolate: int | None = None,
    **tensors,
) -> Report:
    names = {"name": "cup", "folder": "a b's"}
    job = SvdJob(**SHAPE, **names, fps=fps, image=image, chained=True, interpolate=interpolate)
    taken = SampleJob(job=job, notes={"taken": "2024-05-06T23:08:09"}, execution=("registry", "execution")).model_dump(
        mode="json"
    )
    sample = Sample(
        job_id=job_id, parameters=SvdParameters(**SHAPE), boundaries=(0, 6), step=4, job=taken, tensors=tensors
    )
    reports: list[Report] = []
    writer.deliver(sample, frames, reports.append)
    wait_until(lambda: reports)
    return reports[0]


@pytest.mark.parametrize("fps", [7, 16, 24])
def test_the_file_of_a_link_begins_with_the_chain_up_to_it(tmp_path: Path, fps: int) -> None:
    storage = Storage(str(tmp_path / "a storage's"))
    writer = ResultWriter(storage, MODEL, Tracer())
    ids = ["1" * 20, "2" * 20, "3" * 20]
    rng = np.random.default_rng(0)
    videos = [rng.integers(0, 255, (5, 64, 64, 3), np.uint8) for _ in ids]
    images = [f"inputs/{'a' * 64}.png", *map(last_frame_key, ids)]
    outputs = [
        Path(write(writer, job_id, image, frames, fps).result["outputs"][0])
        for job_id, image, frames in zip(ids, images, videos, strict=False)
    ]

    parts = []
    for number, frames in enumerate(videos):
        write_video(frames[min(number, 1) :], tmp_path / "part.mp4", "mp4", fps, "")
        parts.append(decoded(tmp_path / "part.mp4"))
        joined = decoded(outputs[number])
        assert len(joined) == 5 + 4 * number
        assert np.array_equal(joined, np.concatenate(parts))  # nothing was encoded twice
        with Image.open(storage.folder / last_frame_key(ids[number])) as image:
            assert np.array_equal(np.asarray(image), frames[-1])  # without loss
        assert read_provenance(outputs[number]).job_id == ids[number]
    sidecars = [json.loads(path.with_suffix(".json").read_text()) for path in outputs]
    assert [sidecar.get("shown") for sidecar in sidecars] == [
        None,
        {"frames": 9, "fps": fps},
        {"frames": 13, "fps": fps},
    ]

    bits = outputs[2].read_bytes()
    write(writer, ids[2], images[2], videos[2], fps)
    assert outputs[2].read_bytes() == bits
    writer.close()
    job = SvdJob(**SHAPE, fps=fps, image=images[1], name="cup", folder="a b's", chained=True)
    assert find_result(storage, MODEL, job, ids[1]) is not None
    storage.remove(last_frame_key(ids[1]))  # its chain could not go on
    assert find_result(storage, MODEL, job, ids[1]) is None


def test_links_are_interpolated_up_to_where_they_meet_also_with_sound(tmp_path: Path) -> None:
    model = ModelInfo(name="fake", notice="", sound_rate=48000)
    writer = ResultWriter(Storage(str(tmp_path / "storage")), model, Tracer())
    sound = {SOUND: torch.full((2, 5 * 48000 // 8), 0.5)}
    levels = np.linspace(0, 240, 9).astype(np.uint8)  # a gray that grows evenly through both links
    images = [f"inputs/{'a' * 64}.png", last_frame_key("1" * 20)]
    for number, (job_id, image) in enumerate(zip(("1" * 20, "2" * 20), images, strict=True)):
        frames = np.empty((5, 64, 64, 3), np.uint8)
        frames[:] = levels[4 * number : 4 * number + 5, None, None, None]
        path = Path(write(writer, job_id, image, frames, 8, interpolate=16, **sound).result["outputs"][0])
    writer.close()
    assert np.allclose(decoded(path).mean((1, 2, 3)), np.linspace(0, 240, 17), atol=9)
    assert json.loads(path.with_suffix(".json").read_text())["shown"] == {"frames": 17, "fps": 16}
    with av.open(str(path)) as container:
        for stream in container.streams:
            assert (stream.start_time, stream.duration * stream.time_base) == (0, Fraction(17, 16))


def submit(site: Site, *options: str) -> list[str]:
    done = site.run("svdq", "submit", site.photo, *CHAIN, *options, "--json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["id"] for line in done.stdout.splitlines()]


def told(done: "subprocess.CompletedProcess[str]") -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_failed_link_ends_the_rest_and_retrying_it_goes_on(site: Site) -> None:
    ids = submit(site)
    assert "photo (link 2 of 3)  deferred until" in told(site.run("svdq", "status", ids[1]))
    (stored,) = (site.settings.storage / Path("inputs")).iterdir()
    photo = stored.read_bytes()
    stored.write_bytes(b"damaged")
    group = site.start(1)
    first, second, third = site.wait(ids)
    assert (first.status, second.status, third.status) == ("failed",) * 3
    assert second.error.startswith(f"It continues the video of job {ids[0]}, which failed,")
    assert third.error.startswith(f"It continues the video of job {ids[1]}, which failed,")
    assert read_pauses(site.connection) == []

    stored.write_bytes(photo)
    assert sorted(told(site.run("svdq", "retry", ids[1])).split()) == sorted([*ids, *["queued"] * 3])
    assert [view.status for view in site.wait(ids)] == ["finished"] * 3, group.text
    assert len(decoded(Path(site.view(ids[2]).outputs[0]))) == 13
    assert "finished" in told(site.run("svdq", "list", "--name", "photo"))


def test_a_link_that_is_stopped_in_flight_ends_the_rest(site: Site, worker: GroupWorker) -> None:
    first, second, third = submit(site)
    active = pop(worker)
    assert job_control.cancel(site.connection, first) == "stopping"
    assert site.states([first, second, third]) == ["started", "canceled", "canceled"]
    assert f"Job {first}, an earlier link of its chain, was canceled;" in site.view(second).error
    worker.stop(active)
    job_control.retry(site.connection, third)
    assert site.states([first, second, third]) == ["queued", "deferred", "deferred"]

    worker.stop(pop(worker))  # as RQ's own command does
    assert site.states([first, second, third]) == ["stopped", "canceled", "canceled"]


def test_a_link_that_is_stopped_when_its_group_is_gone_ends_the_rest(site: Site, worker: GroupWorker) -> None:
    first, second, third = submit(site)
    active = pop(worker)
    worker.mark_canceled(first)  # as RQ's own command does
    worker.return_to_queue([active])
    assert pop(worker) is None
    assert site.states([first, second, third]) == ["stopped", "canceled", "canceled"]
    assert [each.id for each in select(site.connection, Selection(statuses=("stopped",)))] == [first]


def test_a_link_that_another_tool_of_rq_cancels_ends_the_rest(site: Site, worker: GroupWorker) -> None:
    first, second, third = submit(site)
    worker.maintain()
    fetch(site.connection, second).cancel()
    worker.maintain()
    assert site.states([first, second, third]) == ["queued", "canceled", "canceled"]
    assert f"Job {second}, an earlier link of its chain, was canceled;" in site.view(third).error


@pytest.mark.slow
@pytest.mark.long
def test_a_link_whose_video_before_was_deleted_names_the_command(site: Site) -> None:
    site.start(1, model="simulated:step_ms=50")
    for is_begun in (False, True):
        done = site.run("svdq", "submit", site.photo, "--steps", 40, "--frames", "2", "--then", "", "--json", "--force")
        first, second = (json.loads(line)["id"] for line in told(done).splitlines())
        wait_until(lambda first=first: site.view(first).step > 3)
        if not is_begun:
            told(site.run("svdq", "pause"))
        wait_until(lambda first=first: site.view(first).status == "finished")
        wait_until(lambda second=second, is_begun=is_begun: not is_begun or site.view(second).step > 3)
        Path(site.view(first).outputs[0]).unlink()
        told(site.run("svdq", "resume"))
        (failed,) = site.wait([second])
        reason = f"It continues the video of job {first}, whose mp4 was removed; "
        assert failed.error == f"{reason}`svdq retry --force {first}` renders both."
        told(site.run("svdq", "retry", "--force", first))
        assert [view.status for view in site.wait([first, second])] == ["finished"] * 2


@pytest.mark.slow
@pytest.mark.long
def test_after_a_kill_a_link_continues_only_from_a_checkpoint_of_its_first_frame(site: Site) -> None:
    """Once it is the same frame, once another one, as a new render of the first link with another seed leaves it."""
    site.start(1, model="simulated:step_ms=40")
    for is_another in (False, True):
        ids = submit(site, "--steps", "100", "--force")
        kept = site.settings.home / "checkpoints" / ids[1]
        wait_until(lambda kept=kept: list(kept.glob("[1-9]*.safetensors")), lambda: site.groups[-1].text)
        site.groups[-1].kill_all()
        if is_another:
            frame = Path(site.settings.storage, last_frame_key(ids[0]))
            with Image.open(frame) as image:
                Image.new("RGB", image.size, (9, 99, 199)).save(frame)
        site.start(1, model="simulated:step_ms=40")
        assert [view.status for view in site.wait(ids)] == ["finished"] * 3
        assert [len(decoded(Path(site.view(job_id).outputs[0]))) for job_id in ids] == [5, 9, 13]
        [sidecar] = site.sidecars(ids[1])
        assert bool(sidecar.get("resumed")) is not is_another


@pytest.mark.slow
@pytest.mark.long
def test_a_link_is_the_video_of_the_last_frame_of_the_one_before(site: Site) -> None:
    shape = ["--family", "svd", "--frames", "5", "--steps", "3", "--size", "64x64", "--json"]
    done = site.run("svdq", "submit", site.photo, *shape, "--then", "")
    first, second = (json.loads(line) for line in told(done).splitlines())
    site.start(1, model="preview")
    assert [view.status for view in site.wait([first["id"], second["id"]])] == ["finished"] * 2
    frames = [Path(site.settings.storage, last_frame_key(made["id"])) for made in (first, second)]

    options = ["--seed", second["seed"], "--format", "png"]
    alone = json.loads(told(site.run("svdq", "submit", frames[0], *shape, *options)))
    site.wait([alone["id"]])
    with Image.open(frames[1]) as image:
        assert np.array_equal(np.asarray(image), site.frames(alone["id"])[-1])
