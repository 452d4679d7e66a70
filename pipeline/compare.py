"""Compare this pipeline with diffusers' own: `python -m svdq.pipeline.compare [--model DIR] [--image PHOTO]`.

Both get the same prepared photo, the same arguments and a CPU generator with the same seed, and run one thread a
process, since float32 sums on a CPU depend on the number of threads. Prints the largest difference of any pixel, from 0
to 255, and exits with 0 when it is within `--tolerance`. Several videos are in flight at once, with different seeds.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from svdq.pipeline.device import choose_device
from svdq.pipeline.errors import InputError, SvdqError
from svdq.pipeline.local import exit_when_lost, spawn_ranks
from svdq.pipeline.media.image import prepare_photo
from svdq.pipeline.models.base import Frames, Role
from svdq.pipeline.models.loader import dtype_for, open_model
from svdq.pipeline.models.options import DEFAULTS, ComputeOptions, dtype_of
from svdq.pipeline.models.svd.parameters import SvdParameters
from svdq.pipeline.protocols import Report, Request
from svdq.pipeline.sample import Sample
from svdq.pipeline.topology import Links, Topology, build_stage
from svdq.pipeline.trace import Tracer
from svdq.pipeline.transport.message import sample_body


class QuietMonitor:
    """A monitor that does nothing."""

    def step(self, sample: Sample, index: int) -> None:
        """Do nothing."""

    def warm_up(self, sample: Sample) -> None:
        """Do nothing."""

    def idle(self) -> None:
        """Do nothing."""

    def canceled(self, job_id: str) -> bool:
        """Nothing is canceled."""
        return False


class _ListSource:
    """A source with a fixed list of requests; raises the failure of a sample."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = list(requests)

    def take(self) -> Request | None:
        return self._requests.pop(0) if self._requests else None

    def take_if_ready(self) -> Request | None:
        return self.take()

    def prefetch_next(self) -> None:
        """Everything is ready."""

    def ended(self, report: Report) -> None:
        if report.failure is not None:
            raise InputError(f"{report.job_id} failed: {report.failure}")


class _FolderSink:
    """A sink that stores frames as <job id>.npy."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def deliver(self, sample: Sample, frames: Frames, report: Callable[[Report], None]) -> None:
        np.save(self._folder / f"{sample.job_id}.npy", frames)
        report(Report(job_id=sample.job_id, body=sample_body(sample), result={}))

    def release(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def render(
    model: str,
    image: Image.Image,
    videos: Sequence[SvdParameters],
    *,
    num_ranks: int,
    device: str = "cpu",
    options: ComputeOptions = DEFAULTS,
) -> list[Frames]:
    """Render videos of one prepared photo with this pipeline in parallel; return the frames (F, H, W, 3) of each."""
    assert all((video.width, video.height) == image.size for video in videos), "the photo is prepared for another size"
    with tempfile.TemporaryDirectory(prefix="svdq-compare-") as folder:
        image.save(Path(folder, "photo.png"))
        documents = [parameters.model_dump(mode="json") for parameters in videos]
        spawn_ranks(num_ranks, _rank_main, model, folder, json.dumps(documents), device, options, device=device)
        return [np.load(Path(folder, f"video-{number}.npy")) for number in range(len(videos))]


def _rank_main(
    topology: Topology, links: Links, model_name: str, folder: str, documents: str, wanted: str, options: ComputeOptions
) -> None:
    device = choose_device(wanted, topology.local_rank)
    role = Role.of_rank(topology.rank)
    model = open_model(model_name, role, device, dtype_of(options, device), options)
    image = Image.open(Path(folder, "photo.png"))
    requests = [
        Request(job_id=f"video-{number}", parameters=SvdParameters.model_validate(document), photo=image)
        for number, document in enumerate(json.loads(documents))
    ]
    build_stage(
        topology=topology,
        links=links,
        model=model,
        monitor=QuietMonitor(),
        tracer=Tracer(topology.rank, on=False),
        source=_ListSource(requests) if topology.first else None,
        sink=_FolderSink(Path(folder)) if topology.last else None,
        device=device,
        on_lost=exit_when_lost,
    ).run()


def render_with_diffusers(
    model: str, image: Image.Image, parameters: SvdParameters, *, device: str = "cpu"
) -> NDArray[np.uint8]:
    """Render one video with diffusers' StableVideoDiffusionPipeline; return frames (F, H, W, 3)."""
    from svdq.pipeline.models.components import be_quiet

    be_quiet()  # before the import, since transformers warns while it is imported
    from diffusers import StableVideoDiffusionPipeline

    torch.set_num_threads(1)
    pipeline = StableVideoDiffusionPipeline.from_pretrained(model, dtype=dtype_for(torch.device(device)))
    pipeline = pipeline.to(device)
    pipeline.set_progress_bar_config(disable=True)
    frames = call_diffusers(pipeline, image, parameters)[0]
    return np.stack([np.asarray(frame) for frame in frames])


