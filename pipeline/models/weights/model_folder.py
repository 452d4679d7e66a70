"""Reads and checks model folders without torch: JSON, and the names and headers of weights files.

A check reads the index and the header of every weights file. Configs that do not fit each other or the weights are
reported when the model is loaded.
"""

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from svdq.pipeline.command_line import svdq_command
from svdq.pipeline.errors import InputError, how_to_install, reason_of
from svdq.pipeline.models.family import FileNames, FolderLayout
from svdq.pipeline.models.model_name import is_model_file, preset_or_path
from svdq.pipeline.models.weights.comfy_quant import NOTE, SCALES, SECOND, implied_mark, marks_of, scale_keys
from svdq.pipeline.models.weights.gguf_file import open_gguf
from svdq.pipeline.models.weights.safetensors_file import SafetensorsFile

INDEX = "model_index.json"  # the pipeline's index; the hub's cache finds a model by it
_DTYPES = {"F16", "BF16", "F32", "F8_E4M3", "F8_E5M2"}  # supported types of weights, as named by safetensors
#: Names of weights files, whole or in parts, and of the indexes of parts.
_WEIGHTS_FILE = re.compile(
    r"(diffusion_pytorch_)?model(\.fp16)?(-\d{5}-of-\d{5})?(\.fp16)?\.safetensors(\.index(\.fp16)?\.json)?"
)
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}  # the dtype options, and torch's names
#: Weights that suit each of torch's dtypes, the best first: True for half precision, False for full. bfloat16 has the
#: range of the full weights; float32 must equal diffusers bit by bit, so nothing may be rounded.
WEIGHTS = {"float32": (False,), "float16": (True, False), "bfloat16": (False, True)}
UNTRAINED = "UNTRAINED.md"  # the file that marks folders with random weights that svdq has written
_SAVED = "give a folder that diffusers' save_pretrained has written"  # advice about a folder without readable configs

SENTENCEPIECE = "spiece_model"  # the tensor that is a text encoder's tokenizer
#: Weights that text encoders look up, and multiply by nothing.
EMBEDDINGS = ("shared.weight", "token_embd.weight", "model.embed_tokens.weight")
#: Tensors in files of ComfyUI that are no weights: scales, how the inputs of a layer are rounded, marks of the format.
NO_WEIGHTS = ("scale_input", "input_scale", "scaled_fp8", SENTENCEPIECE, NOTE, *SCALES, SECOND)


def _fetch_again(folder: Path, name: str, otherwise: str) -> str:
    """Return how to complete a model in the hub's cache, as a clause; for any other folder `otherwise`."""
    is_cached = folder.parent.name == "snapshots" and folder != Path(name)
    given = preset_or_path(Path(name)) if is_model_file(name) else name
    return f"fetch it again with `{svdq_command('model pull', given)}`" if is_cached else otherwise


