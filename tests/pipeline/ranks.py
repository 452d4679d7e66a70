"""Renders the videos of a photo on several ranks, each a process, without a worker.

Each rank runs one thread, since float32 sums on a CPU depend on the number of threads. Several videos are in flight at
once, with different seeds.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from svdq.pipeline.errors import InputError
from svdq.pipeline.loop.protocols import Report, Request, Sink, Source, Surroundings
from svdq.pipeline.loop.sample import Sample
from svdq.pipeline.loop.stage import Stage
from svdq.pipeline.models.compute.options import DEFAULTS, ComputeOptions
from svdq.pipeline.models.loader import dtype_for, open_model
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.video_model import Frames, Role, VideoModel
from svdq.pipeline.planning.binding import Components
from svdq.pipeline.transport.topology import Links, Topology
from svdq.pipeline.video_parameters import VideoParameters
from svdq.worker.bench.loop_runs import exit_when_lost, spawn_ranks
from svdq.worker.device import choose_device


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
