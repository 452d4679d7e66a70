"""Section `night`: a night in small with weights of published size, and its time and memory by `svdq plan`."""

import contextlib
import itertools
import statistics
import threading
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from gpu_checks.check import Check, write_once
from gpu_checks.runs import photos
from gpu_checks.wan import NUM_LAYERS, write_model_file, write_wide_wan
from svdq.pipeline.models.compute.memory import CONTEXT_BYTES, shape_for
from svdq.pipeline.models.names.sized_model import sized_model
from svdq.pipeline.models.needs import SizedModel
from svdq.worker.cards import Cards
from svdq.worker.fit import ways
from svdq.worker.launcher.gpus import memory_of_gpus

PROMPT = ["--prompt", "A wave breaks."]
WANTED_PACE, WANTED_PEAK = 1.1, 1.05  # largest measured figure over the planned one
NIGHT_S = 3600.0  # seconds that the worker may take


def night(check: Check) -> None:
    """Render videos of the 4-step model through a worker that is killed once; then one each in fp8 and Q4_K_M."""
    check.task("A night in small", partial(_night, check))
    for stored in ("fp8", "Q4_K_M"):
        check.task(f"Experts in {stored}", partial(_stored, check, stored))


def night_model(check: Check) -> Path:
    """Write Wan 2.2 I2V-A14B as published, of a few narrow layers on a processor; return the folder."""
    layers = NUM_LAYERS if check.on_gpu else 2
    return write_once(check.folder / "wan", partial(write_wide_wan, num_layers=layers, narrow=not check.on_gpu))


def _model_file(check: Check, stored: str) -> Path:
    small = "" if check.on_gpu else "width = 64\nheight = 48\nframes = 5\n"
    return write_model_file(night_model(check), stored, small)


def _night(check: Check) -> None:
    number, kill_after = (8, 3) if check.on_gpu else (4, 1)
    model = str(_model_file(check, "bf16"))
    known, cards = sized_model(model), Cards.here() or Cards(number=1, total_bytes=24 * 2**30)
    video = known.video()
    way = next((each for each in ways(known, video, cards, number, None) if each.fits), None)
    if way is None:
        raise RuntimeError(f"`svdq plan` finds no way to run this on {cards}")
    jobs = [[*photos(check, number), *PROMPT]]
    with peak_bytes(check) as peaks:
        made = check.render(
            "night", model, jobs, *way.command.split()[2:], num_videos=number, kill_after=kill_after, limit_s=NIGHT_S
        )
    for what in ("encode", "denoise", "decode"):
        seconds = statistics.median(sidecar["seconds"][what] for sidecar in made)
        check.figure(f"Night, seconds to {what} a video", f"{seconds:.2f}")
    # The plan counts in steps of the default video, with guidance.
    costs = known.video_costs(video)
    step_s = statistics.median(sidecar["seconds"]["denoise"] for sidecar in made) / (costs.work() * costs.step_s(1))
    planned_s = next(
        each.time_s / number
        for each in ways(known, video, cards, number, step_s)
        if each.command == way.command and each.time_s is not None
    )
    ends = [datetime.fromisoformat(sidecar["finished_at"]) for sidecar in made]
    video_s = statistics.median((end - start).total_seconds() for start, end in itertools.pairwise(ends))
    what, wanted = f"Night, seconds a video of `{way.command}`", f"as planned with its steps: {planned_s:.2f}"
    check.figure(what, f"{video_s:.2f}", wanted, good=video_s <= WANTED_PACE * planned_s if check.on_gpu else None)
    _memory(check, "bf16", known, way.need_bytes, made[-1], peaks)


def _stored(check: Check, stored: str) -> None:
    """Render a video in rounds with experts that stay as their file stores them, as on small cards."""
    path = _model_file(check, stored)
    known = sized_model(str(path))
    need = known.peak(known.video(), "rounds")
    worker = ["--ranks", 1, "--experts", "rounds", "--weights", "stored"]
    jobs = [[*photos(check, 1), *PROMPT]]
    try:
        with peak_bytes(check) as peaks:
            [made] = check.render(stored, str(path), jobs, *worker, num_videos=1)
    finally:  # the disk has no room for all
        for file in path.parent.glob(f"{stored}.[sg]*"):
            file.unlink()
    check.figure(f"{stored}, seconds to denoise a video", f"{made['seconds']['denoise']:.2f}")
    _memory(check, stored, known, need, made, peaks)


def _memory(
    check: Check, name: str, known: SizedModel, need: int, made: Mapping[str, Any], peaks: Mapping[str, int]
) -> None:
    """Compare the peaks of activities, and what the driver has seen, with the estimates."""
    video = known.video().model_copy(update={"decode_chunk_size": made["job"]["decode_chunk_size"]})
    for what, taken in made.get("memory_bytes", {}).items():
        estimated = known.family.memory(what, shape_for(what, video), known.dtype, known.facts, has_decoder=True)
        wanted, good = f"at most {estimated / 1e9:.2f} and 5%", taken <= WANTED_PEAK * estimated
        check.figure(f"{name}, peak of a {what} besides weights, GB", f"{taken / 1e9:.2f}", wanted, good=good)
    if peaks:
        wanted = f"planned, with CUDA's context: {(need + CONTEXT_BYTES) / 1e9:.2f}"
        check.figure(f"{name}, peak of a GPU with loads, GB", f"{max(peaks.values()) / 1e9:.2f}", wanted)


@contextlib.contextmanager
def peak_bytes(check: Check) -> Iterator[dict[str, int]]:
    """Ask nvidia-smi for the memory in use while a block runs; fills in the peak of each GPU over the start."""
    peaks: dict[str, int] = {}
    ended = threading.Event()

    def watch() -> None:
        before: dict[str, int] = {}
        while not ended.wait(0.5):
            for gpu, _, total, free in memory_of_gpus()[0]:
                used = (int(total) - int(free)) * 2**20
                peaks[gpu] = max(peaks.get(gpu, 0), used - before.setdefault(gpu, used))

    thread = threading.Thread(target=watch)
    if check.on_gpu:
        thread.start()
    try:
        yield peaks
    finally:
        ended.set()
        if check.on_gpu:
            thread.join()
