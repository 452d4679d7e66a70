"""`svdq model`: fetch models, or create a small untrained one."""

from pathlib import Path
from typing import Literal

import click

from svdq.cli.formatting import echo


@click.group()
def model() -> None:
    """Fetch models, or create a small untrained one for tests."""


PULL_EXAMPLES = """\b
Examples:
  svdq model pull stabilityai/stable-video-diffusion-img2vid-xt
  HF_TOKEN=... svdq model pull stabilityai/stable-video-diffusion-img2vid-xt-1-1
  svdq model pull stabilityai/stable-video-diffusion-img2vid --variant full
"""


@model.command(epilog=PULL_EXAMPLES)
@click.argument("name", metavar="ID")
@click.option(
    "--variant",
    type=click.Choice(["fp16", "full"]),
    help="Weights to fetch: half precision for GPUs, full for CPUs [default: fp16 if there is a GPU].",
)
@click.option("--revision", metavar="REV", help="A branch, tag or commit [default: main].")
def pull(name: str, variant: Literal["fp16", "full"] | None, revision: str | None) -> None:
    """Fetch a model from the hub into its cache.

    Only the files that svdq reads are fetched, after a check of the free disk space. Complete files are not fetched
    again. HF_HOME moves the cache; HF_TOKEN gives access to models whose license must be accepted.
    """
    from svdq.pipeline.models import pull as hub
    from svdq.pipeline.models.memory import size_text
    from svdq.worker.launcher.gpus import num_gpus

    wanted = variant or ("fp16" if num_gpus() else "full")
    plan = hub.make_plan(f"{name}@{revision}" if revision else name, wanted)
    free = hub.check_space(plan)
    note = " (it has no fp16 weights)" if wanted != plan.variant else ""
    echo(
        f"{plan.name}: {len(plan.files)} files, {plan.variant} weights{note}; "
        f"{len(plan.missing)} to fetch, {size_text(plan.bytes_missing)} of {size_text(free)} free."
    )
    numbers = {file.path: number for number, file in enumerate(plan.missing, 1)}
    folder = hub.pull(
        plan,
        lambda file: echo(f"{numbers[file.path]}/{len(numbers)}  {file.path}  {size_text(file.size)}", err=True),
    )
    echo(folder)
    echo(f"Use it with SVDQ_MODEL={plan.name}")


TINY_EXAMPLES = """\b
Examples:
  svdq model tiny /tmp/tiny
  svdq worker --model /tmp/tiny --burst
"""


@model.command(epilog=TINY_EXAMPLES)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
def tiny(folder: Path) -> None:
    """Write an untrained model into DIR: the real classes, less than 15 MB, the same bits every time.

    Its videos show noise. It serves for tests and for comparisons with diffusers.
    """
    from svdq.pipeline.installed import require_torch

    require_torch("the untrained model")
    # Imported here so that `--help` does not import torch.
    from svdq.pipeline.models.svd.tiny import write_tiny_model

    write_tiny_model(folder)
    echo(f"{folder}: tiny (untrained: shows noise). Use it with SVDQ_MODEL={folder}")
