"""Sections that measure the parts of a model: seconds, memory, and differences of the results."""

import json
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpu_checks.check import Check, write_once
from gpu_checks.wan import LAYERS, write_model_with_lora, write_wide_wan
from svdq.pipeline.models.family import Family
from svdq.pipeline.models.model_folder import DTYPES
from svdq.pipeline.models.svd.family import FAMILY as SVD
from svdq.pipeline.models.wan.family import FAMILY as WAN

#: Required speed-up of a step by compiling, and of a whole video by all that is exact.
WANTED_SPEEDUP = 1.3
#: Smallest gain for which a candidate is worth its code.
WORTHWHILE = 1.03
#: Largest part of its estimate that a measured peak may be.
WANTED_PEAK = 1.05
#: Layers of each of Wan's experts as published.
WAN_LAYERS = WAN.published["transformer"]["num_layers"]


def model(check: Check) -> None:
    """Measure the three parts in each dtype, float16 first."""
    options = check.options
    chunks = [f"--decode-chunk-size={size}" for size in (1, 4, 8, options.frames)]
    common = ["--model", check.model, "--size", options.size, "--frames", options.frames]
    dtypes = ("fp16", "bf16") if check.on_gpu else ("fp32",)
    rows = check.measure_parts("model", *common, *(f"--dtype={name}" for name in dtypes), *chunks)
    for row in rows:
        if not row["finite"]:
            what = f"Finite results of the {row['part']} in {row['dtype']}"
            check.report.judge(what, "no", "yes with trained weights", None)
    peaks(check, SVD, rows)
    for dtype in dtypes:
        costs(check, SVD, [row for row in rows if row["dtype"] == dtype])


def decode(check: Check) -> None:
    """Compare a decode in half precision with one in float32, and chunks with all frames at once."""
    options = check.options
    sizes = [f"--decode-chunk-size={size}" for size in (4, options.frames)]
    common = ["--model", check.model, "--size", options.parity_size, "--frames", options.frames, "--part=decode"]
    dtypes = ["--dtype=fp32", *(["--dtype=fp16"] if check.on_gpu else [])]
    for row in check.measure_parts("decode", *common, *dtypes, *sizes)[1:]:
        what = f"Decode in {row['dtype']}, {row['decode_chunk_size']} frames at a time, to float32 4 at a time"
        check.report.judge(f"{what}: largest difference", shown(row), "", None)


def compiled(check: Check) -> None:
    """Measure a compiled step and one with int8 weights against a step as diffusers computes it, before and after."""
    options = check.options
    common = ["--model", check.model, "--size", options.size, "--frames", options.frames, "--part=step"]
    plain, *others = check.measure_parts("compile", *common, "--compile=off", "--compile=blocks", "--approximate=int8")
    again = check.measure_parts("again", *common)[0]
    drift = again["seconds"] / plain["seconds"]
    check.report.judge("Seconds of a step as diffusers does it, at the end over the start", f"{drift:.3f}", "", None)
    plain_s = (plain["seconds"] + again["seconds"]) / 2
    for row in others:
        name = "compiled blocks" if row["compiled"] == "blocks" else "int8"
        speedup, wanted = plain_s / row["seconds"], WANTED_SPEEDUP if name != "int8" else None
        check.report.judge(
            f"Speed of a step with {name} over diffusers' own (largest difference {shown(row)})",
            f"{speedup:.2f}",
            f"at least {wanted}" if wanted else "",
            speedup >= wanted if wanted and check.on_gpu else None,
        )


def speedups(check: Check) -> None:
    """Measure each candidate for an exact speed-up against diffusers' own way, and a whole video with the best."""
    options = check.options
    path = check.folder / "speedups.json"
    path.unlink(missing_ok=True)
    shape = ["--size", options.size, "--frames", options.frames, "--repeats", options.repeats]
    script = Path(__file__).with_name("speedups.py")
    try:
        check.report.run(script, "--model", check.model, *check.device, *shape, "--json", path)
    except RuntimeError as error:
        if not path.exists():
            raise
        check.report.fail(str(error))
    rows = [row for row in json.loads(path.read_text(encoding="utf-8")) if not row["failure"]]
    for row in rows:
        what = f"Speed of the {row['part']} with {row['candidate']} (largest difference {shown(row)})"
        check.report.judge(what, f"{row['speedup']:.3f}", f"at least {WORTHWHILE} to be kept", None)
    plain_s, best_s = {}, {}
    for part in ("encode", "step", "decode"):
        measured = [row for row in rows if row["part"] == part]
        if not measured:
            return
        plain_s[part] = statistics.median(row["plain_s"] for row in measured)
        best_s[part] = min(plain_s[part], *(row["seconds"] for row in measured))
    speedup = video_seconds(plain_s, options.steps) / video_seconds(best_s, options.steps)
    what = f"Speed of a video of {options.steps} steps over diffusers' own, with the best of each part"
    good = speedup >= WANTED_SPEEDUP if check.on_gpu else None
    check.report.judge(what, f"{speedup:.2f}", f"1.6, at least {WANTED_SPEEDUP}", good)


