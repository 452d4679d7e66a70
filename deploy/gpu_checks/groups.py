"""Sections that run groups of ranks and workers: whether they work, that no pixel depends on them, and their pace."""

import contextlib
import itertools
import json
import re
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import psutil

from gpu_checks.check import Check, frames_of, pixel_difference
from svdq.pipeline.models.svd.tiny import write_tiny_model
from svdq.pipeline.models.wan.tiny import VARIANTS, write_tiny_wan

#: Required pace relative to one rank: of ranks that share a card, and per rank of ranks with a card each.
WANTED_PACE = 0.9
#: Largest memory of a middle rank relative to its weights and the larger of a step's and a decode's tensors.
WANTED_MEMORY = 1.05
#: Share of a section's time in which several ranks compute; the rest is for their start, and for one rank before them.
COMPUTING_SHARE = 0.5
#: Photos of a burst, and how many of them are videos when a rank is killed.
PHOTOS, DONE_BEFORE_KILL = 8, 3


def runs(check: Check) -> None:
    """Render a photo with tiny models on one rank, on several that share the cards, of Wan also bound and in rounds."""
    options, ranks = check.options, check.options.ranks
    if check.attempt("`svdq doctor`", lambda: doctor(check)):
        check.report.judge("`svdq doctor`", "ok", "ok", True)
    small = ["--size", options.parity_size, "--steps", options.steps, "--frames"]
    several = {f"on {ranks} ranks": ["--ranks", ranks]}
    experts = {
        "on bound ranks": ["--ranks", ranks, "--experts", "bound"],
        # On a GPU its default video needs more, so text encoder and expert of rank 0 come and go.
        "on bound ranks in turns": ["--ranks", ranks, "--experts", "bound", "--memory-limit", "1500MB"],
        "in rounds": ["--ranks", 1, "--experts", "rounds"],
    }
    kinds = {"SVD": (write_tiny_model, options.frames, several)}
    kinds["Wan"] = (write_tiny_wan, wan_frames(options.frames), several | experts)
    for title, (write, frames, ways) in kinds.items():
        tiny = check.folder / f"tiny-{title}"
        write(tiny)

        def rendered(what: str, worker: Sequence[object], tiny: Path = tiny, frames: int = frames) -> Any:
            [made] = check.render(what, [options.photo], [*small, frames], *worker, model=str(tiny)).values()
            return made

        one = check.attempt(f"Tiny {title} on one rank", partial(rendered, f"{title}-1", ["--ranks", 1]))
        for way, worker in ways.items() if one else ():
            what = f"Largest pixel difference of the tiny {title} {way} to one rank"
            if made := check.attempt(what, partial(rendered, f"{title}-{way}".replace(" ", "-"), worker)):
                difference = pixel_difference(one, made)
                check.report.judge(what, str(difference), "0", difference == 0)
    shape = [*small, wan_frames(options.frames)]
    kill(check, "tiny", shape, "--ranks", ranks, model=str(check.folder / "tiny-Wan"))


def doctor(check: Check) -> str:
    """Run `svdq doctor` with a tiny model; raises RuntimeError if something would not work."""
    write_tiny_model(check.folder / "tiny-SVD")
    with check.home("doctor", str(check.folder / "tiny-SVD")) as environment:
        return check.report.run("svdq.cli", "doctor", environment=environment)


def wan_frames(frames: int) -> int:
    """Return the number of frames next to `frames` of which Wan can make a loop, too."""
    return max(5, frames - (frames - 1) % 4)


def parity(check: Check) -> None:
    """Compare one rank with diffusers, and several with one: all tiny models, and the model that was given."""
    options = check.options
    models: dict[str, tuple[str, int]] = {}
    for kind in ("svd", *VARIANTS):
        folder = check.folder / f"tiny-{kind}"
        write_tiny_model(folder) if kind == "svd" else write_tiny_wan(folder, kind)  # type: ignore[arg-type]
        models[f"tiny {kind}"] = (str(folder), options.frames if kind == "svd" else wan_frames(options.frames))
    if options.model:
        models["model"] = (options.model, options.frames)
    for title, (model, frames) in models.items():
        common = ["--model", model, *check.device, "--image", options.photo, "--size", options.parity_size]
        for count, against in ((1, "diffusers"), (options.ranks, "one rank")):
            more = ["--ranks", count, "--frames", frames, *(["--alone"] if against == "one rank" else [])]
            more += ["--loop", "true"] if "flf2v" in title else []  # it makes videos between two photos
            difference = partial(difference_of, check, *common, *more, "--steps", 8)
            what = f"Largest pixel difference of the {title} on {count} rank{'s' * (count > 1)} to {against}, of 255"
            if (found := check.attempt(what, difference)) is not None:
                # Half precision on a GPU may differ from diffusers; the number of ranks must not change a pixel.
                good = found == "0" if against == "one rank" or not check.on_gpu else None
                check.report.judge(what, found, "0", good)


def difference_of(check: Check, *arguments: object) -> str:
    """Return the largest pixel difference that `gpu_checks.compare` finds."""
    said = check.report.run("gpu_checks.compare", *arguments, "--tolerance", 255)
    return str(re.findall(r"largest pixel difference over .*: (\d+)$", said, re.MULTILINE)[-1])


def rounds(check: Check) -> None:
    """Compare a rank that holds one expert at a time with one that holds both, also in int8."""
    tiny = check.folder / "tiny-wan"
    write_tiny_wan(tiny)
    common = ["--model", tiny, *check.device, "--image", check.options.photo, "--ranks", 1, "--videos", 6, "--alone"]
    for name, more in {"": [], " in int8": ["--int8"]}.items():
        what = f"Largest pixel difference of a tiny Wan{name} in rounds to one whose experts stay"
        difference = partial(difference_of, check, *common, "--steps", 4, "--frames", 5, "--rounds", *more)
        if (found := check.attempt(what, difference)) is not None:
            check.report.judge(what, found, "0", found == "0")


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
    # Two ranks have no room on a card of 24 GB.
    ranks = 1 if check.num_gpus == 1 else 2
    kill(check, "compiled", video(check), "--ranks", ranks, "--compile", "blocks", model=check.model)


def kill(check: Check, name: str, shape: Sequence[object], *worker: object, model: str) -> None:
    """Render photos with a kill -9 of a rank, and again in reverse order without; compare the videos."""
    photos = photos_of(check)
    killed: list[int] = []
    first = check.render(
        f"{name}-killed", photos, shape, *worker, model=model, beside=lambda done: killed.extend(kill_rank(done))
    )
    check.report.judge(f"Ranks killed with kill -9 ({name})", str(len(killed)), "1", len(killed) == 1)
    what = f"Videos of {PHOTOS} photos, each once ({name})"
    check.report.judge(what, str(len(first)), str(PHOTOS), len(first) == PHOTOS)
    second = check.render(f"{name}-reversed", photos[::-1], shape, *worker, model=model)
    difference = max(pixel_difference(first[photo.stem], second[photo.stem]) for photo in photos)
    what = f"Largest pixel difference of videos with a kill -9 to those in reverse order without ({name})"
    check.report.judge(what, str(difference), "0", difference == 0)
    differ = not np.array_equal(*(frames_of(first[photo.stem]) for photo in photos[:2]))
    check.report.judge(f"Two photos make two videos ({name})", "yes" if differ else "no", "yes", differ)


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
        why = "nothing: the section `model` has not measured all parts on a GPU here"
        check.report.judge("Frames decoded at a time with a limit of memory", why, "", None)
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
