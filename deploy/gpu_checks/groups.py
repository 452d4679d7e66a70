"""Sections that run groups of ranks and workers: whether they work, that no pixel depends on them, and their pace."""

import contextlib
import itertools
import json
import re
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import psutil

from gpu_checks.check import Check, frames_of, pixel_difference
from svdq.pipeline.models.tiny import write_tiny_model, write_tiny_wan

#: Required pace relative to one rank: of ranks that share a card, and per rank of ranks with a card each.
WANTED_PACE = 0.9
#: Largest memory of a middle rank relative to its weights and the larger of a step's and a decode's tensors.
WANTED_MEMORY = 1.05
#: Share of a section's time in which several ranks compute; the rest is for their start, and for one rank before them.
COMPUTING_SHARE = 0.5
#: Photos of a burst, and how many of them are videos when a rank is killed.
PHOTOS, DONE_BEFORE_KILL = 8, 3


def runs(check: Check) -> None:
    """Render a photo with the tiny model on one rank, and on several that share the cards."""
    tiny = check.folder / "tiny"
    write_tiny_model(tiny)
    with check.home("doctor", str(tiny)) as environment:
        check.report.run("svdq.cli", "doctor", environment=environment)
    options = check.options
    small = ["--size", options.parity_size, "--frames", options.frames, "--steps", options.steps]
    ranks = options.ranks
    made = [
        check.render(f"tiny-{count}", [options.photo], small, "--ranks", count, model=str(tiny)) for count in (1, ranks)
    ]
    one, many = (videos[options.photo.stem] for videos in made)
    difference = pixel_difference(one, many)
    what = f"Largest pixel difference of the tiny model on {ranks} ranks to one rank"
    check.report.judge(what, str(difference), "0", difference == 0)


def parity(check: Check) -> None:
    """Compare one rank with diffusers, and three and all ranks with one."""
    options = check.options
    most, _ = check.ranks_that_fit()
    common = ["--model", check.model, *check.device, "--image", options.photo, "--size", options.parity_size]
    for count, against in ((1, "diffusers"), *((count, "one rank") for count in sorted({min(3, most), most}))):
        more = ["--ranks", count, *(["--alone"] if against == "one rank" else [])]
        said = check.report.run("gpu_checks.compare", *common, "--steps", 8, *more, "--tolerance", 255)
        difference = re.findall(r"largest pixel difference over .*: (\d+)$", said, re.MULTILINE)[-1]
        # Half precision on a GPU may differ from diffusers; the number of ranks must not change a pixel.
        good = difference == "0" if against == "one rank" or not check.on_gpu else None
        what = f"Largest pixel difference of {count} rank{'s' * (count > 1)} to {against}, of 255"
        check.report.judge(what, difference, "0", good)


def rounds(check: Check) -> None:
    """Compare a rank that holds one expert at a time with one that holds both, also in int8."""
    tiny = check.folder / "tiny-wan"
    write_tiny_wan(tiny)
    common = ["--model", tiny, *check.device, "--image", check.options.photo, "--ranks", 1, "--videos", 6, "--alone"]
    for name, more in {"": [], " in int8": ["--int8"]}.items():
        said = check.report.run("gpu_checks.compare", *common, "--steps", 4, "--frames", 5, "--rounds", *more)
        difference = re.findall(r"largest pixel difference over .*: (\d+)$", said, re.MULTILINE)[-1]
        what = f"Largest pixel difference of a tiny Wan{name} in rounds to one whose experts stay"
        check.report.judge(what, difference, "0", difference == "0")