def call_diffusers(pipeline: Any, image: Image.Image, parameters: SvdParameters, **more: Any) -> Any:
    """Call a StableVideoDiffusionPipeline as its users do; return the frames of each video.

    Args:
        pipeline: the pipeline.
        image: a photo of the video's size.
        parameters: of the video.
        more: other arguments of the pipeline, which override those from the parameters.
    """
    arguments = {
        "height": parameters.height,
        "width": parameters.width,
        "num_frames": parameters.num_frames,
        "num_inference_steps": parameters.steps,
        "min_guidance_scale": parameters.min_guidance_scale,
        "max_guidance_scale": parameters.max_guidance_scale,
        "fps": parameters.fps,
        "motion_bucket_id": parameters.motion_bucket_id,
        "noise_aug_strength": parameters.noise_aug_strength,
        "decode_chunk_size": parameters.decode_chunk_size,
        "generator": torch.Generator("cpu").manual_seed(parameters.seed),
    }
    return pipeline(image, **(arguments | more)).frames


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print and return an exit code: 0 equal, 1 different, 2 wrong input."""
    options = _parse(arguments)
    if options.model is not None:
        return _compare(options)
    from svdq.pipeline.models.svd.tiny import write_tiny_model

    with tempfile.TemporaryDirectory(prefix="svdq-compare-") as folder:
        options.model = Path(folder)
        write_tiny_model(options.model)
        return _compare(options)


def _compare(options: argparse.Namespace) -> int:
    device = "cuda" if options.device == "auto" and torch.cuda.is_available() else options.device
    device = "cpu" if device == "auto" else device
    width, _, height = options.size.partition("x")
    try:
        photo = options.image.read_bytes() if options.image else Image.effect_mandelbrot((256, 256), (-2, -1, 1, 1), 90)
        image = prepare_photo(photo, int(width), int(height), options.fit, max_pixels=10**9)
        videos = [
            SvdParameters(
                frames=options.frames,
                steps=options.steps,
                width=int(width),
                height=int(height),
                fps=options.fps,
                motion_bucket_id=options.motion_bucket_id,
                noise_aug_strength=options.noise_aug_strength,
                min_guidance_scale=options.min_guidance_scale,
                max_guidance_scale=options.max_guidance_scale,
                decode_chunk_size=options.decode_chunk_size,
                seed=options.seed + number,
            )
            for number in range(options.videos)
        ]
        ours = render(str(options.model), image, videos, num_ranks=options.ranks, device=device)
    except (SvdqError, OSError, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    largest = 0
    for parameters, frames in zip(videos, ours, strict=True):
        if options.alone:
            [theirs] = render(str(options.model), image, [parameters], num_ranks=1, device=device)
        else:
            theirs = render_with_diffusers(str(options.model), image, parameters, device=device)
        difference = int(np.abs(frames.astype(np.int16) - theirs.astype(np.int16)).max())
        largest = max(largest, difference)
        print(  # noqa: T201
            f"seed {parameters.seed}: {len(frames)} frames of {frames.shape[2]}x{frames.shape[1]}, "
            f"largest pixel difference {difference}"
        )
    print(f"largest pixel difference over {len(videos)} videos on {options.ranks} ranks ({device}): {largest}")  # noqa: T201
    return 0 if largest <= options.tolerance else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    defaults = SvdParameters(seed=0)
    parser = argparse.ArgumentParser(prog="python -m svdq.pipeline.compare", description=__doc__)
    parser.add_argument("--model", type=Path, help="folder of a StableVideoDiffusionPipeline [default: the tiny one]")
    parser.add_argument("--image", type=Path, help="a photo [default: a fractal]")
    parser.add_argument("--ranks", type=int, default=7)
    parser.add_argument("--alone", action="store_true", help="compare with one rank in place of diffusers")
    parser.add_argument("--videos", type=int, default=2, help="videos in flight at once, with seeds from --seed on")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--tolerance", type=int, default=0, help="largest pixel difference that counts as equal")
    parser.add_argument("--size", default="128x128", help="WIDTHxHEIGHT")
    parser.add_argument("--frames", type=int, default=14)
    parser.add_argument("--fit", choices=["crop", "pad", "stretch"], default="crop")
    parser.add_argument("--decode-chunk-size", type=int)
    for name in ("steps", "fps", "motion_bucket_id", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    for name in ("noise_aug_strength", "min_guidance_scale", "max_guidance_scale"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(defaults, name))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
