"""Compare this pipeline with diffusers' own: `python -m gpu_checks.compare [--family NAME | --model DIR]` in deploy.

Both get the same prepared photo, the same arguments and a CPU generator with the same seed, and run one thread a
process, since float32 sums on a CPU depend on the number of threads. Prints the largest difference of any pixel, from 0
to 255, and exits with 0 when it is within `--tolerance`. Several videos are in flight at once, with different seeds.
With `--bound`, each rank loads only the expert of its steps, as on GPUs without room for both. With `--rounds`, one
rank holds one expert at a time, and the others are in host memory meanwhile.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from pydantic import ValidationError

from gpu_checks.references import call_diffusers, open_diffusers
from svdq.pipeline.errors import InputError, SvdqError
from svdq.pipeline.loop.protocols import Report, Request, Sink, Source, Surroundings
from svdq.pipeline.loop.sample import Sample
from svdq.pipeline.loop.stage import Stage
from svdq.pipeline.media.image import prepare_photo
from svdq.pipeline.models.compute_options import DEFAULTS, ComputeOptions
from svdq.pipeline.models.families import DEFAULT_FAMILY, FAMILIES, PARAMETERS, family_for, family_named
from svdq.pipeline.models.family import Family, imported
from svdq.pipeline.models.loader import dtype_for, open_model
from svdq.pipeline.models.model_names import resolve
from svdq.pipeline.models.video_model import Frames, Role, VideoModel
from svdq.pipeline.planning.binding import Components, bind
from svdq.pipeline.transport.topology import Links, Topology
from svdq.pipeline.video_parameters import VideoParameters
from svdq.worker.bench.loop_runs import exit_when_lost, spawn_ranks
from svdq.worker.device import choose_device

#: The parameters of all families that are options of their own.
_PARAMETERS = dict.fromkeys(
    name
    for family in PARAMETERS.values()
    for name in family.model_fields
    if name not in ("family", "width", "height", "seed", "last_image")
)


class _ListSource(Source):
    """A source with a fixed list of requests; raises the failure of a sample."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = list(requests)

    def take(self) -> Request | None:
        return self._requests.pop(0) if self._requests else None

    def ended(self, report: Report) -> None:
        if report.failure is not None:
            raise InputError(f"{report.job_id} failed: {report.failure}")


