"""Measures candidates for exact speed-ups of a model, each against svdq's eager way on this device.

The two alternate, so that a card that grows hot slows both. A candidate that gains at least 5% and changes results only
by rounding should become part of svdq; the others should be removed. Rows are written as soon as they are measured, and
those that the file has are not measured again.
"""

import argparse
import copy
import gc
import json
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from gpu_checks.model_parts import differences, random_state
from svdq.pipeline.models.compute_options import ComputeOptions, apply
from svdq.pipeline.models.families import family_named
from svdq.pipeline.models.loader import dtype_for, open_model
from svdq.pipeline.models.model_names import resolve
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.video_parameters import VideoParameters
from svdq.worker.device import choose_device

#: Changes a copy of a UNet or VAE.
Change = Callable[[Any], None]
#: Does the part once with a module, and returns the result.
Work = Callable[[Any], Tensor]
#: Frames that are decoded at a time.
CHUNK_SIZE = 8


def channels_last(module: nn.Module) -> None:
    """Store the weights of convolutions with the channels last, which cuDNN's kernels for half precision prefer."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            layer.to(memory_format=torch.channels_last)
        elif isinstance(layer, nn.Conv3d):
            layer.to(memory_format=torch.channels_last_3d)


def compiled_blocks(unet: nn.Module) -> None:
    """Compile the blocks, as `svdq worker --compile blocks` does."""
    apply(unet, ComputeOptions(compiled="blocks"))


def compiled_decoder(vae: Any) -> None:
    """Compile the whole decoder of a VAE."""
    vae.decoder.compile(dynamic=False)


def encoder_in_float32(vae: Any) -> None:
    """Keep the encoder of the VAE in float32, so that the decoder is not converted for each encode and back."""
    vae.encoder.to(torch.float32)
    vae.quant_conv.to(torch.float32)


def attention_backend(name: str) -> Change:
    """Return what has Wan attend with one of diffusers' backends; unlike its own method, in this module alone."""

    def change(transformer: nn.Module) -> None:
        from diffusers.models.attention_dispatch import AttentionBackendName, _check_attention_backend_requirements

        backend = AttentionBackendName(name)
        _check_attention_backend_requirements(backend)
        for layer in transformer.modules():
            if hasattr(processor := getattr(layer, "processor", None), "_attention_backend"):
                processor._attention_backend = backend

    return change


_DECODES: Mapping[str, Sequence[Change]] = {"compiled decoder": [compiled_decoder]}
#: The candidates of each section, by family, part and name.
CANDIDATES: Mapping[str, Mapping[str, Mapping[str, Mapping[str, Sequence[Change]]]]] = {
    "attention": {
        "wan": {
            "step": {
                f"attention by {name}": [attention_backend(name)]
                for name in ("_native_cudnn", "_native_flash", "_flash_3", "flash")
            }
        },
    },
    "compile": {
        "svd": {
            "step": {
                "compiled blocks": [compiled_blocks],
                "channels last": [channels_last],
            },
            "encode": {"encoder in float32": [encoder_in_float32]},
        },
        "wan": {"step": {"compiled blocks": [compiled_blocks]}},
    },
    "decode": {"svd": {"decode": _DECODES}, "wan": {"decode": _DECODES}},
}


def step_work(model: Any, video: VideoParameters) -> Work:
    """Return what does a step with a UNet or transformer and returns its prediction; of SVD in the middle."""
    component, index = denoiser_of(model, video), 0 if video.family == "wan" else video.steps // 2
    state = random_state(model, video, index)

    def work(changed: Any) -> Tensor:
        predicted = []
        with_it = {"unet": lambda: changed} if component == "unet" else {"transformer_of": lambda _: changed}
        denoiser = replace(model.denoiser(state, video), **with_it)
        with changed.register_forward_hook(lambda _module, _inputs, output: predicted.append(output[0])):
            denoiser.step(state, index)
        return predicted[0]

    return work


def denoiser_of(model: Any, video: VideoParameters) -> str:
    """Return the component that does the first step."""
    return str(model.segments(video)[0].component)


