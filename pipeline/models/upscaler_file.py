"""Finds the file of an image upscaler by its path or its name. Does not import torch."""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from svdq.pipeline.command_line import svdq_command
from svdq.pipeline.errors import InputError, how_to_install

FOLDER = "upscale_models"  # of ComfyUI, in its folder `models`
SUFFIX = ".safetensors"
PICKLES = (".pth", ".pt", ".ckpt", ".bin")  # endings of files that may run code when they are loaded


def find_upscaler(name: str, loras: Path | None = None) -> Path:
    """Return the absolute path of an upscaler's file; raises InputError if there is none, or it cannot be used.

    `name` is a path, or the name of a file in ComfyUI's `models/upscale_models`: beside the folder of LoRAs, or in the
    user's home.
    """
    comfyui = [loras.parent / FOLDER] if loras is not None else []
    folders = [Path(), *comfyui, Path(os.path.expanduser("~/ComfyUI/models"), FOLDER)]
    file = _find(Path(name).expanduser(), folders, (SUFFIX,)) or _find(Path(name).expanduser(), folders, PICKLES)
    if file is None:
        raise InputError(
            f"There is no upscaler {name!r}, neither as a file nor in {' or '.join(map(str, folders[1:]))}; set "
            f"SVDQ_UPSCALER to a {SUFFIX} file, such as a RealESRGAN model."
        )
    if file.suffix != SUFFIX:
        convert = svdq_command("model convert", file, file.with_suffix(SUFFIX))
        raise InputError(
            f"The upscaler {str(file)!r} may run code when it is loaded, so workers do not load it; write its weights "
            f"alone with `{convert}`, and set SVDQ_UPSCALER to that."
        )
    if importlib.util.find_spec("spandrel") is None:
        raise InputError(f"Upscaling needs spandrel; to install it, {how_to_install('upscale')}.")
    return file.absolute()


def _find(path: Path, folders: Sequence[Path], suffixes: Sequence[str]) -> Path | None:
    names = [path.name] if path.suffix in suffixes else [path.name + suffix for suffix in suffixes]
    found = (folder / path.parent / name for folder in folders for name in names)
    return next((file for file in found if file.is_file()), None)
