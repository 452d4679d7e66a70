"""Sections that measure the parts of a model: seconds, memory, and differences of the results."""

import json
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpu_checks.check import Check, write_once
from gpu_checks.wan import LAYERS, write_model_in_fp8, write_model_with_lora, write_wide_wan
from svdq.pipeline.models.family import Family
from svdq.pipeline.models.model_folder import DTYPES
from svdq.pipeline.models.svd.family import FAMILY as SVD
from svdq.pipeline.models.wan.family import FAMILY as WAN

#: Required speed-up of a step by compiling, and of a whole video by all that is exact.
WANTED_SPEEDUP = 1.3
#: Smallest gain for which a candidate is worth its code.
WORTHWHILE = 1.05
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
    """Compare a decode in half precision with one in float32, and chunks with all frames at once; then candidates."""
    options = check.options
    sizes = [f"--decode-chunk-size={size}" for size in (4, options.frames)]
    common = ["--model", check.model, "--size", options.parity_size, "--frames", options.frames, "--part=decode"]
    dtypes = ["--dtype=fp32", *(["--dtype=fp16"] if check.on_gpu else [])]
    for row in check.measure_parts("decode", *common, *dtypes, *sizes)[1:]:
        what = f"Decode in {row['dtype']}, {row['decode_chunk_size']} frames at a time, to float32 4 at a time"
        check.report.judge(f"{what}: largest difference", shown(row), "", None)
    candidates(check, "decode")
    best(check)


def attention(check: Check) -> None:
    """Measure backends of Wan's attention, each against diffusers' own way."""
    candidates(check, "attention", ["wan"])


def compiled(check: Check) -> None:
    """Measure compiled steps against diffusers' own way."""
    candidates(check, "compile")


def candidates(check: Check, section: str, families: Sequence[str] = ("svd", "wan")) -> None:
    """Measure the candidates of a section for some families; a failure of one model is a row."""
    wan_shape = [] if check.on_gpu else wan_shape_on_cpu(check)
    shapes = {"svd": ["--size", check.options.size, "--frames", check.options.frames], "wan": wan_shape}
    script = Path(__file__).with_name("speedups.py")
    for family in families:
        shape = shapes[family]
        path = check.folder / f"{section}-{family}.json"
        try:
            model = check.model if family == "svd" else wide_wan(check, LAYERS[0])
            common = ["--model", model, "--section", section, *check.device, *shape]
            check.report.run(script, *common, "--repeats", check.options.repeats, "--json", path)
        except RuntimeError as error:
            check.report.judge(f"Candidates of `{section}` for {family}", f"failed: {error}", "", False)
        for row in json.loads(path.read_text(encoding="utf-8")) if path.exists() else ():
            what = f"Speed of the {row['part']} of {family} with {row['candidate']}"
            if row["failure"]:
                check.report.judge(what, f"failed: {row['failure']}", "", None)
            else:
                what = f"{what} (largest difference {shown(row)})"
                check.report.judge(what, f"{row['speedup']:.3f}", f"at least {WORTHWHILE} to be kept", None)


def best(check: Check) -> None:
    """Report the speed of a whole video with the best of each part, of what all sections have measured."""
    options = check.options
    paths = [check.folder / f"{section}-svd.json" for section in ("compile", "decode")]
    found = [row for path in paths if path.exists() for row in json.loads(path.read_text(encoding="utf-8"))]
    plain_s, best_s = {}, {}
    for part in ("encode", "step", "decode"):
        measured = [row for row in found if row["part"] == part and not row["failure"]]
        if not measured:
            why = f"nothing: no candidate for the {part} was measured"
            check.report.judge("Speed of a whole video over eager", why, "", None)
            return
        plain_s[part] = statistics.median(row["plain_s"] for row in measured)
        best_s[part] = min(plain_s[part], *(row["seconds"] for row in measured))
    speedup = video_seconds(plain_s, options.steps) / video_seconds(best_s, options.steps)
    what = f"Speed of a video of {options.steps} steps over eager, with the best of each part"
    good = speedup >= WANTED_SPEEDUP if check.on_gpu else None
    check.report.judge(what, f"{speedup:.2f}", f"1.6, at least {WANTED_SPEEDUP}", good)


def video_seconds(seconds: Mapping[str, float], steps: int) -> float:
    """Return the seconds of a whole video from the seconds of its parts."""
    return seconds["encode"] + steps * seconds["step"] + seconds["decode"]


def shown(row: Mapping[str, Any]) -> str:
    """Format the largest difference of a row; there is none where results are not finite."""
    difference = row.get("difference")
    return "unknown" if difference is None else f"{difference:.2g}"


def wan_shape_on_cpu(check: Check) -> list[object]:
    """Return options for a small video; on a GPU, videos have the model's own size."""
    return ["--size", check.options.parity_size, "--frames", 5]


def wide_wan(check: Check, layers: int) -> Path:
    """Write Wan 2.2 I2V-A14B at its full width with a few layers, unless an earlier run has; return the folder."""
    folder = check.folder / f"wan-{layers}"
    write_once(folder, partial(write_wide_wan, layers=layers, narrow=not check.on_gpu))
    return folder