def video_seconds(seconds: Mapping[str, float], steps: int) -> float:
    """Return the seconds of a whole video from those of its parts."""
    return seconds["encode"] + steps * seconds["step"] + seconds["decode"]


def shown(row: Mapping[str, Any]) -> str:
    """Format the largest difference of a row; there is none where results are not finite."""
    difference = row.get("difference")
    return "unknown" if difference is None else f"{difference:.2g}"


def wan(check: Check) -> None:
    """Measure Wan 2.2 I2V-A14B at its full width and with a few of its layers, and scale its step up to all of them."""
    # On a GPU, videos of the model's own size.
    shape = [] if check.on_gpu else ["--size", check.options.parity_size, "--frames", 5]
    step_s = {}
    for layers in LAYERS:
        folder = check.folder / f"wan-{layers}"
        write_once(folder, partial(write_wide_wan, layers=layers, narrow=not check.on_gpu))
        parts = ["--part=step"] if layers != LAYERS[-1] else []
        rows = check.measure_parts(f"wan-{layers}", "--model", folder, *shape, *parts)
        step_s[layers] = next(row["seconds"] for row in rows if row["part"] == "step")
    few, many = LAYERS
    layer_s = (step_s[many] - step_s[few]) / (many - few)
    whole_s = step_s[many] + (WAN_LAYERS - many) * layer_s
    size = "{width}x{height}x{frames}".format_map(rows[0])
    what = f"Seconds of a step of Wan 2.2 I2V-A14B at {size}, from {few} and {many} of {WAN_LAYERS} layers"
    check.report.judge(what, f"{whole_s:.3f}", "", None)
    lora = write_model_with_lora(check.folder / f"wan-{few}")
    (row, *_) = check.measure_parts("wan-lora", "--model", lora, *shape, "--part=step")
    what = "Seconds of a step with a LoRA, which is fused, over one without"
    check.report.judge(what, f"{row['seconds'] / step_s[few]:.3f}", "1", None)
    options = ["--part=step", "--compile=off", "--offload=blocks"]
    plain, streamed = check.measure_parts("wan-streamed", "--model", folder, *shape, *options)[:2]
    what = f"Seconds of a step with streamed blocks over one without (largest difference {shown(streamed)})"
    ratio = streamed["seconds"] / plain["seconds"]
    check.report.judge(what, f"{ratio:.3f}", "at most 1.05", ratio <= 1.05 if check.on_gpu else None)
    peaks(check, WAN, rows)
    costs(check, WAN, [*(row for row in rows if row["part"] != "step"), {"part": "step", "seconds": whole_s}])


def costs(check: Check, family: Family, rows: Sequence[Mapping[str, Any]]) -> None:
    """Report what an encode and a decode cost in steps, which a worker assumes until it has measured."""
    seconds = {row["part"]: row["seconds"] for row in rows}
    prior = family.prior(family.published)
    if len(seconds) == 3:
        encode, decode = (seconds[part] / seconds["step"] for part in ("encode", "decode"))
        wanted = f"the prior, {prior.encode_steps} and {prior.decode_steps}"
        check.report.judge("Cost of an encode and a decode in steps", f"{encode:.2f} and {decode:.2f}", wanted, None)


def peaks(check: Check, family: Family, rows: Sequence[Mapping[str, Any]]) -> None:
    """Compare the measured peaks of memory with the estimates of the family."""
    for row in rows:
        if row["peak_bytes"] is not None:
            measured, estimated = row["peak_bytes"] / 1e9, estimate(family, row) / 1e9
            chunk = f", {row['decode_chunk_size']} frames at a time" if row["decode_chunk_size"] else ""
            what = f"Peak of a {row['part']} in {row['dtype']}{chunk}, GB"
            wanted = f"the estimate, {estimated:.2f}, and at most 5% more"
            check.report.judge(what, f"{measured:.2f}", wanted, measured <= WANTED_PEAK * estimated)


def estimate(family: Family, row: Mapping[str, Any]) -> int:
    """Return the bytes that a family estimates for a row of the measured parts, with guidance."""
    size = (row["width"], row["height"])
    shape = {
        "encode": size,
        "step": (*size, row["frames"], 2),
        "decode": (*size, row["frames"], row["decode_chunk_size"]),
    }[row["part"]]
    # An encode is measured without the decoder.
    return family.memory(row["part"], shape, DTYPES[row["dtype"]], family.published, has_decoder=False)
