"""Reads the files of a model folder without torch: JSON, the names of weights files, and the shapes of weights.

Where a model is written, it explains why that fails, and marks a folder with random weights.
"""

import hashlib
import json
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from svdq.pipeline.errors import InputError, reason_of
from svdq.pipeline.installed import how_to_install

#: Supported types of weights, as named by safetensors.
_DTYPES = {"F16", "BF16", "F32"}
#: Names of weights files, whole or in parts, and of the indexes of parts.
_WEIGHTS_FILE = re.compile(
    r"(diffusion_pytorch_)?model(\.fp16)?(-\d{5}-of-\d{5})?(\.fp16)?\.safetensors(\.index(\.fp16)?\.json)?"
)
#: Names of the dtype options, and torch's name of each.
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
#: Weights that suit each of torch's dtypes, the best first: True for half precision, False for full. bfloat16 has the
#: range of the full weights; float32 must equal diffusers bit by bit, so nothing may be rounded.
WEIGHTS = {"float32": (False,), "float16": (True, False), "bfloat16": (False, True)}
#: Samples of a file for its fingerprint, and the bytes of each.
NUM_SAMPLES, SAMPLE_BYTES = 64, 4096
#: Advice about a folder without readable configs.
SAVED = "give a folder that diffusers' save_pretrained has written"

#: The shape of each weight, by name.
Shapes = dict[str, list[int]]


def pull_command(folder: Path, name: str) -> str:
    """Return the command that fetches a model of the hub; "" if its name is that of the folder."""
    # Not for a folder whose name has the form of a hub id.
    return "" if folder.absolute() == Path(name).expanduser().absolute() else f"svdq model pull {name}"


def fetch_again(folder: Path, name: str, otherwise: str) -> str:
    """Return how to complete a model in the hub's cache, as a clause; for any other folder `otherwise`."""
    pull = pull_command(folder, name)
    return f"fetch it again with `{pull}`" if pull else otherwise


def read_json(folder: Path, file: str, name: str) -> dict[str, Any]:
    """Read one JSON file of a model folder, such as `unet/config.json`.

    Raises:
        InputError: the file cannot be read.
    """
    path = folder / file
    try:
        if path.exists() and not path.is_file():
            raise OSError(f"{path} is not a regular file")  # reading a pipe would block
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"The model {name} has no readable {file}; {fetch_again(folder, name, SAVED)}.") from error
    if not isinstance(content, dict):
        raise InputError(f"The {file} of the model {name} is not a JSON object.")
    return content


def names_in(folder: Path) -> list[str]:
    """Return the names of the files in a folder; none if it cannot be read."""
    try:
        # A dangling link is listed, so that it is reported as missing.
        return [path.name for path in folder.iterdir()]
    except OSError:
        return []


def is_half(file: str) -> bool:
    """Return whether a weights file, or an index of several, is of the fp16 variant by its name."""
    return ".fp16" in file.rpartition("/")[2]


def weight_files(names: list[str]) -> list[str]:
    """Return the weights files and their indexes among the names of a component's files."""
    return sorted(name for name in names if _WEIGHTS_FILE.fullmatch(name))


def variants(folder: Path, component: str) -> set[bool]:
    """Return whether a component has weights in half precision (True) and full ones (False)."""
    return {is_half(file) for file in weight_files(names_in(folder / component))}


def loaded_files(folder: Path, component: str, precisions: Sequence[bool]) -> list[Path]:
    """Return a component's weights files of the first of some precisions that it has: half (True) or full (False)."""
    files = [folder / component / name for name in weight_files(names_in(folder / component))]
    files = [file for file in files if file.suffix != ".json"]
    found = ([file for file in files if is_half(file.name) == precision] for precision in precisions)
    return next(filter(None, found), [])


def fingerprint(folder: Path, files: Iterable[Path]) -> str:
    """Return a hash of the names, sizes and samples of files, which is the same on all machines.

    Reading gigabytes would take minutes, and other weights of a model differ nearly everywhere.
    """
    digest = hashlib.sha256()
    for file in filter(Path.is_file, files):  # opening a pipe would block
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder)} {size} ".encode())
        with file.open("rb", buffering=0) as opened:
            for position in range(0, size, max(SAMPLE_BYTES, size // NUM_SAMPLES)):
                opened.seek(position)
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def stored_shapes(files: Iterable[Path]) -> Shapes:
    """Return the shapes of the weights in files; broken files are left out."""
    found = map(read_shapes, files)
    return {name: shape for shapes in found if isinstance(shapes, dict) for name, shape in shapes.items()}


def read_shapes(file: Path) -> Shapes | str:
    """Read the shapes of the weights in a safetensors file, or return its problem as a predicate, e.g. "is missing".

    Raises:
        InputError: the package safetensors is not installed.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise InputError(f"To check weights needs the package safetensors; {how_to_install('worker')}.") from error
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):
            return "is not a regular file"  # opening a pipe would block
        with file.open("rb") as opened:
            if opened.read(8) == b"version ":
                return "is a Git LFS pointer, not the weights"
        with safe_open(file, framework="numpy") as weights:
            tensors = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118 - not a mapping
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except SafetensorError as error:
        if "incomplete" in str(error).lower():
            return f"is cut off or damaged: its length of {found.st_size:,} bytes is not what its header says"
        return "is no safetensors file: its header is corrupt"
    if not tensors:
        return "holds no weights"
    dtypes = {tensor.get_dtype() for name, tensor in tensors.items() if not name.endswith("position_ids")}
    if not dtypes <= _DTYPES:
        return f"holds weights as {', '.join(sorted(dtypes - _DTYPES))}"
    return {name: list(tensor.get_shape()) for name, tensor in tensors.items()}


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raise an error of a block that writes a model into a folder, such as a full disk, as an `InputError`.

    Raises:
        InputError: why it cannot be written.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or reason_of(error)
        raise InputError(
            f"The model cannot be written to {folder} ({reason}); make room there, or give another folder."
        ) from error


#: The file that marks folders with random weights that svdq has written.
UNTRAINED = "UNTRAINED.md"
_TEXT = """# An untrained model

`svdq model tiny` made this folder. It has the classes and settings of {title}, but its weights are random: what it
makes is noise. Use it to test a pipeline, and to compare one with diffusers.
"""


def is_untrained(folder: Path) -> bool:
    """Return whether a folder is marked as having random weights."""
    return (folder / UNTRAINED).is_file()


def claim(folder: Path, title: str) -> None:
    """Create and mark a folder for an untrained model of a family; one that svdq has written may be written again.

    Raises:
        InputError: the folder has other content, or cannot be written.
    """
    with writing(folder):
        if folder.exists() and any(folder.iterdir()) and not is_untrained(folder):
            raise InputError(f"The folder {folder} is not empty; give a new or empty one for the tiny model.")
        folder.mkdir(parents=True, exist_ok=True)
        # The marker is written first, so that a partial folder can be overwritten.
        (folder / UNTRAINED).write_text(_TEXT.format(title=title), encoding="utf-8")


def name_classes(folder: Path, **classes: object) -> None:
    """Name classes in the index of a model as published models do, whatever the libraries call them here.

    Components that the model lacks keep no class.
    """
    path = folder / "model_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    index |= {name: named for name, named in classes.items() if index[name] != [None, None]}
    path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
