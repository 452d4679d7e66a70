"""`svdq bench model`: options and output of the measurements of a model's parts."""

import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from svdq.cli.bench_model_rows import case_of, kept_rows, rows_table, sentence
from svdq.cli.formatting import echo, table
from svdq.cli.option_types import OutputFile
from svdq.pipeline.models.options import APPROXIMATE, COMPILED, DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from svdq.pipeline.models.family import Family
    from svdq.pipeline.parameters import VideoParameters

EXAMPLES = """\b
Examples:
  svdq bench model                                    the published SVD-XT at 1024x576, 25 frames, on this device
  svdq bench model --dtype fp16 --dtype bf16 --size 576x320 --size 1024x576 --json model.json
  svdq bench model --part step --compile off --compile blocks
  svdq bench model --part decode --decode-chunk-size 1 --decode-chunk-size 8 --decode-chunk-size 25
  svdq bench model --model tiny/ --size 128x64 --frames 4
  svdq bench model --model Wan-AI/Wan2.2-I2V-A14B-Diffusers --size 832x480 --size 1280x720
"""


@click.command(name="model", epilog=EXAMPLES)
@click.option("--model", help="Folder or hub id [default: SVD-XT's published sizes, random weights, temporary].")
@click.option(
    "--part",
    "parts",
    type=click.Choice(["step", "encode", "decode"]),
    multiple=True,
    help="Repeatable [default: all].",
)
@click.option(
    "--size",
    "sizes",
    metavar="WxH",
    multiple=True,
    help="Size in pixels; repeatable [default: the model's; of SVD-XT 1024x576].",
)
@click.option(
    "--frames", type=click.IntRange(1, 1024), help="Frames of the video [default: the model's; of SVD-XT 25]."
)
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(list(DTYPES)),
    multiple=True,
    help="Repeatable [default: fp16 on a GPU, of Wan bf16; fp32 on a CPU].",
)
@click.option(
    "--compile",
    "compiled",
    type=click.Choice(COMPILED),
    multiple=True,
    default=("off",),
    show_default=True,
    help="Part of the step to compile; repeatable.",
)
@click.option(
    "--approximate",
    type=click.Choice(APPROXIMATE),
    multiple=True,
    help="Also measure the step with int8 weights.",
)
@click.option(
    "--decode-chunk-size",
    "chunk_sizes",
    type=click.IntRange(1, 1024),
    multiple=True,
    help="Frames decoded at a time; repeatable [default: 8, of Wan 1 (tiles), and all].",
)
@click.option("--repeats", type=click.IntRange(1, 999), default=3, show_default=True, help="Measurements of each row.")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Where to compute."
)
@click.option("--json", "json_path", type=OutputFile(), help="Write each row as soon as it is measured.")
@click.option("--resume", is_flag=True, help="Keep the rows in the file of --json and measure the rest.")
def bench_model(
    model: str | None,
    parts: tuple[str, ...],
    sizes: tuple[str, ...],
    frames: int | None,
    dtypes: tuple[str, ...],
    compiled: tuple[str, ...],
    approximate: tuple[str, ...],
    chunk_sizes: tuple[int, ...],
    repeats: int,
    device: str,
    json_path: Path | None,
    resume: bool,
) -> None:
    """Measure a step, an encode and a decode of a model.

    It measures time, memory and numerical difference on one device. An encode is CLIP or the text encoder, the VAE
    encoder (in float32 where the model requires it) and drawing the noise; a decode ends with frames on the host. A
    model with two experts has separate rows for each. GiB is the size of the weights and, on a GPU, the peak of all
    other tensors. Results are compared with the first row of the same part and size: largest and mean difference,
    relative to the largest value.

    Without --model, random weights of SVD-XT's sizes are measured; any other model needs a folder or hub id.
    """
    from svdq.pipeline.installed import require_torch

    require_torch("`svdq bench model`")
    from svdq.pipeline.bench import model as bench
    from svdq.pipeline.bench.cases import PARTS, cases_of
    from svdq.pipeline.errors import SvdqError
    from svdq.producer.storage.temporary import is_regular, write_file

    if resume and json_path is None:
        raise click.UsageError("--resume needs --json with the file to continue.")
    family, videos, components = _videos(model, sizes, frames)
    torch_device, where = _computing_on(device)
    # Fewer frames than all at a time are tiles to Wan, whatever the number.
    some = videos[0].smaller_chunk(16)
    cases = cases_of(
        parts or PARTS,
        videos,
        components,
        dtypes=dtypes or (family.half if torch_device.type == "cuda" else "fp32",),
        compiled=compiled,
        approximate=approximate,
        chunk_sizes=chunk_sizes or (some, videos[0].num_frames),
    )
    document: dict[str, Any] = {"device": where, "weights": model or "random weights", "repeats": repeats}
    kept = kept_rows(json_path, document) if resume and json_path is not None else []
    done = {case_of(row): row for row in kept if not row.failure}
    missing = [case for case in cases if case not in done]
    echo(f"{where}, {videos[0].num_frames} frames, {document['weights']}", err=True)
    with bench.model_folder(model, {case.part for case in missing}) as folder:
        for row in bench.measure(folder, missing, device=torch_device, repeats=repeats, earlier=list(done)):
            done[case_of(row)] = row
            echo(sentence(row), err=True)
            document["rows"] = [asdict(one) for one in done.values()]
            if json_path is not None and (is_regular(json_path) or case_of(row) == missing[-1]):
                write_file(json_path, [json.dumps(document, indent=2), "\n"])
    shown = [done[case] for case in cases if not done[case].failure]
    echo(*table(rows_table(shown)))
    if not shown:
        raise SvdqError("No row could be measured; see the reasons above.")


