"""`svdq bench model`: options, table and JSON file for measurements of a model's parts."""

import platform
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from svdq.cli.formatting import echo
from svdq.cli.option_types import OutputFile
from svdq.pipeline.models.options import APPROXIMATE, COMPILED, DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from svdq.pipeline.bench.model import Case, Row

EXAMPLES = """\b
Examples:
  svdq bench model                                    the published SVD-XT at 1024x576, 25 frames, on this device
  svdq bench model --dtype fp16 --dtype bf16 --size 576x320 --size 1024x576 --json model.json
  svdq bench model --part step --compile off --compile blocks
  svdq bench model --part decode --decode-chunk-size 1 --decode-chunk-size 8 --decode-chunk-size 25
  svdq bench model --model tiny/ --size 128x64 --frames 4
  svdq bench model --model Wan-AI/Wan2.2-I2V-A14B-Diffusers --size 832x480 --frames 81
"""


def _read_sizes(_context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> list[tuple[int, int]]:
    """Parse video sizes such as 1024x576.

    Raises:
        InputError: a value is not a size.
    """
    from svdq.producer.submitting.options import read_field

    found = [read_field("size", value, option.opts[0]) for value in values]
    return list(dict.fromkeys((size["width"], size["height"]) for size in found))


def _once(_context: click.Context, _option: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Remove duplicates, and keep the order."""
    return tuple(dict.fromkeys(values))


@click.command(name="model", epilog=EXAMPLES)
@click.option("--model", help="Folder or hub id [default: SVD-XT's published sizes, random weights, temporary].")
@click.option(
    "--part",
    "parts",
    type=click.Choice(["step", "encode", "decode"]),
    multiple=True,
    callback=_once,
    help="Repeatable [default: all].",
)
@click.option(
    "--size",
    "sizes",
    metavar="WxH",
    callback=_read_sizes,
    multiple=True,
    default=("1024x576",),
    show_default=True,
    help="Size in pixels; repeatable.",
)
@click.option("--frames", type=click.IntRange(1, 1024), default=25, show_default=True, help="Frames of the video.")
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(list(DTYPES)),
    multiple=True,
    callback=_once,
    help="Repeatable [default: fp16 on a GPU (Wan: bf16), fp32 on a CPU].",
)
@click.option(
    "--compile",
    "compiled",
    type=click.Choice(COMPILED),
    multiple=True,
    callback=_once,
    default=("off",),
    show_default=True,
    help="Part of the step to compile; repeatable.",
)
@click.option(
    "--approximate",
    type=click.Choice(APPROXIMATE),
    multiple=True,
    callback=_once,
    help="Also measure the step with int8 weights.",
)
@click.option(
    "--decode-chunk-size",
    "chunk_sizes",
    type=click.IntRange(1, 1024),
    multiple=True,
    help="Frames decoded at a time; repeatable [default: 8, and all].",
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
    sizes: list[tuple[int, int]],
    frames: int,
    dtypes: tuple[str, ...],
    compiled: tuple[str, ...],
    approximate: tuple[str, ...],
    chunk_sizes: tuple[int, ...],
    repeats: int,
    device: str,
    json_path: Path | None,
    resume: bool,
) -> None:
    """Measure a step, an encode and a decode of a model on one device: time, memory and numerical difference.

    An encode is that of photo and prompt (the VAE in float32 where the model requires it) and drawing the noise; a
    decode ends with frames on the host. Of two experts, the first is measured. GiB is the size of the weights and, on a
    GPU, the peak of all other tensors. Results are compared with the first row of the same part and size: largest and
    mean difference, relative to the largest value.
    """
    from svdq.pipeline.installed import require_torch

    require_torch("`svdq bench model`")
    from svdq.cli.formatting import table
    from svdq.pipeline.bench import model as bench
    from svdq.pipeline.bench.files import is_plain, write_json
    from svdq.pipeline.errors import SvdqError
    from svdq.pipeline.models.registry import DEFAULT_FAMILY, family_named, family_of_model

    if resume and json_path is None:
        raise click.UsageError("--resume needs --json with the file to continue.")
    _check_name(model)
    family = family_named(family_of_model(model or "") or DEFAULT_FAMILY)
    _check_sizes(sizes, family.parameters.side_multiple)
    torch_device, where = _computing_on(device)
    cases = bench.cases_of(
        parts or tuple(bench.PARTS),
        sizes,
        frames,
        dtypes=dtypes or (family.half if torch_device.type == "cuda" else "fp32",),
        compiled=compiled,
        approximate=approximate,
        chunk_sizes=chunk_sizes or (8, frames),
    )
    document = {"device": where, "weights": model or "random weights", "repeats": repeats}
    rows = _kept_rows(json_path, document) if resume and json_path is not None else []
    done = {_case_of(row): row for row in rows if not row.failure}
    rows = list(done.values())
    missing = [case for case in cases if case not in done]
    echo(f"{where}, {frames} frames, {document['weights']}", err=True)
    with bench.model_folder(model, {case.part for case in missing}) as folder:
        for row in bench.measure(folder, missing, device=torch_device, repeats=repeats, earlier=list(done)):
            rows.append(row)
            done[_case_of(row)] = row
            echo(_sentence(row), err=True)
            if json_path is not None and is_plain(json_path):
                write_json(json_path, document | {"rows": [asdict(one) for one in rows]})
    if json_path is not None:
        write_json(json_path, document | {"rows": [asdict(one) for one in rows]})
    shown = [done[case] for case in cases if not done[case].failure]
    for line in table(_table(shown)):
        echo(line)
    if not shown:
        raise SvdqError("No row could be measured; see the reasons above.")


def _check_name(model: str | None) -> None:
    """Refuse models that have no parts to measure."""
    from svdq.pipeline.errors import InputError
    from svdq.pipeline.models.names import has_weights

    if model is not None and not has_weights(model):
        raise InputError(
            f"The model {model} has no weights to measure; give the folder or hub id of a model, or leave --model out "
            "for the published sizes of SVD-XT."
        )


def _check_sizes(sizes: list[tuple[int, int]], multiple: int) -> None:
    """Refuse sizes that the family of the model does not make."""
    from svdq.pipeline.errors import InputError
    from svdq.pipeline.parameters import MAX_SIDE
    from svdq.producer.submitting.options import nearest_side

    for size in sizes:
        width, height = (nearest_side(side, multiple) for side in size)
        if size != (width, height):
            raise InputError(
                f"--size {size[0]}x{size[1]} is not allowed: both sides must be multiples of {multiple} from "
                f"{multiple} to {MAX_SIDE}; the nearest such size is {width}x{height}."
            )


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


def _kept_rows(path: Path, document: dict[str, Any]) -> "list[Row]":
    """Read the rows of an earlier run; an empty list without a file.

    Raises:
        InputError: the file has other content, or its rows were measured with other options.
    """
    from pydantic import TypeAdapter, ValidationError

    from svdq.pipeline.bench.model import Row
    from svdq.pipeline.errors import InputError

    if not path.exists():
        return []
    try:
        kept = TypeAdapter(dict[str, Any]).validate_json(path.read_text(encoding="utf-8"))
        rows = TypeAdapter(list[Row]).validate_python(kept.pop("rows", None))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise InputError(f"The file {str(path)!r} has no rows of svdq bench model; leave --resume out.") from error
    for name, value in document.items():
        if kept.get(name) != value:
            raise InputError(
                f"The rows in {str(path)!r} were measured with {name} {kept.get(name)!r}, not {value!r}; give another "
                "file, or leave --resume out."
            )
    return rows


def _case_of(row: "Row") -> "Case":
    from svdq.pipeline.bench.model import Case

    return Case(**{field.name: getattr(row, field.name) for field in fields(Case)})


def _sentence(row: "Row") -> str:
    """Describe a row with its time, or with the reason why it has none."""
    how = " ".join(str(word) for word in (row.dtype, *_way(row), *_chunk(row)))
    what = f"{row.part} at {row.width}x{row.height} ({how})"
    return f"{what} cannot be measured: {row.failure}" if row.failure else f"{what}: {row.seconds:.4g} s"


def _way(row: "Row") -> list[str]:
    return [f"compiled {row.compiled}"] * (row.compiled != "off") + list(row.approximate)


def _chunk(row: "Row") -> list[str]:
    return [] if row.decode_chunk_size is None else [f"{row.decode_chunk_size} frames at a time"]


def _table(rows: "Sequence[Row]") -> list[list[object]]:
    head: list[object] = ["part", "size", "dtype", "options", "chunk", "time (s)", "spread", "first (s)", "GiB"]
    found = [[*head, "difference", "mean"]]
    for row in rows:
        gib = f"{row.weight_bytes / 2**30:.2f}"
        found.append([
            row.part,
            f"{row.width}x{row.height}",
            row.dtype,
            " ".join(_way(row)),
            row.decode_chunk_size or "",
            f"{row.seconds:.4g}",
            f"{min(row.all_s):.4g} to {max(row.all_s):.4g}",
            f"{row.first_s:.3g}",
            gib if row.peak_bytes is None else f"{gib} + {row.peak_bytes / 2**30:.2f}",
            *(
                "not finite" if not row.finite else "" if value is None else f"{value:.1e}"
                for value in (row.difference, row.mean_difference)
            ),
        ])  # fmt: skip
    return found
