"""`svdq worker` as its users start, watch and end it: real processes, real Redis, real files; on the processor."""

import contextlib
import itertools
import json
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from svdq.pipeline.media.image import prepare_photo
from svdq.pipeline.models.svd.family import SvdParameters
from svdq.producer.pauses import pause, resume
from svdq.producer.results.finished_videos import read_provenance
from tests.faults.frames import read_frames
from tests.pipeline.rendering import diffusers_frames

SIMULATED = "simulated:step_ms=100"
#: What an exit leaves on a terminal when something is broken.
NOISE = ("Traceback", "Warning", "Error", "torch.distributed", "SIGTERM", "exitcode")
#: What is in the JSON beside a video and not in the video itself.
TIMINGS = ("finished_at", "group", "seconds", "stages", "outputs")

pytestmark = pytest.mark.slow


def check_quiet(text: str) -> None:
    """Users read sentences of ours, and nothing else."""
    others = [line for line in text.splitlines() if not line.startswith(("[rank 0] ", "Starting "))]
    assert not [line for line in others if "] Loaded " not in line], text
    assert not [word for word in NOISE if word in text], text


# What comes out.


def test_a_group_renders_what_is_submitted_while_it_runs(site) -> None:
    group = site.start(2)
    requests = {
        "plain": ["--frames", 5, "--steps", 9, "--size", "128x64"],
        # Few steps, and not a multiple of the ranks.
        "short": ["--frames", 2, "--steps", 3, "--size", "64x64", "--format", "gif", "--format", "mp4"],
        "all": [
            *("--frames", 4, "--steps", 14, "--size", "64x128", "--fps", 12, "--seed", 77, "--motion-bucket-id", 200),
            *("--format", "mp4", "--format", "gif", "--format", "webp", "--format", "png", "--fit", "pad"),
        ],
        "one": ["--frames", 1, "--steps", 1, "--size", "64x64", "--format", "png"],
    }
    answers: dict[str, subprocess.CompletedProcess[str]] = {}

    def submit(name: str, flags: list[object]) -> None:
        path = site.folder / f"{name}.jpg"
        Image.effect_noise((90, 70), 60).convert("RGB").save(path)
        answers[name] = site.run("svdq", "submit", path, *flags, "--wait", "--json")

    clients = [threading.Thread(target=submit, args=item) for item in requests.items()]
    for client in clients:
        client.start()
    for client in clients:
        client.join()

    for name, flags in requests.items():
        answer = answers[name]
        assert answer.returncode == 0, answer
        assert all(": crop removes" in line for line in answer.stderr.splitlines()), answer
        submitted = json.loads(answer.stdout)
        assert {*submitted} >= {"id", "image", "seed", "status"}
        assert (submitted["status"], submitted["error"]) == ("finished", None)

        shown = site.run("svdq", "status", submitted["id"], "--json")
        status = json.loads(shown.stdout)
        frames, steps = int(flags[1]), int(flags[3])
        width, height = map(int, str(flags[5]).split("x"))
        expected = {"id": submitted["id"], "status": "finished", "step": steps, "steps": steps, "error": None}
        expected |= {"outputs": submitted["outputs"], "seed": submitted["seed"], "image": submitted["image"]}
        expected |= {"frames": frames, "width": width, "height": height, "decode_chunk_size": frames, "name": name}
        expected |= {"min_guidance_scale": 1.0, "max_guidance_scale": 3.0, "noise_aug_strength": 0.02}
        expected |= {"notice": "preview (no diffusion model)", "model": "preview"}
        assert submitted["notice"] == "preview (no diffusion model)"
        assert {key: status[key] for key in expected} == expected

        formats = [str(value) for flag, value in itertools.pairwise(flags) if flag == "--format"] or ["mp4"]
        outputs = [Path(output) for output in submitted["outputs"]]
        stem = f"{name}-{submitted['id']}"
        assert [path.name for path in outputs] == [stem if kind == "png" else f"{stem}.{kind}" for kind in formats]
        for path in outputs:
            assert read_frames(path).shape == (frames, height, width, 3)

        # The same account of how it was made is in every file and, with timings and owner, beside them.
        sidecar = json.loads((outputs[0].parent / f"{stem}.json").read_text())
        job = sidecar["job"]
        assert {key: job[key] for key in ("frames", "steps", "seed", "decode_chunk_size")} == {
            key: status[key] for key in ("frames", "steps", "seed", "decode_chunk_size")
        }
        assert sidecar["model"] == {"name": "preview", "notice": "preview (no diffusion model)"}
        assert {*sidecar["versions"]} == {"svdq", "torch", "diffusers", "transformers"}
        assert {*sidecar["seconds"]} == {"encode", "denoise", "decode", "write"}
        assert sum(stage["steps"] for stage in sidecar["stages"]) == steps
        assert [stage["rank"] for stage in sidecar["stages"]] == sorted({stage["rank"] for stage in sidecar["stages"]})
        assert sidecar["source"].endswith(f"/{name}.jpg")
        account = {key: value for key, value in sidecar.items() if key not in {*TIMINGS, "source", "owner"}}
        for path in outputs:
            assert read_provenance(path).as_json() == account

    # Ctrl-C with nothing in flight ends it at once.
    group.send_signal(signal.SIGINT)
    assert group.end() == 0
    check_quiet(group.text)
    assert "preview (no diffusion model)" in group.text
    assert {path.name for path in Path(site.settings.storage).iterdir()} >= {"inputs", "outputs"}