def _videos(
    model: str | None, sizes: "Sequence[str]", frames: int | None
) -> "tuple[Family, list[VideoParameters], list[str | None]]":
    """Return a model's family, the videos to measure with its defaults, and the components that do their steps.

    Raises:
        InputError: the model does not exist or has no weights, or a size or the number of frames is not allowed.
    """
    from svdq.pipeline.bench.cases import denoising_components
    from svdq.pipeline.errors import InputError
    from svdq.pipeline.models.family_parameters import DEFAULT_FAMILY
    from svdq.pipeline.models.folder_check import check_folder
    from svdq.pipeline.models.hub import find_folder
    from svdq.pipeline.models.names import has_weights
    from svdq.pipeline.models.registry import family_named, family_of, layout_of
    from svdq.producer.submitting.options import SubmitOptions, make_job, read_field

    family = family_named(DEFAULT_FAMILY)
    facts = family.published
    if model is not None:
        if not has_weights(model):
            raise InputError(
                f"The model {model} has no weights to measure; give a model folder or a hub id, or leave --model out "
                "for the published sizes of SVD-XT."
            )
        folder = find_folder(model)
        family = family_of(folder, model)
        check_folder(folder, model, layout_of(folder, model), components=())
        facts = family.read_facts(folder, model)
    videos = []
    for size in sizes or (None,):
        shape = {} if size is None else read_field("size", size, "--size")
        if "auto_size" in shape:
            raise InputError(f"--size {size} needs a photo; give a size such as 832x480.")
        options = SubmitOptions(family=family.name, frames=frames, seed=0, **shape)
        job = make_job(options, image=f"inputs/{'0' * 64}.jpg", name="photo")
        videos.append(family.fill_in(job.parameters, model or "of the published size", facts))
    videos = list({(video.width, video.height): video for video in videos}.values())
    return family, videos, denoising_components(videos, facts)


def _computing_on(device: str) -> "tuple[torch.device, str]":
    """Return a device, and its name with torch's version.

    Raises:
        InputError: the device does not exist.
    """
    import torch

    from svdq.pipeline.device import choose_device

    found = choose_device(device, 0)
    processor = f"{platform.machine()}, {torch.get_num_threads()} threads"
    where = torch.cuda.get_device_name(found) if found.type == "cuda" else processor
    return found, f"{where}, torch {torch.__version__}"
