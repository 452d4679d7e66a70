"""Our pipeline against diffusers' on one device, in each type: `python -m svdq.pipeline.bench.precision_parity`.

Compares the frames of a video of one rank with those of diffusers' `__call__`, those of one rank with those of several,
which may share a GPU, and the time of a step in both loops, in turns in one process. Exits with 1 when the number of
ranks changes a pixel; what half precision changes against diffusers is told and judged by nobody here.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.multiprocessing.spawn import ProcessException

from svdq.pipeline import photo
from svdq.pipeline.compare import call_diffusers, render
from svdq.pipeline.device import choose_device
from svdq.pipeline.errors import SvdqError
from svdq.pipeline.models.compute import DTYPES, ComputeOptions
from svdq.pipeline.models.model import Frames, Part
from svdq.pipeline.models.svd import SvdModel
from svdq.pipeline.models.svd_folder import SvdFolder
from svdq.pipeline.parameters import VideoParameters


class Pair:
    """The same model twice: as a rank alone opens it, and as diffusers has it."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype) -> None:
        parts = Part.of_rank(0, 1)
        self._device = device
        self._ours = SvdModel(name, parts, device, dtype)
        self._theirs = SvdFolder.find(name, dtype).load_pipeline(parts, dtype, device)
        self._theirs.set_progress_bar_config(disable=True)

    def difference(self, image: Image.Image, video: VideoParameters) -> int:
        """Make a video with both and give the largest difference of a pixel, of 255."""
        tensors = self._ours.encode(image, video)
        denoiser, latents = self._ours.denoiser(tensors, video), tensors["latents"]
        for index in range(video.steps):
            latents = denoiser.step(latents, index)
        ours = self._ours.decode({**tensors, "latents": latents}, video, video.num_frames)
        theirs = call_diffusers(self._theirs, image, video)[0]
        return largest_difference(ours, np.stack([np.asarray(frame) for frame in theirs]))

    def steps_s(self, image: Image.Image, video: VideoParameters, pairs: int) -> tuple[list[float], list[float]]:
        """Give seconds of a step in diffusers' loop and in ours, of as many videos, in turns; the first is left out."""
        tensors = self._ours.encode(image, video)
        both = [(self._their_step_s(image, video), self._our_step_s(tensors, video)) for _ in range(pairs + 1)]
        return [theirs for theirs, _ in both[1:]], [ours for _, ours in both[1:]]

    def _their_step_s(self, image: Image.Image, video: VideoParameters) -> float:
        marks = []

        def after_step(_pipeline: Any, index: int, *_more: Any) -> dict[str, Any]:
            if index in (0, video.steps - 1):
                marks.append(self._now_s())
            return {}

        call_diffusers(self._theirs, image, video, output_type="latent", callback_on_step_end=after_step)
        return (marks[1] - marks[0]) / (video.steps - 1)

    def _our_step_s(self, tensors: dict[str, torch.Tensor], video: VideoParameters) -> float:
        denoiser = self._ours.denoiser(tensors, video)
        latents = denoiser.step(tensors["latents"], 0)
        started_s = self._now_s()
        for index in range(1, video.steps):
            latents = denoiser.step(latents, index)
        return (self._now_s() - started_s) / (video.steps - 1)

    def _now_s(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def largest_difference(ours: Frames, theirs: Frames) -> int:
    """Give the largest difference of a pixel, of 255."""
    return int(np.abs(ours.astype(np.int16) - theirs.astype(np.int16)).max())


def measure(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Do all comparisons, and print and keep each as it is found: the next one may want more memory than there is.

    Args:
        options: those of the command.
        found: what is kept: `differences`, `step_ms`, `ranks` and `num_ranks` by dtype.

    Raises:
        SvdqError: the model or the photo cannot be used.
    """
    device = choose_device(options.device, 0)
    small = VideoParameters.of_shape(options.shape).model_copy(update={"steps": options.steps, "seed": 1})
    large = VideoParameters.of_shape(options.timed_shape).model_copy(update={"steps": options.steps})
    found |= {"differences": {}, "step_ms": {}, "ranks": {}, "num_ranks": {}}
    for name in options.dtype or ["fp32" if device.type == "cpu" else "fp16"]:
        pair = Pair(options.model, device, getattr(torch, DTYPES[name]))
        found["differences"][name] = pair.difference(_photo(options.image, small), small)
        _say(f"{name}, {options.shape}: largest pixel difference to diffusers {found['differences'][name]} of 255")
        theirs_s, ours_s = pair.steps_s(_photo(options.image, large), large, options.pairs)
        theirs, ours = (1e3 * statistics.median(times_s) for times_s in (theirs_s, ours_s))
        found["step_ms"][name] = {"diffusers": theirs, "svdq": ours}
        _say(
            f"{name}, {options.timed_shape}: a step takes {theirs:.4g} ms in diffusers' loop, {ours:.4g} ms in svdq's, "
            f"ratio {ours / theirs:.3f} (medians of {options.pairs} videos of {options.steps} steps)"
        )
        del pair  # before the ranks need its memory
        if device.type == "cuda":
            torch.cuda.empty_cache()
        found["ranks"][name], num_ranks = _ranks_differ_by(name, small, options)
        found["num_ranks"][name] = num_ranks
        _say(
            f"{name}, {options.shape}: largest pixel difference between one rank and {num_ranks} "
            f"{found['ranks'][name]} of 255"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print and return an exit code: 0 if the number of ranks changes nothing, 1 if it does."""
    parser = argparse.ArgumentParser(prog="python -m svdq.pipeline.bench.precision_parity", description=__doc__)
    parser.add_argument("--model", required=True, help="folder or hub id of a StableVideoDiffusionPipeline")
    parser.add_argument("--image", type=Path, required=True, help="a photo")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=list(DTYPES), action="append", help="repeatable; default: a worker's")
    parser.add_argument("--shape", default="256x256x14", help="WIDTHxHEIGHTxFRAMES whose pixels are compared")
    parser.add_argument("--timed-shape", default="1024x576x25", help="WIDTHxHEIGHTxFRAMES whose steps are timed")
    parser.add_argument("--steps", type=int, default=10, help="of all videos, 2 or more")
    parser.add_argument("--pairs", type=int, default=3, help="timed videos of each loop")
    parser.add_argument("--ranks", type=int, default=7, help="compared with one rank")
    parser.add_argument("--json", type=Path, help="write the figures")
    options = parser.parse_args(arguments)
    if options.steps < 2:
        parser.error(f"--steps {options.steps} is too few: the first is not timed, so give 2 or more")
    found: dict[str, Any] = {}
    try:
        measure(options, found)
    except (SvdqError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    finally:
        if options.json is not None and found:
            options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 1 if any(found["ranks"].values()) else 0


def _ranks_differ_by(dtype: str, video: VideoParameters, options: argparse.Namespace) -> tuple[int, int]:
    """Make two videos on one rank and on several; give the largest difference of a pixel, and how many ranks fitted."""
    videos = [video, video.model_copy(update={"seed": 2})]

    def rendered(num_ranks: int) -> list[Frames]:
        return render(
            options.model,
            _photo(options.image, video),
            videos,
            num_ranks=num_ranks,
            device=options.device,
            options=ComputeOptions(dtype=dtype),
        )

    alone, num_ranks = rendered(1), options.ranks
    while True:
        try:
            shared = rendered(num_ranks)
            break
        except (SvdqError, ProcessException) as error:
            if num_ranks <= 2:
                raise
            _say(
                f"{num_ranks} ranks cannot be run here ({str(error).strip().splitlines()[-1][:200]}); half as many are."
            )
            num_ranks = max(2, num_ranks // 2)
    return max(largest_difference(*frames) for frames in zip(alone, shared, strict=True)), num_ranks


def _photo(path: Path, video: VideoParameters) -> Image.Image:
    return photo.prepare(photo.load(path.read_bytes(), 10**9), video.width, video.height, "crop")


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