# diffusers 0.42 hands torch tensors to np.array, of which numpy 2 warns.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
def test_frames_equal_those_of_diffusers_and_burst_ends(site, tiny_model: Path) -> None:
    """Through submit, Redis, three ranks and png files, with two different jobs in flight at once."""
    settings = {
        "guided": {"frames": 4, "steps": 5, "width": 128, "height": 64, "seed": 11, "decode_chunk_size": 2},
        "unguided": {"frames": 3, "steps": 2, "width": 64, "height": 128, "seed": 12, "max_guidance_scale": 1.0},
    }
    ids = {name: site.submit(formats=("png",), **values) for name, values in settings.items()}
    group = site.start(3, "--burst", model=str(tiny_model), wait=False)
    expected = {}
    for name, values in settings.items():
        photo = prepare_photo(site.photo.read_bytes(), values["width"], values["height"])
        expected[name] = diffusers_frames(tiny_model, photo, SvdParameters.model_validate(values))

    assert group.end() == 0, group.text
    assert site.queued() == []
    for name, job_id in ids.items():
        frames = site.frames(job_id)
        assert frames.shape == expected[name].shape
        assert np.array_equal(frames, expected[name]), f"{name}: {np.abs(frames.astype(int) - expected[name]).max()}"
        assert frames.std() > 1  # pictures, not nothing
    assert "untrained" in group.text
    log, _, report = group.text.partition("2 finished, 0 failed, 0 stopped, 0 canceled")
    check_quiet(log)
    assert "Left: 0 queued" in report


# What is seen while it runs, and what harms nobody else.


def test_a_running_group_outlives_bad_jobs_and_drains_on_ctrl_c(site, until, no_processes_left) -> None:
    group = site.start(2, model=SIMULATED)
    jobs = [site.submit(steps=40) for _ in range(3)]
    in_flight = until(lambda: (found := site.states(jobs)).count("started") >= 2 and found)
    assert in_flight[:2] == ["started"] * 2  # one on every rank

    until(lambda: all(site.view(job_id).step > 0 for job_id in jobs[:2]))
    info = json.loads(site.run("svdq", "status", "--json").stdout)
    assert len(info["workers"]) == 1
    worker = info["workers"][0]
    assert (worker["state"], worker["pid"]) == ("busy", group.ranks()[0].pid)
    assert [name for name in worker["queues"] if ":" not in name] == ["svdq-high", "svdq-default", "svdq-low"]
    shown = {job["id"]: job for job in info["jobs"]}
    assert set(shown) <= set(jobs)
    assert any(job["rank"] is not None and 0 < job["step"] <= 40 for job in shown.values())

    rq_info = site.run("rq", "info", "--queue-class", "svdq.producer.queue.SvdqQueue", "--url", redis_url(site))
    assert rq_info.returncode == 0, rq_info
    assert worker["name"] in rq_info.stdout
    assert f"busy {', '.join(worker['queues'])}" in rq_info.stdout
    assert "executing" in rq_info.stdout

    # A photo that is damaged after it was submitted fails with a reason; its neighbours finish.
    other = site.folder / "other.jpg"
    Image.effect_noise((200, 100), 70).convert("RGB").save(other)
    pause(site.connection)  # the group would prefetch the photo before it is damaged
    bad = site.submit(photo=other)
    stored = Path(site.settings.storage) / site.view(bad).parameters["image"]
    stored.write_bytes(stored.read_bytes()[:300])
    resume(site.connection)
    after = site.submit()
    views = site.wait([*jobs, bad, after])
    assert [view.status for view in views] == ["finished"] * 3 + ["failed", "finished"]
    assert views[3].error is not None
    assert views[3].error.endswith("was damaged in the storage; submit it again, then `svdq retry` the job.")
    assert f"Job {bad} failed: The photo inputs/" in group.text
    assert {stage["rank"] for sidecar in site.sidecars() for stage in sidecar["stages"]} == {0, 1}
    assert not list((Path(site.settings.storage) / "outputs").glob(f"*{bad}*"))

    # Ctrl-C ends it when what is in flight is finished.
    ranks = group.ranks()
    jobs = [site.submit(steps=30) for _ in range(6)]
    until(lambda: site.states(jobs).count("started") >= 2)
    group.send_signal(signal.SIGINT)
    assert group.end() == 0
    states = site.states(jobs)
    num_finished = states.count("finished")
    assert 2 <= num_finished <= 4  # one a rank, and at most one on its way between and one that was about to start
    assert states == ["finished"] * num_finished + ["queued"] * (6 - num_finished)
    assert site.queued() == jobs[num_finished:]
    assert all(Path(site.view(job_id).outputs[0]).exists() for job_id in jobs[:num_finished])
    no_processes_left(ranks)
    assert "Taking no more jobs" in group.text
    check_quiet(group.text)