def pace(check: Check) -> None:
    """Measure one rank, then several on one card or on all cards, and the memory of each."""
    options, report = check.options, check.report
    ranks, gpus = check.ranks_that_fit()
    if ranks < options.ranks:
        report.add(f"Memory suffices for {ranks} of {options.ranks} ranks, so this section runs with fewer.")
    one = bench(check, 1, options.steps, samples=5, warmup=1)
    # The pipeline has to be full, and then `svdq bench` counts the time of K videos at least twice.
    samples = 3 * ranks + 2
    steps = steps_in_time(one, ranks, gpus, samples, options.section_s)
    many = bench(check, ranks, steps, samples=samples, warmup=ranks)
    alone_s = (steps * one["step_ms"] + one["encode_ms"] + one["decode_ms"]) / 1000
    share = alone_s / many["per_sample_mean_s"]
    wanted = WANTED_PACE * (ranks if gpus >= ranks else 1)
    where = "with a card each" if gpus >= ranks else "which share a card"
    report.judge(
        f"Videos an hour of {ranks} ranks {where} over those of one",
        f"{share:.2f}",
        f"at least {wanted:.1f}",
        share >= wanted if check.on_gpu else None,
    )
    if many["gpu_mb"]:
        memory_of_ranks(check, many["gpu_mb"])


