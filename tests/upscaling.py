"""A tiny upscaler of RealESRGAN's architecture, and what spandrel gives for frames without svdq."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

#: What spandrel imports of torchvision, for architectures that no test has: its wheels do not load beside all of torch.
_STUB = "InterpolationMode = rotate = normalize = None\n"
#: transformers, which is imported before spandrel, would use all of a torchvision that it finds.
_ONLY_FOR_SPANDREL = """
import importlib.machinery, sys

class Finder:
    def find_spec(name, path=None, target=None):
        if name == "torchvision" and "spandrel" in sys.modules:
            return importlib.machinery.PathFinder.find_spec(name, [{folder!r}])

sys.meta_path.append(Finder)
"""


def write_torchvision(folder: Path) -> Path:
    """Write a stand-in for torchvision; return the folder whose `sitecustomize` has spandrel import it."""
    package = folder / "stub" / "torchvision" / "transforms"
    package.mkdir(parents=True)
    for file in (package.parent / "__init__.py", package / "__init__.py"):
        file.touch()
    (package / "functional.py").write_text(_STUB)
    (folder / "sitecustomize.py").write_text(_ONLY_FOR_SPANDREL.format(folder=str(folder / "stub")))
    return folder


@contextmanager
def torchvision(folder: Path) -> Iterator[None]:
    """Import spandrel with a stand-in for torchvision, which other libraries do not find afterwards."""
    sys.path.insert(0, str(write_torchvision(folder) / "stub"))
    try:
        importlib.import_module("spandrel")
        yield
    finally:
        sys.path.remove(str(folder / "stub"))
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]


def write_upscaler(file: Path, scale: int = 2) -> Path:
    """Write an untrained RealESRGAN of one block, by spandrel's class."""
    architecture = importlib.import_module("spandrel.architectures.ESRGAN.__arch.RRDB")
    torch.manual_seed(0)
    network = architecture.RRDBNet(in_nc=3, out_nc=3, num_filters=8, num_blocks=1, scale=scale)
    weights = {name: 2 * weight for name, weight in network.state_dict().items()}
    weights[max(name for name in weights if name.endswith("bias"))] += 0.4  # gray, and not black
    if file.suffix == ".pth":
        torch.save({"params_ema": weights}, file)
    else:
        save_file(weights, file)
    return file


def by_spandrel(file: Path, frames: np.ndarray) -> np.ndarray:
    """Upscale frames (F, H, W, 3) by the model alone, each whole."""
    spandrel: Any = pytest.importorskip("spandrel")
    model = spandrel.ModelLoader().load_from_file(file).eval()
    with torch.inference_mode():
        images = [model(torch.from_numpy(frame).permute(2, 0, 1)[None].float() / 255)[0] for frame in frames]
        return np.stack([(image * 255).round().to(torch.uint8).permute(1, 2, 0).numpy() for image in images])
