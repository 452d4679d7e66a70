"""`svdq bench unet`: words around the measurements of one denoising step."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from svdq.cli.bench_ends import check_name, computing_on, gib, read_sides
from svdq.cli.option_types import OutputFile
from svdq.pipeline.models.compute import DTYPES, VARIANTS

if TYPE_CHECKING:
    import torch

    from svdq.pipeline.bench.unet import UnetFigures

EXAMPLES = """\b
Examples:
  svdq bench unet                                     the published SVD-XT at 1024x576, 25 frames, on this device
  svdq bench unet --dtype fp16 --dtype bf16 --json unet.json
  svdq bench unet --keep                              and have workers compute in the fastest exact way
  svdq bench unet --model tiny/ --size 128x64 --frames 4 --option fused-qkv
"""


@click.command(name="unet", epilog=EXAMPLES)
@click.option("--model", help="Folder or hub id whose UNet is built [default: SVD-XT's published size].")
@click.option("--size", metavar="WxH", callback=read_sides, default="1024x576", show_default=True, help="Pixels.")
@click.option("--frames", type=click.IntRange(1, 1024), default=25, show_default=True, help="Frames.")
@click.option("--no-guidance", is_flag=True, help="A batch of one in place of two.")
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(list(DTYPES)),
    multiple=True,
    help="Repeatable [default: fp16 on a GPU, fp32 on a processor].",
)
@click.option(
    "--option",
    "options",
    type=click.Choice(list(VARIANTS)),
    multiple=True,
    help="What to measure besides eager; repeatable [default: all].",
)
@click.option("--repeats", type=click.IntRange(1, 999), default=5, show_default=True, help="Measured steps of each.")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Where to compute."
)
@click.option(
    "--keep", is_flag=True, help="Have workers compute in the fastest exact way from now on, on GPUs like this one."
)
@click.option("--json", "json_path", type=OutputFile(), help="Write the figures.")
def bench_unet(
    model: str | None,
    size: tuple[int, int],
    frames: int,
    no_guidance: bool,
    dtypes: tuple[str, ...],
    options: tuple[str, ...],
    repeats: int,
    device: str,
    keep: bool,
    json_path: Path | None,
) -> None:
    """Measure one denoising step of the real UNet with random weights: its time, its memory, its share of the device.

    Eager is diffusers as it is; every option is compared with it, in time and in the result. "Of a product" is its
    rate (TFLOP/s) over that of a large matrix product in the same type on this device.
    """
    from svdq.pipeline.installed import require_torch

    require_torch("`svdq bench unet`")
    from svdq.cli.words import table
    from svdq.pipeline.bench.files import write_json
    from svdq.pipeline.bench.unet import UnetShape, measure_unet
    from svdq.producer.settings import Settings

    check_name(model)
    torch_device, where, types = computing_on(device, dtypes)
    home = Settings.load().home if keep else None
    if home is not None:
        _check_keepable(home, torch_device, types, model, options)
    shape = UnetShape(frames=frames, width=size[0], height=size[1], guided=not no_guidance)
    click.echo(f"{where}, {size[0]}x{size[1]}, {frames} frames, random weights", err=True)
    head: list[object] = ["option", "dtype", "step (s)", "spread", "first (s)", "speedup", "TFLOP/s", "of a product"]
    rows: list[list[object]] = [[*head, "GiB", "difference"]]
    found = []
    for figures in measure_unet(
        shape,
        model=model,
        device=torch_device,
        dtypes=types,
        options=tuple(dict.fromkeys(options or VARIANTS)),
        repeats=repeats,
    ):
        found.append(asdict(figures))
        if figures.failure:
            click.echo(f"{figures.option} cannot be run in {figures.dtype}: {figures.failure}", err=True)
        else:
            rows.append(_row(figures))
    for line in table(rows):
        click.echo(line)
    if json_path is not None:
        write_json(json_path, {"device": where, "shape": asdict(shape), "unet": found})
    if home is not None:
        _keep(home, torch_device, [one for one in found if one["dtype"] == "float16"])


def _check_keepable(
    home: Path, device: "torch.device", dtypes: "tuple[torch.dtype, ...]", model: str | None, options: tuple[str, ...]
) -> None:
    """Check, before minutes are spent, that what is measured can be kept.

    Raises:
        UsageError: it cannot.
    """
    import torch

    from svdq.worker.launching.gpus import gpu_names

    if device.type != "cuda":
        raise click.UsageError("--keep is for GPUs: on a processor frames are diffusers' own, bit by bit, and stay so.")
    if torch.float16 not in dtypes:
        raise click.UsageError("--keep needs --dtype fp16, which is what workers compute in; add it.")
    if model or options:
        raise click.UsageError("--keep compares all that the published UNet can do; leave --model and --option out.")
    name = torch.cuda.get_device_name(device)
    if set(gpu_names()) != {name}:
        found = ", ".join(sorted(set(gpu_names()))) or "none"
        raise click.UsageError(f"--keep is for GPUs of one kind: this is {name}, and nvidia-smi lists {found}.")
    try:
        home.mkdir(parents=True, exist_ok=True)
        writable = os.access(home, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise click.UsageError(f"--keep cannot write to {home}; set SVDQ_HOME to a folder of yours.")


def _keep(home: Path, device: "torch.device", figures: list[dict[str, Any]]) -> None:
    """Have workers of this home compute in the fastest exact way, and say which that is."""
    import torch

    from svdq.worker.launching import kept_options

    if any(one["failure"] for one in figures if one["option"] == "eager"):
        raise click.ClickException("Nothing was kept: eager could not be measured; try a smaller --size.")
    kept = kept_options.best_of(torch.cuda.get_device_name(device), figures)
    kept_options.keep(home, kept)
    if kept is None:
        click.echo("Nothing exact is worth it here: workers compute as diffusers does.")
    else:
        click.echo(
            f"Workers of {home} compute with {kept.option} from now on ({kept.speedup:.2f} times as fast), "
            "unless they are given an option of their own."
        )


def _row(figures: "UnetFigures") -> list[object]:
    return [
        figures.option,
        figures.dtype,
        f"{figures.step_s:.4g}",
        f"{min(figures.steps_s):.4g} to {max(figures.steps_s):.4g}",
        f"{figures.first_s:.3g}",
        "" if figures.speedup is None else f"{figures.speedup:.2f}",
        f"{figures.flops_per_s / 1e12:.3g}",
        "" if figures.matrix_share is None else f"{figures.matrix_share:.0%}",
        gib(figures.weight_bytes, figures.activation_bytes),
        "" if figures.difference is None else f"{figures.difference:.1e}",
    ]