def bench(check: Check, ranks: int, steps: int, *, samples: int, warmup: int) -> dict[str, Any]:
    """Run `svdq bench` for one number of ranks; return its result."""
    path, trace, options = check.folder / "bench.json", check.folder / "trace.json", check.options
    video = ["--size", options.size, "--frames", options.frames, "--steps", steps]
    counts = ["--ranks", ranks, "--samples", samples, "--warmup-samples", warmup]
    files = ["--json", path, "--trace", trace]
    check.report.run("svdq.cli", "bench", "--model", check.model, *check.device, *video, *counts, *files)
    if ranks > 1:
        taken_ms = hand_overs_ms(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"])
        measured = f"{min(taken_ms):.1f} and {statistics.median(taken_ms):.1f}" if taken_ms else "no hand-over"
        check.report.judge("Least and median milliseconds from one rank's steps to the next rank's", measured, "", None)
    run: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["runs"][0]
    return run


def hand_overs_ms(events: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the milliseconds of hand-overs in a Chrome trace: between the steps of a video on two ranks.

    The least of them is a hand-over through the memory of the host to a rank that waits for it.
    """
    steps: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X" and event["name"].startswith("steps "):
            steps.setdefault(event["args"]["job"], []).append((event["ts"], event["ts"] + event["dur"]))
    pairs = (pair for spans in steps.values() for pair in itertools.pairwise(sorted(spans)))
    return [(start - end) / 1000 for (_, end), (start, _) in pairs]


def steps_in_time(one: Mapping[str, Any], ranks: int, gpus: int, samples: int, section_s: float) -> int:
    """Choose the number of denoising steps so that several ranks finish the videos within a section.

    Args:
        one: the result of `svdq bench` for one rank.
        ranks: K.
        gpus: number of cards that they share; 0 for a CPU.
        samples: videos.
        section_s: seconds of the section.
    """
    ends_s, step_s = (one["encode_ms"] + one["decode_ms"]) / 1000, one["step_ms"] / 1000
    video_s = COMPUTING_SHARE * section_s * max(1, min(ranks, gpus)) / samples
    return max(1, min(one["steps"], int((video_s - ends_s) / step_s)))


def memory_of_ranks(check: Check, gpu_mb: Sequence[float]) -> None:
    """Report the peak GPU memory of each rank, in MiB, and compare a middle rank with a step alone."""
    rows = "\n".join(f"| {rank} | {mib:,.0f} |" for rank, mib in enumerate(gpu_mb))
    check.report.add(f"| rank | peak GPU memory of its tensors, MiB |\n|---|---|\n{rows}")
    step = check.row("step")
    if step is None or len(gpu_mb) < 3:
        check.report.add("No middle rank, or no step measured alone: its memory is compared with nothing.")
        return
    # It warms up its decoder, too, whether it decodes a video or not.
    decodes = [row for row in check.measured("model") if row["part"] == "decode"]
    weight_bytes = step["weight_bytes"] + max((row["weight_bytes"] for row in decodes), default=0)
    alone_bytes = weight_bytes + max(row["peak_bytes"] for row in (step, *decodes))
    middle, alone = gpu_mb[len(gpu_mb) // 2], alone_bytes / 2**20
    wanted = f"its weights and the larger of a step's and a decode's tensors, {alone:,.0f}, within 5%"
    check.report.judge("Memory of a middle rank, MiB", f"{middle:,.0f}", wanted, middle <= WANTED_MEMORY * alone)


def burst(check: Check) -> None:
    """Render photos with compiled blocks and a kill -9 of a rank, and again in reverse order without."""
    photos = photos_of(check)
    ranks = ["--ranks", 2, "--compile", "blocks"]
    killed: list[int] = []
    first = check.render("killed", photos, video(check), *ranks, beside=lambda done: killed.extend(kill_rank(done)))
    check.report.judge("Ranks killed with kill -9 during the burst", str(len(killed)), "1", len(killed) == 1)
    check.report.judge(f"Videos of {PHOTOS} photos, each once", str(len(first)), str(PHOTOS), len(first) == PHOTOS)
    second = check.render("reversed", photos[::-1], video(check), *ranks)
    difference = max(pixel_difference(first[photo.stem], second[photo.stem]) for photo in photos)
    what = "Largest pixel difference of compiled videos, with a kill -9, to those in reverse order without"
    check.report.judge(what, str(difference), "0", difference == 0)
    differ = not np.array_equal(*(frames_of(first[photo.stem]) for photo in photos[:2]))
    check.report.judge("Two photos make two videos", "yes" if differ else "no", "yes", differ)


def photos_of(check: Check) -> list[Path]:
    """Write the photos of a burst: the photo, turned and mirrored."""
    photos = []
    with PIL.Image.open(check.options.photo) as photo:
        upright = photo.convert("RGB")
    for number in range(PHOTOS):
        turned = upright.rotate(90 * (number // 2), expand=True)
        if number % 2:
            turned = turned.transpose(PIL.Image.Transpose.FLIP_LEFT_RIGHT)
        photos.append(check.folder / f"photo-{number}.png")
        turned.save(photos[-1])
    return photos


def video(check: Check) -> list[object]:
    """Return the options of a worker's videos."""
    options = check.options
    return ["--size", options.size, "--frames", options.frames, "--steps", options.worker_steps]


def kill_rank(done: Path) -> list[int]:
    """Wait until some videos are written to a folder, then kill a rank of this process with kill -9; return its pid."""
    while len(list(done.glob("*.json"))) < DONE_BEFORE_KILL:
        time.sleep(0.05)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            # torchrun's arguments name the same module, and the compiler's processes have a rank's environment.
            if "svdq.worker" in process.cmdline() and "LOCAL_RANK" in process.environ():
                process.send_signal(signal.SIGKILL)
                return [process.pid]
    return []


def memory(check: Check) -> None:
    """Render a video with too little memory to decode all frames at once, which reduces the chunk size."""
    frames = check.options.frames
    parts = [check.row("step"), check.row("encode"), check.row("decode", 8), check.row("decode", frames)]
    measured = [row for row in parts if row is not None and row["peak_bytes"] is not None]
    if len(measured) < len(parts):
        check.report.add("The section `model` has not measured all parts on a GPU here: there is no limit to set.")
        return
    step, encode, some, whole = measured
    weights = step["weight_bytes"] + encode["weight_bytes"] + whole["weight_bytes"]
    least = max(step["peak_bytes"], encode["peak_bytes"], some["peak_bytes"])
    limit = weights + (least + whole["peak_bytes"]) // 2
    one = ["--ranks", 1, "--memory-limit", limit]
    [made] = check.render("limited", [check.options.photo], video(check), *one).values()
    chunk = made["job"]["decode_chunk_size"] or frames
    what = f"Frames decoded at a time with {limit / 1e9:.2f} GB"
    check.report.judge(what, str(chunk), f"fewer than {frames}", chunk < frames)
    if taken := made.get("memory_bytes"):
        most, wanted = weights + max(taken.values()), f"at most {limit / 1e9:.2f} and a tenth"
        check.report.judge(
            "Memory of its tensors with the weights, GB", f"{most / 1e9:.2f}", wanted, most <= 1.1 * limit
        )