def vae_work(model: Any, part: str, video: VideoParameters) -> Work:
    """Return what decodes noise or encodes a photo with a VAE."""
    photo = Image.effect_mandelbrot((video.width, video.height), (-2, -1, 1, 1), 90).convert("RGB")
    state = random_state(model, video, video.steps) if part == "decode" else {}
    chunk_size = CHUNK_SIZE if video.family == "svd" else video.num_frames  # fewer frames are tiles to Wan

    def work(vae: Any) -> Tensor:
        model.pipeline.vae = vae
        if part == "decode":
            return model.decode(state, video, chunk_size)
        return model.encode(photo, video)["image_latents"]

    return work


def measure(work: Work, plain: Any, changes: Sequence[Change], repeats: int, synchronize: Callable[[], None]) -> Any:
    """Measure a candidate and the eager way alternately; return the fields of a row."""
    changed = copy.deepcopy(plain)
    for change in changes:
        change(changed)

    def timed(module: Any) -> tuple[float, Tensor]:
        synchronize()
        started = time.perf_counter()
        result = work(module)
        synchronize()
        return time.perf_counter() - started, result

    first_s, result = timed(changed)
    _, reference = timed(plain)
    pairs = [(timed(plain)[0], timed(changed)[0]) for _ in range(repeats)]
    plain_s, all_s = zip(*pairs, strict=True)
    return {
        "seconds": statistics.median(all_s),
        "plain_s": statistics.median(plain_s),
        "all_s": all_s,
        "all_plain_s": plain_s,
        "first_s": first_s,
        "speedup": statistics.median(before / after for before, after in pairs),
        **differences((result.float().cpu(),), (reference.float().cpu(),)),
    }


def rows(
    options: argparse.Namespace, device: torch.device, done: Collection[tuple[str, str]]
) -> Iterator[dict[str, Any]]:
    """Measure the candidates of a section that are not `done`."""
    on_gpu = device.type == "cuda"
    resolved = resolve(options.model)
    assert resolved.family is not None
    family = family_named(resolved.family)
    shape = dict(zip(("width", "height"), map(int, options.size.split("x")), strict=True)) if options.size else {}
    shape |= {"frames": options.frames} if options.frames else {}
    video = family.complete(family.parameters.model_validate(shape | {"seed": 1}), resolved.facts)
    first = family.unit_costs(video, resolved.facts).segments[0].component
    for part, candidates in CANDIDATES[options.section][family.name].items():
        missing = {name: changes for name, changes in candidates.items() if (part, name) not in done}
        if not missing:
            continue
        # The first rank has both halves of the VAE.
        is_step = part == "step"
        role = Role(encode=part == "encode", components=frozenset({first} if is_step else ()), decode=part == "decode")
        model: Any = open_model(resolved, role, device, dtype_for(resolved, device), ComputeOptions())
        plain = getattr(model.pipeline, first) if is_step else model.pipeline.vae
        work = step_work(model, video) if is_step else vae_work(model, part, video)
        for candidate, changes in missing.items():
            row = {"part": part, "candidate": candidate, "failure": ""}
            try:
                synchronize = torch.cuda.synchronize if on_gpu else lambda: None
                row |= measure(work, plain, changes, options.repeats, synchronize)
            except Exception as error:  # noqa: BLE001 - torch raises many types; the next candidate may work
                row["failure"] = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            yield row
            torch.compiler.reset()
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()
        del model, plain, work


def main() -> None:
    """Measure, print and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--section", choices=list(CANDIDATES), required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--size", default="")
    parser.add_argument("--frames", type=int)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    earlier = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else []
    found = [row for row in earlier if not row["failure"]]
    print("| part | candidate | seconds | diffusers | speed | largest difference | mean |")  # noqa: T201
    print("|---|---|---|---|---|---|---|")  # noqa: T201
    done = [(row["part"], row["candidate"]) for row in found]
    for row in rows(options, choose_device(options.device, 0), done):
        found.append(row)
        options.json.write_text(json.dumps(found), encoding="utf-8")
        print(line(row), flush=True)  # noqa: T201


def line(row: Mapping[str, Any]) -> str:
    """Return a row of the table."""
    start = [row["part"], row["candidate"]]
    if row["failure"]:
        return f"| {' | '.join([*start, row['failure'], '', '', '', ''])} |"
    seconds = [f"{row[name]:.4f}" for name in ("seconds", "plain_s")]
    apart = [f"{row[name]:.2g}" if name in row else "" for name in ("difference", "mean_difference")]
    cells = [*start, *seconds, f"{row['speedup']:.3f}", *apart]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
