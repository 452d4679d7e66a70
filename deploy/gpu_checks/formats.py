"""Section `formats`: videos of transformers in bf16, fp8 and int8, and with int8 attention.

As a program it renders a video of one model in each way: `python -m gpu_checks.formats` in deploy. Transformers have
two blocks and random weights, narrow ones or of the published width; all else of their models is tiny.
"""

import argparse
import json
import shutil
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from gpu_checks.check import PHOTO, Check, psnr, write_once
from gpu_checks.full_size import with_random_weights
from gpu_checks.parts import peak, reset_peak
from gpu_checks.wan import write_wide_wan
from svdq.pipeline.errors import InputError
from svdq.pipeline.models.compute.options import ComputeOptions
from svdq.pipeline.models.families import family_named
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.ltx.family import PUBLISHED
from svdq.pipeline.models.ltx.layout import TRANSFORMER
from svdq.pipeline.models.ltx.tiny import write_tiny_ltx
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.models.weights.comfy_quant import DATA, SCALE
from svdq.pipeline.models.weights.kitchen import quantize
from svdq.worker.device import choose_device
from svdq.worker.roles import choose_native

LAYERS, STEPS = 2, 4


class Way(NamedTuple):
    """The format of the transformer's file, and how it is computed with."""

    format: str
    options: ComputeOptions


WAYS = {
    "bf16": Way("bf16", ComputeOptions(dtype="bf16")),
    "fp8, weights made": Way("fp8", ComputeOptions(dtype="bf16", weights="stored")),
    "fp8, native": Way("fp8", ComputeOptions(dtype="bf16", weights="native")),
    "int8, weights made": Way("int8", ComputeOptions(dtype="bf16", weights="stored")),
    "int8, native": Way("int8", ComputeOptions(dtype="bf16", weights="native")),
    "int8 attention": Way("bf16", ComputeOptions(dtype="bf16", attention="int8")),
}
#: Parameters of a video by the size of its transformer.
SHAPES = {"narrow": {"wan": "64x64x5", "ltx": "64x64x9"}, "wide": {"wan": "832x480x81", "ltx": "768x512x121"}}


def formats(check: Check) -> None:
    """Compare the ways; on a processor with narrow transformers, where int8 attention has no kernel."""
    width = "wide" if check.on_gpu else "narrow"
    for family in SHAPES[width]:
        check.task(f"Formats of {family}, {width}", partial(_compare, check, family, width))


def write_models(check: Check) -> None:
    """Write the large models of the section."""
    for family in SHAPES["wide"]:
        _model(check, family, "wide")


def _model(check: Check, family: str, width: str) -> Path:
    write = {"wan": partial(write_wide_wan, num_layers=LAYERS, tiny_vae=True), "ltx": write_wide_ltx}[family]
    return write_once(check.folder / f"{family}-{width}", partial(write, narrow=width == "narrow"))


def _compare(check: Check, family: str, width: str) -> None:
    folder = _model(check, family, width)
    path = check.folder / "formats.json"
    check.run("gpu_checks.formats", "--model", folder, *check.device, "--shape", SHAPES[width][family], "--json", path)
    rows = json.loads(path.read_text(encoding="utf-8"))
    for way, row in rows.items():
        what = f"{family}, {width}, {way}"
        if "failure" in row:
            check.figure(what, row["failure"], good=None if row["is_refused"] else False)
            continue
        times = rows["bf16"]["step_s"] / row["step_s"] if "step_s" in rows["bf16"] else 1
        measured = f"{row['step_s']:.4g} s a step, {times:.3f} times as fast as bf16, PSNR {row['psnr']:.1f} dB to it"
        check.figure(what, measured + (f", peak {row['peak']:.2f} GB" if row["peak"] else ""))


def write_wide_ltx(folder: Path, *, narrow: bool = False) -> None:
    """Write the tiny LTX-2.3 with a transformer and connectors of the published width, or narrow ones."""
    from diffusers import LTX2VideoTransformer3DModel
    from diffusers.pipelines.ltx2 import LTX2TextConnectors

    write_tiny_ltx(folder)
    heads: int = 2 if narrow else PUBLISHED["transformer"]["num_attention_heads"]
    transformer: dict[str, Any] = {"num_layers": LAYERS}
    connectors: dict[str, Any] = {}
    for prefix, modality, head_dim in (("", "video", 128), ("audio_", "audio", 64)):
        transformer |= {f"{prefix}num_attention_heads": heads, f"{prefix}attention_head_dim": head_dim}
        transformer[f"{prefix}cross_attention_dim"] = connectors[f"{modality}_hidden_dim"] = heads * head_dim
        connectors[f"{modality}_connector_num_attention_heads"] = heads
        connectors[f"{modality}_connector_attention_head_dim"] = head_dim
    kinds = ((TRANSFORMER, LTX2VideoTransformer3DModel, transformer), ("connectors", LTX2TextConnectors, connectors))
    for component, kind, changes in kinds:
        config = kind.load_config(folder / component) | changes
        made = with_random_weights(partial(kind.from_config, config), torch.bfloat16)
        shutil.rmtree(folder / component)
        made.save_pretrained(folder / component)


