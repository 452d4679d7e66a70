"""Upscales the frames of a video by an image model that spandrel reads, one frame after the other."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from svdq.pipeline.errors import InputError, SampleError, how_to_install, reason_of
from svdq.pipeline.models.compute.failures import in_a_sentence, is_out_of_memory, release_memory
from svdq.pipeline.models.lora_folder import digest_of
from svdq.pipeline.models.video_model import all_finite

OVERLAP = 32  # pixels around a tile that are computed too, and then cut off
SMALLEST_TILE = 64  # pixels of the side of the smallest tile that is tried

logger = logging.getLogger(__name__)


class Upscaler:
    """An image model on the device of a rank."""

    def __init__(self, file: Path, device: torch.device) -> None:
        """Load a .safetensors file, in half precision on GPUs; raises InputError if it is no image upscaler."""
        assert file.suffix == ".safetensors", "other files may be pickles, which run code"
        self.name = file.stem
        self._device = device
        with in_a_sentence(f"The upscaler {file}", device):
            model = _load(file)
            self._dtype = torch.float32
            if device.type != "cpu" and (model.supports_half or model.supports_bfloat16):
                self._dtype = torch.float16 if model.supports_half else torch.bfloat16
            self._model: Any = model.eval().to(device, self._dtype)
            self._digest = digest_of(file)
        #: The largest side of a tile to try, by the size of frames that ran out of memory.
        self._largest: dict[tuple[int, ...], int] = {}

    @torch.inference_mode()
    def upscale(
        self, frames: Tensor, size: tuple[int, int], is_canceled: Callable[[], bool] = lambda: False
    ) -> tuple[Tensor, dict[str, Any]] | None:
        """Upscale frames (F, H, W, 3), uint8, to a width and height; None if `is_canceled` says so between two frames.

        The model sees a whole frame at a time or, where memory runs out, smaller and smaller tiles. What its own factor
        does not give is left to a last resize (Lanczos), which crops frames of another shape in the middle.

        Returns:
            Frames (F, height, width, 3) in host memory, uint8; and for the record the `model`, its `digest`, and the
            side of a `tile` in pixels if there were any. Raises SampleError if the model gives NaN or infinity.
        """
        shape = tuple(frames.shape[1:3])
        while True:
            tile = self._largest.get(shape, max(shape))
            try:
                upscaled = self._in_tiles(frames, size, tile, is_canceled)
                break
            except Exception as error:
                if not is_out_of_memory(error) or tile <= SMALLEST_TILE:
                    raise
                self._largest[shape] = max((tile + 1) // 2, SMALLEST_TILE)
                logger.warning("Out of memory in the upscaling; trying again in tiles of %d.", self._largest[shape])
                release_memory(error)
        record = {"model": self.name, "digest": self._digest} | ({"tile": tile} if tile < max(shape) else {})
        return None if upscaled is None else (upscaled, record)

    def _in_tiles(
        self, frames: Tensor, size: tuple[int, int], tile: int, is_canceled: Callable[[], bool]
    ) -> Tensor | None:
        upscaled = torch.empty((len(frames), size[1], size[0], 3), dtype=torch.uint8)
        # The thread resizes a frame while the model computes the next one.
        with ThreadPoolExecutor(1) as thread:
            resized: Future[None] | None = None
            for frame, place in zip(frames, upscaled.numpy(), strict=True):
                if is_canceled():
                    return None
                pixels = self._frame(frame.to(self._device), tile)
                if resized is not None:
                    resized.result()
                resized = thread.submit(_resize, pixels.numpy(), place)
            if resized is not None:
                resized.result()
        return upscaled

    def _frame(self, frame: Tensor, tile: int) -> Tensor:
        """Upscale a frame (H, W, 3) by the model's factor, on the host."""
        factor = self._model.scale
        height, width, _ = frame.shape
        pixels = frame.permute(2, 0, 1)[None].to(self._dtype) / 255  # (1, 3, H, W), 0 to 1
        result = torch.empty((height * factor, width * factor, 3), dtype=torch.uint8)
        for top, left in product(range(0, height, tile), range(0, width, tile)):
            bottom, right = min(top + tile, height), min(left + tile, width)
            above, before = max(top - OVERLAP, 0), max(left - OVERLAP, 0)
            part = self._model(pixels[:, :, above : bottom + OVERLAP, before : right + OVERLAP])[0].float()
            part = part[:, (top - above) * factor :, (left - before) * factor :]
            part = part[:, : (bottom - top) * factor, : (right - left) * factor]
            if not all_finite([part]):
                raise SampleError(f"The upscaler {self.name} gives NaN or infinity; leave upscale out, or use another.")
            place = result[top * factor : bottom * factor, left * factor : right * factor]
            place.copy_((part * 255).round_().to(torch.uint8).permute(1, 2, 0))
        return result


def _load(file: Path) -> Any:
    try:
        import spandrel
    except (ImportError, RuntimeError) as error:  # the latter where torchvision was built for another torch
        raise InputError(
            f"Upscaling needs spandrel, and a torchvision that fits torch ({reason_of(error)}); to install them, "
            f"{how_to_install('upscale')}, from the same index as torch."
        ) from error
    try:
        model = spandrel.ModelLoader().load_from_file(file)
    except spandrel.UnsupportedModelError as error:
        raise InputError(
            f"The file {str(file)!r} is no upscaler that spandrel knows; set SVDQ_UPSCALER to another, such as a "
            "RealESRGAN model."
        ) from error
    if not isinstance(model, spandrel.ImageModelDescriptor) or (model.input_channels, model.output_channels) != (3, 3):
        raise InputError(
            f"The file {str(file)!r} is a {model.architecture.name} for {model.purpose}, which does not upscale "
            "colored images; set SVDQ_UPSCALER to another, such as a RealESRGAN model."
        )
    return model


def _resize(pixels: NDArray[np.uint8], place: NDArray[np.uint8]) -> None:
    height, width, _ = place.shape
    if pixels.shape == place.shape:
        place[:] = pixels
    else:
        place[:] = np.asarray(ImageOps.fit(Image.fromarray(pixels), (width, height), Image.Resampling.LANCZOS))
