"""`svdq model`: fetch, convert and create models."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

import click

from svdq.cli.formatting import echo, echo_json, table
from svdq.cli.option_types import GivenPath, OutputFile, json_option
from svdq.pipeline.command_line import svdq_command, variable
from svdq.pipeline.errors import InputError, require_torch
from svdq.pipeline.models.comfyui.model_toml import command, to_model_file
from svdq.pipeline.models.comfyui.recipe import read_recipe
from svdq.pipeline.models.comfyui.workflow import read_workflow
from svdq.pipeline.models.comfyui_folders import find_folders
from svdq.pipeline.models.compute.memory import size_text
from svdq.pipeline.models.families import DEFAULT_FAMILY, FAMILIES, PARAMETERS, family_named
from svdq.pipeline.models.family import imported
from svdq.pipeline.models.model_file import read_model_file
from svdq.pipeline.models.model_name import PRESETS, SUFFIX, has_weights, is_model_file, with_presets
from svdq.pipeline.models.names.model_names import find_base, resolve, shipped_configs
from svdq.pipeline.models.names.pull import Variant, pull_model_file
from svdq.pipeline.models.names.pull import pull as fetch
from svdq.pipeline.models.names.sized_model import sized_model
from svdq.pipeline.models.upscaler_file import PICKLES
from svdq.pipeline.models.weights.model_folder import DTYPES
from svdq.worker.choice import smallest_card_gb
from svdq.worker.launcher.gpus import visible_gpus


@click.group()
def model() -> None:
    """List, fetch, import and check models, or create a small untrained one for tests."""


@model.command("list")
@json_option("model")
def list_models(as_json: bool) -> None:
    """List the published models, and the cards they fit.

    Presets are model files that come with svdq; the others are on the hub. The download of each leaves out files in
    the hub's cache and, for presets, in ComfyUI's folders. The card is the smallest usual one that holds the model
    for its usual video, or to which blocks are streamed (--offload blocks).

    Any other model of these families can be used, too, as a folder, a hub id or a model file.

    \b
    Examples:
      svdq model list
      svdq model list --json | jq -r 'select(.fetched) | .name'
    """
    found = [_listed(name, path) for name, path in PRESETS.items()]
    found += [_listed(name, name) for family in FAMILIES for name in family.models]
    if as_json:
        for each in found:
            echo_json(each)
        return
    rows = [["model", "family", "card", "to fetch", ""]]
    rows += [[each["name"], each["family"], _cards(each), _to_fetch(each), each["note"]] for each in found]
    echo(*table(rows))
    echo("", "svdq model pull NAME fetches a model; SVDQ_MODEL=NAME uses it.")


def _listed(name: str, path: str) -> dict[str, Any]:
    """Return what is said of a published model or, by its path, of a preset; the keys are those of the JSON."""
    known = sized_model(path)
    return {
        "name": name,
        "family": known.family.name,
        "note": f"preset of {read_model_file(Path(path)).base}" if path != name else "",
        "fetched": not (known.download_bytes or known.unsized_files),
        "download_bytes": known.download_bytes,
        "card_gb": smallest_card_gb(known),
        "streamed_card_gb": smallest_card_gb(known, streamed=True),
    }


def _cards(listed: Mapping[str, Any]) -> str:
    whole, streamed = listed["card_gb"], listed["streamed_card_gb"]
    found = [f"{whole} GB"] if whole is not None else []
    if streamed is not None and (whole is None or streamed < whole):
        found.append(f"streamed {streamed} GB")
    return ", ".join(found) or "-"


def _to_fetch(listed: Mapping[str, Any]) -> str:
    return "is here" if listed["fetched"] else size_text(listed["download_bytes"])


@model.command()
@click.argument("name", metavar="MODEL")
@click.option(
    "--variant",
    type=click.Choice(get_args(Variant)),
    help="Weights to fetch: half precision for GPUs, full for CPUs [default: fp16 if there is a GPU].",
)
@json_option()
def pull(name: str, variant: Variant | None, as_json: bool) -> None:
    """Fetch a model, or what a model file names, from the hub.

    Only the files that svdq reads are fetched, after a check of the free disk space. Complete files are not fetched
    again. HF_HOME moves the cache; HF_TOKEN gives access to models whose license must be accepted.

    \b
    Examples:
      HF_TOKEN=... svdq model pull stabilityai/stable-video-diffusion-img2vid-xt-1-1
      svdq model pull Wan-AI/Wan2.2-I2V-A14B-Diffusers --variant full
      svdq model pull wan2.2-4step
    """
    wanted = variant or variant_here()
    folder = fetch_model(name, wanted, partial(echo, err=as_json))
    if as_json:
        echo_json({"model": name, "variant": wanted, "folder": None if folder is None else str(folder)})
        return
    if folder is not None:
        echo(folder)
    echo(f"Use it with {variable('SVDQ_MODEL', name)}")


def variant_here() -> Variant:
    """Return the weights that ranks of this machine load."""
    return "fp16" if visible_gpus() else "full"


def fetch_model(name: str, variant: Variant, announce: Callable[[str], object]) -> Path | None:
    """Fetch a model, or what a model file names; return the folder of a model. Raises as `pull`."""
    path = with_presets(name)
    if not is_model_file(path):
        return fetch(path, variant, announce)
    pull_model_file(Path(path), variant, announce)
    return None


@model.command("check")
@click.argument("name", metavar="FILE")
@json_option()
def check_command(name: str, as_json: bool) -> None:
    """Check a model file and the headers of the files that it names.

    \b
    Examples:
      svdq model check wan2.2-4step
      svdq model check ~/models/mine.toml
    """
    name, given = with_presets(name), name
    if not is_model_file(name):
        doctor = svdq_command("doctor", options=("--model", name))
        raise InputError(f"{name!r} is no model file (.toml); `{doctor}` checks any other model.")
    require_torch("the check of a model file")
    from svdq.pipeline.models.families import layout_of
    from svdq.pipeline.models.weights.components import check_model_file

    model = resolve(name)
    sentences = check_model_file(model, layout_of(model))
    if as_json:
        echo_json({"model": given, "family": model.family, "found": list(sentences)})
        return
    for sentence in sentences:
        echo(sentence)
    echo(f"{model.name} can be used, with {variable('SVDQ_MODEL', given)}")


@model.command()
@click.argument("folder", metavar="DIR", type=GivenPath())
@click.option(
    "--family",
    type=click.Choice(tuple(PARAMETERS)),
    default=DEFAULT_FAMILY,
    show_default=True,
    help=f"Family: {'; '.join(f'{each.name} is {each.tiny_title}' for each in FAMILIES)}.",
)
@json_option()
def tiny(folder: Path, family: str, as_json: bool) -> None:
    """Write a small untrained model into DIR.

    It has the real classes and the same bits every time, in less than 15 MB. Its videos show noise. It serves for tests
    and for comparisons with diffusers.

    \b
    Examples:
      svdq model tiny /tmp/tiny
    """
    require_torch("the untrained model")
    imported(family_named(family).tiny)(folder)
    if as_json:
        echo_json({"folder": str(folder), "family": family, "notice": "untrained: shows noise"})
        return
    echo(f"{folder}: tiny (untrained: shows noise). Use it with {variable('SVDQ_MODEL', folder)}")


@model.command("calibrate")
@click.argument("source", metavar="MODEL")
@click.option("--photo", type=GivenPath(), required=True, metavar="FILE", help="Photo to make a video of.")
@click.option("--prompt", default="", metavar="TEXT", help="What happens in the video.")
@click.option("--steps", type=click.IntRange(1, 1000), help="Denoising steps [default: the model's own].")
@click.option("--shape", metavar="WxHxF", help="Shape of the video [default: the model's own].")
@click.option(
    "--output", type=OutputFile(".toml"), help="Model file to write, unless MODEL is one [default: NAME.toml here]."
)
@click.option(
    "--plot", "plot_path", type=OutputFile(".png"), help="Plot the curve and what thresholds leave to this file."
)
@json_option()
def calibrate_command(
    *,
    source: str,
    photo: Path,
    prompt: str,
    steps: int | None,
    shape: str | None,
    output: Path | None,
    plot_path: Path | None,
    as_json: bool,
) -> None:
    """Measure which steps of a model can be skipped.

    The command computes every step of one video, and loads each component once. It writes the curve by which
    --step-cache skips steps into a model file: at the end of MODEL, or into a new file whose base is MODEL.

    \b
    Examples:
      svdq model calibrate ~/models/mine.toml --photo photo.jpg --prompt "A dog runs."
    """
    require_torch("calibration")
    from svdq.worker.calibration import calibrate

    path, curve = calibrate(
        with_presets(source), photo, prompt, steps=steps, shape=shape, output=output, plot_path=plot_path,
        announce=partial(echo, err=True),
    )  # fmt: skip
    if as_json:
        echo_json({"file": str(path), "step_cache": curve.table, "computed": curve.computed})
        return
    echo(*table([["step cache", "computed"], *([f"{each:g}", number] for each, number in curve.computed.items())]))
    echo("", f"{path} has the curve. Use it with {variable('SVDQ_MODEL', path)}")


@model.command("convert")
@click.argument("source", metavar="MODEL")
@click.argument("target", metavar="TARGET", type=GivenPath())
@click.option("--dtype", type=click.Choice(["bf16", "fp16"]), default="bf16", show_default=True, help="Half precision.")
@json_option()
def convert_command(source: str, target: Path, dtype: str, as_json: bool) -> None:
    """Write MODEL in half precision, or a .pth as safetensors.

    MODEL is a folder or a hub id that was fetched. The copy takes half the disk, and half as long to load. Weights that
    diffusers keeps in float32 stay so, as do the VAE and the image encoder: in that dtype, the copy gives the same
    videos. Copying takes about 4 GB of memory. TARGET appears when the copy is complete.

    A .pth file, such as an upscaler's, may hold code. Its weights are read with torch's weights_only=True, which runs
    none, and are written unchanged.

    \b
    Examples:
      svdq model convert Wan-AI/Wan2.2-I2V-A14B-Diffusers /models/wan-bf16 --dtype bf16
      svdq model convert RealESRGAN_x2plus.pth RealESRGAN_x2plus.safetensors
    """
    require_torch("conversion")
    if Path(source).suffix in PICKLES:
        from svdq.pipeline.models.names.convert import convert_pickle
        from svdq.producer.settings import given_path

        num_bytes = convert_pickle(given_path(source), target)
        if as_json:
            echo_json({"file": str(target), "bytes": num_bytes})
            return
        echo(f"{target}: {size_text(num_bytes)} of weights. Use an upscaler with {variable('SVDQ_UPSCALER', target)}")
        return
    model = resolve(with_presets(source))
    import torch

    from svdq.pipeline.models.names.convert import convert

    total = convert(
        model,
        target,
        getattr(torch, DTYPES[dtype]),
        on_file=lambda file, num_bytes: echo(f"{file}  {size_text(num_bytes)}", err=True),
    )
    if as_json:
        echo_json({"folder": str(target), "dtype": dtype, "bytes": total})
        return
    echo(f"{target}: {size_text(total)} of weights in {dtype}. Use it with {variable('SVDQ_MODEL', target)}")


@model.command("import")
@click.argument("workflow", metavar="WORKFLOW", type=GivenPath())
@click.option(
    "--models",
    "folder",
    type=GivenPath(),
    metavar="DIR",
    help="ComfyUI's folder, or its models folder [default: around WORKFLOW, ~/ComfyUI or ~/comfy/ComfyUI].",
)
@click.option(
    "--output", type=GivenPath(), metavar="FILE", help="Model file to write [default: WORKFLOW's name .toml]."
)
@click.option("--force", is_flag=True, help="Replace the model file if it exists.")
@json_option()
def import_command(workflow: Path, folder: Path | None, output: Path | None, force: bool, as_json: bool) -> None:
    """Write a ComfyUI workflow as a model file.

    WORKFLOW is the JSON that ComfyUI saves or exports for its API, or a PNG, WebP or mp4 that it has written with the
    workflow inside. Prints the command that submits the same video, what cannot be carried over, by node, and the files
    that are missing. Files are looked up in ComfyUI's folders, also in those that its extra_model_paths.yaml names.

    \b
    Examples:
      svdq model import wan22.json --models ~/ComfyUI
      svdq model import ~/ComfyUI/output/video_00001.png --output mine.toml
    """
    target = output or Path(f"{workflow.stem}{SUFFIX}")
    if target.suffix != SUFFIX or not has_weights(target.stem):
        raise InputError(
            f"{str(target)!r} cannot be the name of a model file; give another as --output, such as mine.toml."
        )
    if target.exists() and not force:
        raise InputError(f"{str(target)!r} exists; give another file as --output, or --force to replace it.")
    made = to_model_file(
        read_recipe(read_workflow(workflow), FAMILIES), find_folders(folder, workflow), workflow, FAMILIES
    )
    try:
        target.write_bytes(made.toml.encode("utf-8", "replace"))
    except OSError as error:
        raise InputError(f"{str(target)!r} cannot be written ({error.strerror}); give another as --output.") from error
    if as_json:
        missing = [{"path": str(each.path), "about": each.about, "url": each.url} for each in made.missing]
        described = {"model": str(target), "notes": list(made.notes), "missing": missing, "submit": list(made.submit)}
        echo_json(described | {"upscaler": made.upscaler and str(made.upscaler)})
        return
    echo(f"{target}: written")
    for title, found in (("Not carried over:", made.notes), ("Missing files:", made.missing)):
        if found:
            echo("", title, *(f"  {each}" for each in found))
    lines = [svdq_command("model pull", target)] if _is_pull_needed(target) else []
    echo("", "The same video:", *(f"  {line}" for line in [*lines, command(made, str(target))]))
    variables, lines = [variable("SVDQ_MODEL", target)], []
    if (upscaler := made.upscaler) is not None:
        if upscaler.suffix in PICKLES:
            upscaler = target.absolute().with_name(f"{upscaler.stem}.safetensors")
            lines.append(svdq_command("model convert", made.upscaler, upscaler))
        variables.append(variable("SVDQ_UPSCALER", upscaler))
    lines.append(f"{' '.join(variables)} svdq worker")
    echo("", "Workers render it, in a second terminal:", *(f"  {line}" for line in lines))


def _is_pull_needed(path: Path) -> bool:
    """Return whether some of the base of a model file is to be fetched; its own files may be missing."""
    given = read_model_file(path)
    try:
        find_base(given, path)
    except InputError:
        # A text encoder's file that is not here yet probably has the tokenizer inside.
        return shipped_configs(given) is None or Path(given.weights["text_encoder"]).is_file()
    return False
