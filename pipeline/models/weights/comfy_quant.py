"""ComfyUI's quantized weights: the marks that name their formats, and whether tensors are as these say. Without torch.

A mark is JSON in bytes beside a weight (`NAME.comfy_quant`), or in the header (`_quantization_metadata`).
"""

import importlib.util
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from svdq.pipeline.errors import InputError, how_to_install
from svdq.pipeline.models.weights.safetensors_file import Entry, SafetensorsFile

DATA, SCALE, SECOND_SCALE = "data", "scale", "second scale"  # names of the tensors that store a weight
#: Names of the tensors with the scales of a module's weight, and of a mark.
SCALES, SECOND, NOTE = ("scale_weight", "weight_scale"), "weight_scale_2", "comfy_quant"
#: What ComfyUI puts before the names of a denoiser.
PREFIXES = ("model.diffusion_model.", "diffusion_model.")
_HEADER_MARKS, _MAX_NOTE_BYTES = "_quantization_metadata", 1 << 16
_READ = "bf16, fp8, int8, mxfp8, nvfp4 or GGUF"


@dataclass(frozen=True, kw_only=True)
class Format:
    """How ComfyUI stores weights."""

    title: str  # in options, logs and sidecars
    layout: str = ""  # comfy-kitchen's class; "": fp8, which is read without
    dtype: str  # of the weight, by safetensors' name
    scale_dtypes: tuple[str, ...] = ("F32", "F16", "BF16")
    packed: int = 1  # numbers in an element of the weight
    block: int = 0  # numbers of a row with one scale; 0: a scale for all, or one a row
    multiple: int = 1  # what the numbers of a row are a multiple of
    is_rotated: bool | None = False  # by ConvRot; None: as the mark says
    scale_view: str = ""  # torch's dtype of scales that a file may have as bytes
    capability: tuple[int, int] | None = None  # of NVIDIA's GPUs, from which on they multiply in it; None: none do
    sides: int = 1  # what the sides of a matrix are a multiple of that kernels multiply


FORMATS: Final[Mapping[str, Format]] = {
    "float8_e4m3fn": Format(title="fp8", dtype="F8_E4M3", capability=(8, 9), sides=16),
    "float8_e5m2": Format(title="fp8 e5m2", dtype="F8_E5M2"),
    "int8_tensorwise": Format(
        title="int8", layout="TensorWiseINT8Layout", dtype="I8", is_rotated=None, capability=(7, 5)
    ),
    "mxfp8": Format(
        title="mxfp8",
        layout="TensorCoreMXFP8Layout",
        dtype="F8_E4M3",
        scale_dtypes=("U8", "F8_E8M0"),
        block=32,
        scale_view="float8_e8m0fnu",
        capability=(10, 0),
        sides=32,
    ),
    "nvfp4": Format(
        title="nvfp4",
        layout="TensorCoreNVFP4Layout",
        dtype="U8",
        scale_dtypes=("U8", "F8_E4M3"),
        packed=2,
        block=16,
        scale_view="float8_e4m3fn",
        capability=(10, 0),
        sides=32,
    ),
    "convrot_w4a4": Format(
        title="W4A4",
        layout="TensorCoreConvRotW4A4Layout",
        dtype="I8",
        packed=2,
        multiple=64,
        is_rotated=True,
    ),
}


#: Titles of the formats that comfy-kitchen multiplies in on a processor, where torch has no products of blocks.
ON_PROCESSORS: Final = frozenset({"fp8", "int8"})


def formats_of_gpu(capability: tuple[int, int]) -> frozenset[str]:
    """Return the titles of the formats that an NVIDIA GPU of a compute capability multiplies in."""
    return frozenset(form.title for form in FORMATS.values() if form.capability and form.capability <= capability)


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The format of a module's weight."""

    name: str
    group: int = 0  # numbers of a row that ConvRot rotates together; 0: none
    is_made: bool = False  # whether its layer is to multiply in full precision

    @property
    def format(self) -> Format:
        """What is known of the format."""
        return FORMATS[self.name]

    @property
    def is_fp8(self) -> bool:
        """Whether it is fp8 with a scale, which needs no comfy-kitchen."""
        return not self.format.layout


def marks_of(file: SafetensorsFile) -> dict[str, Mark]:
    """Return the marks in a file by the names of its modules.

    Raises InputError for a mark that cannot be read, an unknown format, and two marks that contradict each other.
    """
    found: dict[str, Mark] = {}
    for module, written in _written(file):
        mark = _mark(file, module, written)
        if found.setdefault(module, mark) != mark:
            raise InputError(
                f"The weights file {file.path} marks {module} as {found[module].name} in its {NOTE} and as another "
                f"format in its header ({_HEADER_MARKS}); get the file again."
            )
    return found