def read_json(folder: Path, file: str, name: str) -> dict[str, Any]:
    """Read a JSON file of a folder of the model `name`, such as `unet/config.json`; raises InputError if it is none."""
    try:
        content = json.loads((folder / file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"The model {name} has no readable {file}; {_fetch_again(folder, name, _SAVED)}.") from error
    if not isinstance(content, dict):
        raise InputError(f"The {file} of the model {name} is not a JSON object.")
    return content


def is_untrained(folder: Path) -> bool:
    """Return whether a folder is marked as having random weights."""
    return (folder / UNTRAINED).is_file()


def is_half(file: str) -> bool:
    """Return whether a weights file, or an index of several, is of the fp16 variant by its name."""
    return ".fp16" in file.rpartition("/")[2]


def weight_files(names: Iterable[str]) -> list[str]:
    """Return the weights files and their indexes among the names of a component's files."""
    return sorted(name for name in names if _WEIGHTS_FILE.fullmatch(name))


def variants(folder: Path, component: str) -> set[bool]:
    """Return whether a component has weights in half precision (True) and full ones (False)."""
    return {is_half(file) for file in weight_files(_names_in(folder / component))}


def _names_in(folder: Path) -> list[str]:
    # A dangling link is listed, so that it is reported as missing.
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def loaded_files(folder: Path, component: str, precisions: Sequence[bool]) -> list[Path]:
    """Return a component's weights files of the first of some precisions that it has: half (True) or full (False).

    Of files in parts, they are those that the index names: parts of an earlier copy may lie beside them. May raise
    InputError for an index that cannot be read.
    """
    names = weight_files(_names_in(folder / component))
    found = next(filter(None, ([name for name in names if is_half(name) == each] for each in precisions)), [])
    if index := next((name for name in found if name.endswith(".json")), None):
        parts = read_json(folder, f"{component}/{index}", str(folder)).get("weight_map")
        found = sorted({*parts.values()}) if isinstance(parts, dict) else []
    return [folder / component / name for name in found]


class WeightInFile(NamedTuple):
    """A weight, as the header of its file describes it."""

    name: str
    number: int  # of its elements
    num_bytes: int  # that store them
    num_rows: int  # of a matrix; 0: it is none


def weights_in(file: Path, names: FileNames | None = None) -> list[WeightInFile]:
    """Return the weights in a file of safetensors or GGUF.

    With `names` of a component, only its own weights if the file has others, too. Reads the header only; of a file that
    cannot be read it returns nothing. Raises InputError without the package gguf.
    """
    if file.suffix == ".gguf":
        return [
            WeightInFile(each.name, int(each.n_elements), int(each.n_bytes), _rows([int(n) for n in each.shape[::-1]]))
            for each in gguf_tensors(file)
        ]
    try:
        opened = SafetensorsFile.open(file)
    except (OSError, ValueError):
        return []
    found = opened.entries
    named = {name: each for name, each in found.items() if not {name, name.rpartition(".")[2]} & {*NO_WEIGHTS}}
    if names is not None:
        own = {name: each for name, each in named.items() if re.match(names.among_others, name)}
        named = own if own or names.is_split else named
    marks = marks_of(opened)

    def described(name: str) -> WeightInFile:
        module, _, kind = name.rpartition(".")
        is_marked = kind == "weight" and module in marks
        parts = [name, *(scale_keys(opened, module).values() if is_marked else ())]
        number = math.prod(found[name].shape) * (marks[module].format.packed if is_marked else 1)
        return WeightInFile(name, number, sum(found[part].num_bytes for part in parts), _rows(found[name].shape))

    return [described(name) for name in named]


def _rows(shape: Sequence[int]) -> int:
    return shape[0] if len(shape) == 2 else 0


def is_rounded(files: Iterable[Path]) -> bool:
    """Return whether some weights in the files of a folder have a byte each, as in fp8."""
    return any(each.num_bytes < 2 * each.number for file in files for each in weights_in(file))


def formats_in(files: Iterable[Path]) -> set[str]:
    """Return the titles of ComfyUI's formats that weights in safetensors files are quantized in."""
    found = set()
    for file in (each for each in files if each.suffix == ".safetensors"):
        with suppress(OSError, ValueError):
            opened = SafetensorsFile.open(file)
            marks = marks_of(opened)
            modules = [name.removesuffix(".weight") for name in opened.entries if name.endswith(".weight")]
            found |= {mark.format.title for each in modules if (mark := marks.get(each) or implied_mark(opened, each))}
    return found


def gguf_tensors(file: Path) -> Sequence[Any]:
    """Return the tensors of a GGUF file, mapped; raises InputError if it cannot be read."""
    try:
        return list(open_gguf(file).tensors)
    except ImportError as error:
        raise InputError(f"The weights file {file} needs the package gguf; {how_to_install('gguf')}.") from error
    except (OSError, ValueError) as error:
        raise unreadable("weights file", file, error) from error


def unreadable(what: str, file: Path, error: Exception) -> InputError:
    """Return the error about a file that cannot be read; `what` it is."""
    with suppress(OSError):
        if _is_pointer(file):
            return InputError(f"The {what} {file} is a Git LFS pointer, not the weights; run `git lfs pull` there.")
    return InputError(f"The {what} {file} cannot be read ({reason_of(error)}); fetch it again.")


def _is_pointer(file: Path) -> bool:
    """Return whether a file is a pointer of Git LFS; raises OSError."""
    with file.open("rb") as opened:
        return opened.read(8) == b"version "


def gguf_fields(file: Path) -> Mapping[str, Any]:
    """Return the fields of a GGUF file; none of one that cannot be read, or without the package gguf."""
    try:
        return dict(open_gguf(file).fields)
    except (ImportError, OSError, ValueError):
        return {}


def metadata_of(file: Path) -> str:
    """Return what a file of weights says about itself, as text; "" if it cannot be read."""
    if file.suffix == ".gguf":
        return " ".join(
            str(field.contents()) for name, field in gguf_fields(file).items() if name.startswith("general.")
        )
    try:
        return " ".join(map(str, SafetensorsFile.open(file).metadata.values()))
    except (OSError, ValueError):
        return ""


def has_tokenizer(file: Path) -> bool:
    """Return whether the file of a text encoder has its tokenizer inside, as ComfyUI's have; reads the header only."""
    if file.suffix == ".gguf":
        return "tokenizer.ggml.tokens" in gguf_fields(file)
    try:
        return SENTENCEPIECE in SafetensorsFile.open(file).entries
    except (OSError, ValueError):
        return False


def _problem_of(file: Path) -> str:
    """Return the problem of a safetensors file as a predicate, e.g. "is missing"; "" if there is none."""
    try:
        if _is_pointer(file):
            return "is a Git LFS pointer, not the weights (run `git lfs pull` there)"
        found = SafetensorsFile.open(file).entries
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except ValueError as error:
        return f"is cut off or no safetensors file ({reason_of(error)})"
    dtypes = {each.dtype for name, each in found.items() if not name.endswith("position_ids")}
    if not dtypes <= _DTYPES:
        return f"holds weights as {', '.join(sorted(dtypes - _DTYPES))} in place of F8, F16, BF16 or F32"
    return ""


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise an error of a block that writes a model into a folder, such as a full disk, as an `InputError`."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or reason_of(error)
        raise InputError(
            f"The model cannot be written to {folder} ({reason}); make room there, or give another folder."
        ) from error


def pipeline_of(folder: Path, name: str) -> str:
    """Return the class of the pipeline in a folder of the model `name`; raises InputError if none is named."""
    pipeline = read_json(folder, INDEX, name).get("_class_name")
    if not isinstance(pipeline, str):
        raise InputError(f"The model {name} has a model_index.json that names no pipeline (_class_name); {_SAVED}.")
    return pipeline


def read_index(folder: Path, name: str, layout: FolderLayout) -> dict[str, Any]:
    """Read the model_index.json of a folder, with the components beside it that the folder has; may raise InputError.

    These are entered with the class that their configs name.
    """
    index = read_json(folder, INDEX, name)
    for component in layout.beside:
        if (folder / component / "config.json").is_file():
            index[component] = ["diffusers", read_json(folder, f"{component}/config.json", name).get("_class_name")]
    return index


def class_in(index: Mapping[str, Any], component: str) -> str | None:
    """Return the class that model_index.json names for a component; None if it has none."""
    entry = index.get(component)  # [library, class]; null or two nulls for an optional component
    kind = entry[1] if isinstance(entry, list) and len(entry) == 2 else None
    return kind if isinstance(kind, str) else None


def check_folder(
    folder: Path, name: str, layout: FolderLayout, dtype: str | None = None, *, replaced: Collection[str] = ()
) -> None:
    """Raise the first problem that `find_problems` finds as an `InputError`."""
    for problem in find_problems(folder, name, layout, dtype, replaced=replaced):
        raise InputError(problem)


def find_problems(
    folder: Path, name: str, layout: FolderLayout, dtype: str | None = None, *, replaced: Collection[str] = ()
) -> Iterator[str]:
    """Yield a sentence for each problem of a model folder.

    Of the weights, those are checked that are loaded for `dtype`, torch's name of it; None: all weights in the folder.
    The weights of components that are `replaced` by other files are not.
    """
    try:
        index = _check_index(folder, name, layout)
        for component in layout.weighted:
            if class_in(index, component) is not None and component not in replaced:
                precisions = None if dtype is None else WEIGHTS[layout.dtype_of(component, dtype)]
                yield from _problems_of_weights(folder, component, name, precisions)
    except InputError as error:
        yield str(error)


def _check_index(folder: Path, name: str, layout: FolderLayout) -> dict[str, Any]:
    """Check that the index names all components by the right classes and that they exist; return the index."""
    index = read_index(folder, name, layout)
    for component, accepted in layout.components.items():
        kind = class_in(index, component)
        if kind is None and component in layout.optional:
            continue
        whole = f"it must be a whole {layout.pipeline}"
        if kind is None or not (folder / component).is_dir():
            advice = whole if kind is None else _fetch_again(folder, name, whole)
            raise InputError(f"The model {name} has no {component}; {advice}.")
        if kind not in accepted:
            raise InputError(f"The {component} of the model {name} is a {kind}; svdq works with {accepted[0]} only.")
    return index


def _problems_of_weights(folder: Path, component: str, name: str, precisions: Sequence[bool] | None) -> Iterator[str]:
    again, names = _fetch_again(folder, name, "get it again"), _names_in(folder / component)
    there = variants(folder, component)
    kinds = there if precisions is None else [each for each in precisions if each in there][:1]
    if not there:
        others = [each for each in names if each.endswith((".bin", ".safetensors", ".gguf"))]
        found = f"no weights but {min(others)}" if others else "no weights"
        yield (
            f"The {component} of the model {name} has {found}, and svdq reads diffusers' .safetensors, such as "
            f"diffusion_pytorch_model.safetensors; {again}."
        )
    elif not kinds:
        yield (
            f"The {component} of the model {name} has half precision weights only, which suffice for GPUs; to render "
            "on a CPU, fetch the full ones, too (`svdq model pull` with `--variant full`)."
        )
    for kind in kinds:
        files = loaded_files(folder, component, [kind])
        has_index = any(each.endswith(".json") and is_half(each) == kind for each in weight_files(names))
        if not files or (not has_index and "-of-" in files[0].name):
            yield f"The {component} of the model {name} has weights in parts without an index of them; {again}."
        for file in files:
            if problem := _problem_of(file):
                yield f"{file} of the model {name} {problem}; {again}."