def redis_url(site) -> str:
    return f"unix://{site.connection.connection_pool.connection_kwargs['path']}"


# How it ends.


@pytest.mark.long
def test_ctrl_c_twice_gives_jobs_back(site, until, no_processes_left) -> None:
    """For a person in a hurry: it ends in the middle of videos, and nothing is lost. SIGTERM is in `test_resume`."""
    group = site.start(2, model=SIMULATED)
    family = psutil.Process(group.process.pid).children(recursive=True)
    done = site.submit()
    site.wait([done])
    jobs = [site.submit(steps=60) for _ in range(5)]
    until(lambda: site.states(jobs).count("started") >= 2)

    group.send_signal(signal.SIGINT)
    until(lambda: "Taking no more jobs" in group.text)
    group.send_signal(signal.SIGINT)
    assert group.end() == 0

    left = [job_id for job_id, state in zip(jobs, site.states(jobs), strict=True) if state != "finished"]
    assert len(left) >= 4  # it did not wait for what was in flight
    assert site.queued() == left  # at the front and in the old order
    assert site.states(left) == ["queued"] * len(left)
    assert {site.connection.hget(f"rq:job:{job_id}", "retries_left") for job_id in left} == {b"3"}
    assert site.connection.zcard("rq:wip:svdq-default") == 0
    assert site.view(done).status == "finished"
    no_processes_left(family)
    assert "went back to the queue" in group.text
    check_quiet(group.text)


@pytest.mark.long
def test_ctrl_c_three_times_and_before_it_is_up_leaves_no_processes(site, until, no_processes_left) -> None:
    group = site.start(2, model=SIMULATED, wait=False)
    family = until(lambda: len(group.ranks()) == 2 and psutil.Process(group.process.pid).children(recursive=True))
    for _ in range(3):
        group.send_signal(signal.SIGINT)
        group.process.poll()
    assert group.end() == 0
    no_processes_left(family)
    check_quiet(group.text)


def test_a_killed_launcher_leaves_no_processes(site, until, no_processes_left) -> None:
    """As when a container's memory runs out: the kernel ends torchrun, and it its ranks, which give their jobs back."""
    group = site.start(2, model=SIMULATED)
    family = psutil.Process(group.process.pid).children(recursive=True)
    jobs = [site.submit(steps=600) for _ in range(3)]
    until(lambda: site.states(jobs).count("started") >= 1)
    group.process.kill()
    group.process.wait()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []
    assert site.queued() == jobs
    no_processes_left(family)


@pytest.mark.long
def test_a_launcher_killed_while_ranks_are_started_leaves_no_processes(site, until) -> None:
    """torchrun, which starts one rank after another, forgets those it has started when SIGTERM comes in between."""
    group = site.start(4, model=SIMULATED, wait=False)
    while len(family := psutil.Process(group.process.pid).children(recursive=True)) < 3:
        time.sleep(0.001)
    family[0].suspend()
    group.process.kill()
    group.process.wait()
    with contextlib.suppress(psutil.NoSuchProcess):
        family[0].resume()
    run_dirs = str(site.settings.home / "run")
    until(lambda: not any(run_dirs in str(each.info["cmdline"]) for each in psutil.process_iter(["cmdline"])))


@pytest.mark.long
def test_a_killed_torchrun_ends_the_worker_with_the_reason(site, no_processes_left) -> None:
    group = site.start(2, model=SIMULATED)
    family = psutil.Process(group.process.pid).children(recursive=True)
    psutil.Process(group.process.pid).children()[0].kill()
    assert group.end() == 128 + signal.SIGKILL
    assert "torchrun was ended by signal 9; the next worker takes its jobs back." in group.text
    no_processes_left(family)