def write_quantized(source: Path, target: Path, kind: str) -> None:
    """Write the transformer of a folder as ComfyUI's files have it, the matrices of its blocks in fp8 or int8."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, weight in load_file(file).items():
            if "blocks." not in name or not name.endswith(".weight") or weight.ndim != 2:
                tensors[name] = weight
                continue
            note: dict[str, Any] = {"format": "float8_e4m3fn"}
            if kind == "int8":
                mark, parts = quantize(weight.float())
                note = {"format": mark.name, "convrot": bool(mark.group), "convrot_groupsize": mark.group}
                data, scale = parts[DATA], parts[SCALE]
            else:
                scale = weight.abs().max().float() / torch.finfo(torch.float8_e4m3fn).max
                data = (weight.float() / scale).to(torch.float8_e4m3fn)
            module = name.removesuffix(".weight")
            tensors |= {name: data, f"{module}.weight_scale": scale}
            tensors[f"{module}.comfy_quant"] = torch.tensor(list(json.dumps(note).encode()), dtype=torch.uint8)
    save_file(tensors, target)


def _write_model_file(base: Path, kind: str) -> Path:
    """Write a model file whose transformers are in a format, beside a folder; return it."""
    text = f'base = "{base.name}"\n'
    if kind != "bf16":
        write_quantized(base / TRANSFORMER, base.with_name(f"{kind}.safetensors"), kind)
        names = [each for each in (TRANSFORMER, f"{TRANSFORMER}_2") if (base / each).is_dir()]
        text += "[weights]\n" + "".join(f'{each} = "{kind}.safetensors"\n' for each in names)
    path = base.with_name(f"{kind}.toml")
    path.write_text(text, encoding="utf-8")
    return path


def measure(model_file: Path, way: Way, device: torch.device, shape: str) -> dict[str, Any]:
    """Render a video; return the seconds of a step, the peak of its steps in GB, and the `frames`."""
    resolved = resolve(str(model_file))
    assert resolved.family is not None
    family = family_named(resolved.family)
    usual = family.parameters.of_shape(shape).model_copy(update={"steps": STEPS, "guidance_scale": 1.0})
    video = family.complete(usual, resolved.facts)
    video = video.model_copy(update={"decode_chunk_size": video.num_frames})
    options = replace(way.options, native=choose_native(resolved, way.options, device))
    before = reset_peak(device)
    model = open_model(resolved, Role(embed=True, encode=True, decode=True), device, torch.bfloat16, options)
    with Image.open(PHOTO) as photo:
        state = dict(model.encode(photo.convert("RGB").resize((video.width, video.height)), video, None))
    denoiser, seconds = model.denoiser(state, video), []
    reset_peak(device)
    for step in range(video.steps):
        started = time.perf_counter()
        state |= denoiser.step(state, step)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    found = {"step_s": statistics.median(seconds[1:]), "peak": (peak(device) - before) / 1e9}
    return found | {"frames": torch.as_tensor(model.decode(state, video, video.num_frames)).cpu().numpy()}


def main() -> None:
    """Measure all ways, and write what was found; a way that fails has the reason."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--shape", required=True, help="WIDTHxHEIGHTxFRAMES")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    device = choose_device(options.device, 0)
    rows: dict[str, dict[str, Any]] = {}
    plain: Any = None
    for name, way in WAYS.items():
        try:
            row = measure(_write_model_file(options.model, way.format), way, device, options.shape)
        except Exception as error:  # noqa: BLE001 - torch raises many types; the next way may work
            is_refused = isinstance(error, InputError)  # as where a GPU has no kernel
            reason = f"{'refused' if is_refused else f'failed: {type(error).__name__}'}: {error}"
            rows[name] = {"failure": reason.partition("\n")[0][:200], "is_refused": is_refused}
            continue
        frames = row.pop("frames")
        plain = frames if plain is None else plain
        rows[name] = row | {"psnr": psnr(plain, frames)}
    options.json.write_text(json.dumps(rows, indent=2), encoding="utf-8")
    print(json.dumps(rows, indent=2))  # noqa: T201


if __name__ == "__main__":
    main()