def judge_whole_steps(check: Check, step_s: Mapping[tuple[int, bool], float], size: str) -> dict[bool, float]:
    """Report and return the seconds of a step of the whole model with and without guidance, from few layers.

    `step_s` has the seconds by the number of layers and by whether guidance is on.
    """
    few, many = LAYERS
    whole_s = {}
    for guided in (True, False):
        what = f"Seconds of a step of Wan 2.2 I2V-A14B {'with' if guided else 'without'} guidance at {size}"
        what += f", from {few} and {many} of {WAN_LAYERS} layers"
        if not {(few, guided), (many, guided)} <= step_s.keys():
            check.report.judge(what, "failed: a step could not be measured", "", False)
            continue
        layer_s = (step_s[many, guided] - step_s[few, guided]) / (many - few)
        whole_s[guided] = step_s[many, guided] + (WAN_LAYERS - many) * layer_s
        check.report.judge(what, f"{whole_s[guided]:.3f}", "", None)
    return whole_s


def wan(check: Check) -> None:
    """Measure Wan 2.2 I2V-A14B at its full width and with a few of its layers, and scale its step up to all of them."""
    shape = [] if check.on_gpu else wan_shape_on_cpu(check)
    step_s: dict[tuple[int, bool], float] = {}
    for layers in LAYERS:
        folder = wide_wan(check, layers)
        parts = ["--part=step"] if layers != LAYERS[-1] else []
        rows = check.measure_parts(
            f"wan-{layers}", "--model", folder, *shape, *parts, "--guidance=on", "--guidance=off"
        )
        for row in rows:
            if row["part"] == "step":
                step_s.setdefault((layers, row["guidance"] == "on"), row["seconds"])
    few, many = LAYERS
    whole_s = judge_whole_steps(check, step_s, "{width}x{height}x{frames}".format_map(rows[0]))
    for row in rows:
        if row["load_s"]:
            part = " ".join(filter(None, (row["part"], row["component"])))
            what = f"Seconds to load {row['weight_bytes'] / 1e9:.2f} GB of weights for the {part} of {many} layers"
            check.report.judge(what, f"{row['load_s']:.2f}", "", None)
    lora = write_model_with_lora(check.folder / f"wan-{few}")
    fused, at_use = by_weights(
        check.measure_parts("wan-lora", "--model", lora, *shape, "--part=step", "--weights=stored")
    )
    if (few, True) in step_s:
        what = "Seconds of a step with a LoRA, which is fused, over one without"
        check.report.judge(what, f"{fused['seconds'] / step_s[few, True]:.3f}", "1", None)
    what = (
        "A step that adds a LoRA of rank 64 at use, like the LoRAs of jobs, over one with it fused: seconds, difference"
    )
    found = f"{at_use['seconds'] / fused['seconds']:.3f}, {at_use['difference']}"
    check.report.judge(what, found, "difference 0", at_use["difference"] == 0)
    fp8 = write_model_in_fp8(check.folder / f"wan-{few}")
    made, stored = by_weights(check.measure_parts("wan-fp8", "--model", fp8, *shape, "--part=step", "--weights=stored"))
    what = "A step with weights that stay in fp8 over one that has made them at load: seconds, weights, difference"
    found = f"{stored['seconds'] / made['seconds']:.3f}, {stored['weight_bytes'] / made['weight_bytes']:.2f}"
    is_same = stored["difference"] == 0
    check.report.judge(what, f"{found}, {stored['difference']}", "difference 0", is_same)
    peaks(check, WAN, rows)
    if True in whole_s:
        others = [row for row in rows if row["part"] != "step"]
        costs(check, WAN, [*others, {"part": "step", "seconds": whole_s[True]}])
    text_encoder = check.attempt("Text encoder of Wan", lambda: measure_text_encoder(check))
    for what, measured in (text_encoder or {}).items():
        check.report.judge(f"Text encoder of Wan: {what}", measured, "", None)


def by_weights(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the row of weights made at load, and the row of weights that stay as stored."""
    return [next(row for row in rows if row["weights"] == weights) for weights in ("made", "stored")]


def measure_text_encoder(check: Check) -> dict[str, str]:
    """Measure UMT5 XXL with random weights, in a process of its own; return figures by what they are."""
    path = check.folder / "text-encoder.json"
    check.report.run("gpu_checks.text_encoder", *check.device, "--repeats", check.options.repeats, "--json", path)
    found: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return found


def offload(check: Check) -> None:
    """Measure a step with streamed blocks and one with int8 weights against a resident one in bfloat16."""
    shape = [] if check.on_gpu else wan_shape_on_cpu(check)
    ways = ["--compile=off", "--offload=blocks", "--approximate=int8"]
    rows = check.measure_parts("offload", "--model", wide_wan(check, LAYERS[-1]), *shape, "--part=step", *ways)
    component = rows[0]["component"]
    plain = next((row for row in rows if row["offload"] == "off" and not row["approximate"]), None)
    for row in rows:
        if plain is None or row["component"] != component or row is plain:
            continue
        name, wanted = ("int8 weights", None) if row["approximate"] else ("streamed blocks", 1.05)
        ratio = row["seconds"] / plain["seconds"]
        what = f"Seconds of a step with {name} over one without (largest difference {shown(row)})"
        good = ratio <= wanted if wanted and check.on_gpu else None
        check.report.judge(what, f"{ratio:.3f}", f"at most {wanted}" if wanted else "", good)


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