def _written(file: SafetensorsFile) -> Iterator[tuple[str, Any]]:
    """Yield modules with what marks them, parsed; None for what is no JSON."""
    for key, entry in file.entries.items():
        module, _, kind = key.rpartition(".")
        if kind == NOTE and f"{module}.weight" in file.entries:
            yield module, _parsed(file.bytes_of(key)) if entry.num_bytes <= _MAX_NOTE_BYTES else None
    if _HEADER_MARKS not in file.metadata:
        return
    header = _parsed(file.metadata[_HEADER_MARKS])
    layers = header.get("layers") if isinstance(header, dict) else None
    if not isinstance(layers, dict):
        raise InputError(f"The weights file {file.path} has a {_HEADER_MARKS} without layers; get the file again.")
    for name, written in layers.items():
        # Programs write the names with or without the prefix of the tensors.
        for module in (name, *(f"{prefix}{name}" for prefix in PREFIXES)):
            if f"{module}.weight" in file.entries:
                yield module, written


def _parsed(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _mark(file: SafetensorsFile, module: str, written: Any) -> Mark:
    if not isinstance(written, dict):
        raise InputError(f"The weights file {file.path} has a {NOTE} of {module} that is no JSON; get the file again.")
    nested = written.get("params")
    settings = {**nested, **written} if isinstance(nested, dict) else written
    name = str(written.get("format"))
    if name not in FORMATS:
        raise InputError(
            f"The weights file {file.path} has {module} in ComfyUI's format {name[:40]!r}, which svdq cannot read; "
            f"give weights in {_READ}."
        )
    is_rotated = FORMATS[name].is_rotated
    wanted = settings.get("convrot", bool(is_rotated))
    if wanted not in ((True, False) if is_rotated is None else (is_rotated,)):
        raise InputError(
            f"The weights file {file.path} marks {module} as {name} with convrot {str(wanted)[:20]}, which no known "
            f"format has; give weights in {_READ}."
        )
    is_made = bool(settings.get("full_precision_matrix_mult"))
    if not wanted:
        return Mark(name=name, is_made=is_made)
    group = settings.get("convrot_groupsize", 256)
    if type(group) is not int or group not in (4**n for n in range(1, 9)):
        raise InputError(
            f"The weights file {file.path} rotates {module} in groups of {str(group)[:20]}, and ConvRot's are powers "
            "of 4; get the file again."
        )
    return Mark(name=name, group=group, is_made=is_made)


def implied_mark(file: SafetensorsFile, module: str) -> Mark | None:
    """Return the format of a module's weight without a mark: fp8, or int8 with a scale; None: any other."""
    dtype = file.entries[f"{module}.weight"].dtype
    if dtype == "I8" and scale_keys(file, module):
        return Mark(name="int8_tensorwise")
    return next((Mark(name=name) for name, form in FORMATS.items() if not form.layout and form.dtype == dtype), None)


def scale_keys(file: SafetensorsFile, module: str) -> dict[str, str]:
    """Return the keys of the tensors with a module's scales, by the names that they are dequantized by."""
    named = {SCALE: [f"{module}.{each}" for each in SCALES], SECOND_SCALE: [f"{module}.{SECOND}"]}
    return {part: key for part, keys in named.items() for key in keys if key in file.entries}


def check_tensors(file: SafetensorsFile, module: str, mark: Mark) -> None:
    """Raise an InputError if the tensors of a module contradict its mark, or comfy-kitchen is not installed."""
    if problem := next(_problems(file, module, mark), ""):
        raise InputError(
            f"The weights file {file.path} marks {module} as {mark.name}, and has {problem}; get the file again, or "
            "give other weights."
        )
    if not mark.is_fp8 and importlib.util.find_spec("comfy_kitchen") is None:
        raise InputError(
            f"The weights file {file.path} has weights in {mark.name}, which need the package comfy-kitchen; "
            f"{how_to_install('int8')}."
        )


def _problems(file: SafetensorsFile, module: str, mark: Mark) -> Iterator[str]:
    form, weight = mark.format, file.entries[f"{module}.weight"]
    keys = scale_keys(file, module)
    if weight.dtype != form.dtype:
        yield f"its weight as {weight.dtype} in place of {form.dtype}"
    if SCALE not in keys:
        yield f"no {SCALES[-1]}"
        return
    scale = file.entries[keys[SCALE]]
    if scale.dtype not in form.scale_dtypes:
        yield f"its scales as {scale.dtype} in place of {form.scale_dtypes[-1]}"
    if mark.is_fp8:
        return
    if len(weight.shape) != 2:
        yield f"a weight of {len(weight.shape)} dimensions in place of 2"
        return
    rows, columns = weight.shape[0], weight.shape[1] * form.packed
    if columns % math.lcm(mark.group or 1, form.block or 1, form.multiple):
        yield f"{columns} columns, which are no multiple of its groups"
    if form.block:
        expected = (-(-rows // 128) * 128, -(-columns // form.block // 4) * 4)
        if scale.shape != expected:
            yield f"scales of shape {list(scale.shape)} in place of {list(expected)}"
    elif math.prod(scale.shape) not in (1, rows) or scale.shape[:1] not in ((), (1,), (rows,)):
        yield f"scales of shape {list(scale.shape)} for {rows} rows"
    if (SECOND_SCALE in keys) != (mark.name == "nvfp4"):
        yield f"{'a' if SECOND_SCALE in keys else 'no'} {SECOND}"
    elif SECOND_SCALE in keys and not _is_one_float(file.entries[keys[SECOND_SCALE]]):
        yield f"a {SECOND} that is not one number"


def _is_one_float(entry: Entry) -> bool:
    return entry.is_float and math.prod(entry.shape) == 1