class _FolderSink(Sink):
    """A sink that stores frames as <job id>.npy."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def deliver(self, sample: Sample, frames: Frames, report: Callable[[Report], None]) -> None:
        np.save(self._folder / f"{sample.job_id}.npy", frames)
        report(Report.of(sample))


def render(
    model: str,
    image: Image.Image,
    videos: Sequence[VideoParameters],
    *,
    num_ranks: int,
    device: str = "cpu",
    options: ComputeOptions = DEFAULTS,
    components: Sequence[Components] = (),
    in_rounds: bool = False,
    last_photo: Image.Image | None = None,
) -> list[Frames]:
    """Render videos of one prepared photo with this pipeline in parallel.

    The photo has the size of all videos, and these have the model's defaults filled in. `components` are the denoising
    components of each rank; none: all ranks have all. `in_rounds`: the only rank holds one at a time. `last_photo` is
    the last frame of videos with a last image.

    Returns:
        The frames (F, H, W, 3) of each.
    """
    assert all((video.width, video.height) == image.size for video in videos), "the photo is prepared for another size"
    with tempfile.TemporaryDirectory(prefix="svdq-compare-") as folder:
        requests = [
            Request(
                job_id=f"video-{number}",
                parameters=video,
                photo=image,
                last_photo=last_photo if getattr(video, "last_image", None) else None,
            )
            for number, video in enumerate(videos)
        ]
        roles = [
            replace(
                Role.of_rank(rank),
                components=components[rank] if components else None,
                in_rounds=in_rounds,
                host_bytes=10**12 * in_rounds,
            )
            for rank in range(num_ranks)
        ]
        spawn_ranks(num_ranks, _rank_main, model, Path(folder), requests, device, options, roles, device=device)
        return [np.load(Path(folder, f"video-{number}.npy")) for number in range(len(videos))]


def _rank_main(
    topology: Topology,
    links: Links,
    model_name: str,
    folder: Path,
    requests: Sequence[Request],
    wanted: str,
    options: ComputeOptions,
    roles: Sequence[Role],
) -> None:
    device = choose_device(wanted, topology.rank)
    resolved = resolve(model_name)
    components = [role.components for role in roles]
    model = open_model(resolved, roles[topology.rank], device, dtype_for(resolved, device, options), options)
    run_stage(topology, links, model, requests, _FolderSink(folder), device=device, components=components)


def run_stage(
    topology: Topology, links: Links, model: VideoModel, requests: Sequence[Request], sink: Sink, **options: Any
) -> None:
    """Run one rank until all requests have ended; `options` are for `Stage`."""
    surroundings = Surroundings(
        on_lost=exit_when_lost,
        source=_ListSource(requests) if topology.first else None,
        sink=sink if topology.last else None,
    )
    Stage(topology, links, model, surroundings, **options).run()


def render_with_diffusers(
    model: str, image: Image.Image, parameters: VideoParameters, *, device: str = "cpu", **more: Any
) -> NDArray[np.uint8]:
    """Render one video with diffusers' pipeline of its family; return frames (F, H, W, 3); see `call_diffusers`."""
    from svdq.pipeline.models.components import be_quiet

    be_quiet()  # before the import, since transformers warns while it is imported
    torch.set_num_threads(1)
    dtype = dtype_for(resolve(model), torch.device(device))
    pipeline = open_diffusers(family_for(parameters).name, model, dtype).to(device)
    pipeline.set_progress_bar_config(disable=True)
    frames = call_diffusers(pipeline, image, parameters, **more)[0]
    return np.stack([np.asarray(frame) for frame in frames])


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print and return an exit code: 0 equal, 1 different, 2 wrong input."""
    options = _parse(arguments)
    if options.model is not None:
        return _compare(options)
    with tempfile.TemporaryDirectory(prefix="svdq-compare-") as folder:
        options.model = Path(folder)
        imported(family_named(options.family or DEFAULT_FAMILY).tiny)(options.model)
        return _compare(options)


def _compare(options: argparse.Namespace) -> int:
    model = str(options.model)
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = resolve(model)
        if resolved.family is None:
            raise InputError(f"diffusers has no {model}; give the folder or hub id of a model.")
        family, facts = family_named(resolved.family), resolved.facts
        videos = [family.fill_in(each, model, facts) for each in _videos(options, model, family)]
        size = (videos[0].width, videos[0].height)
        photo = options.image.read_bytes() if options.image else Image.effect_mandelbrot((256, 256), (-2, -1, 1, 1), 90)
        image = prepare_photo(photo, *size, max_pixels=10**9)
        components: list[Components] = []
        if options.bound:
            segments = family.unit_costs(videos[0], facts).segments
            if len(segments) < 2 or options.ranks < 2:
                raise InputError(
                    "--bound needs a model with two experts that both have steps, and two ranks; leave it out."
                )
            components = bind(segments, [False] * options.ranks, family.prior(facts))
        if options.rounds and (len(family.unit_costs(videos[0], facts).segments) < 2 or options.ranks > 1):
            raise InputError(
                "--rounds needs a model with two experts that both have steps, and --ranks 1; leave it out."
            )
        compute = ComputeOptions(approximate=("int8",)) if options.int8 else DEFAULTS
        ours = render(
            model,
            image,
            videos,
            num_ranks=options.ranks,
            device=device,
            options=compute,
            components=components,
            in_rounds=options.rounds,
        )
    except (SvdqError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    largest = 0
    for parameters, frames in zip(videos, ours, strict=True):
        if options.alone:
            [theirs] = render(model, image, [parameters], num_ranks=1, device=device, options=compute)
        else:
            theirs = render_with_diffusers(model, image, parameters, device=device)
        difference = int(np.abs(frames.astype(np.int16) - theirs.astype(np.int16)).max())
        largest = max(largest, difference)
        print(  # noqa: T201
            f"seed {parameters.seed}: {len(frames)} frames of {frames.shape[2]}x{frames.shape[1]}, "
            f"largest pixel difference {difference}"
        )
    ranks = f"{options.ranks} {'bound ranks' if options.bound else 'rank in rounds' if options.rounds else 'ranks'}"
    print(f"largest pixel difference over {len(videos)} videos on {ranks} ({device}): {largest}")  # noqa: T201
    return 0 if largest <= options.tolerance else 1


def _videos(options: argparse.Namespace, model: str, family: Family) -> list[VideoParameters]:
    """Return the requested parameters of the videos.

    Raises:
        InputError: the model is of another family, or a value is out of range.
    """
    title = family.parameters.title
    if options.family not in (None, family.name):
        raise InputError(f"The model {model} makes videos of {title}; leave --family {options.family} out.")
    given = {name: value for name in _PARAMETERS if (value := getattr(options, name)) is not None}
    if unknown := given.keys() - family.parameters.model_fields:
        raise InputError(f"{title} has no {', '.join(sorted(unknown))}; leave that out.")
    given["width"], _, given["height"] = options.size.partition("x")
    try:
        return [
            family.parameters.model_validate_strings(given | {"seed": str(options.seed + number)})
            for number in range(options.videos)
        ]
    except ValidationError as error:
        first = error.errors()[0]
        reason = ": ".join([*map(str, first["loc"]), first["msg"]])
        raise InputError(f"A parameter is not allowed ({reason}); give another value.") from error


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gpu_checks.compare", description=__doc__)
    names = [family.name for family in FAMILIES]
    parser.add_argument("--family", choices=names, help="family of the tiny model [default: svd, or --model's]")
    parser.add_argument("--model", type=Path, help="folder of a diffusers pipeline [default: the family's tiny one]")
    parser.add_argument("--image", type=Path, help="a photo [default: a fractal]")
    parser.add_argument("--ranks", type=int, default=7)
    parser.add_argument("--bound", action="store_true", help="bind each rank to one of the model's two experts")
    parser.add_argument("--rounds", action="store_true", help="hold one of the model's two experts at a time")
    parser.add_argument("--int8", action="store_true", help="with weights in int8; only with --alone")
    parser.add_argument("--alone", action="store_true", help="compare with one rank in place of diffusers")
    parser.add_argument("--videos", type=int, default=2, help="videos in flight at once, with seeds from --seed on")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--tolerance", type=int, default=0, help="largest pixel difference that counts as equal")
    parser.add_argument("--size", default="128x128", help="WIDTHxHEIGHT")
    parser.add_argument("--seed", type=int, default=0)
    for name in _PARAMETERS:
        of = ", ".join(family for family, each in PARAMETERS.items() if name in each.model_fields)
        parser.add_argument(f"--{name.replace('_', '-')}", help=f"of {of} [default: the model's]")
    options = parser.parse_args(arguments)
    if options.int8 and not options.alone:
        parser.error("diffusers' weights are not in int8; give --alone, too")
    if min(options.ranks, options.videos) < 1:
        parser.error("--ranks and --videos must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
