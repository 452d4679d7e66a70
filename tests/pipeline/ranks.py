"""Renders the videos of a photo on several ranks, without a worker: threads of this process, as in `fakes.Chain`.

Each computes with one thread, since float32 sums on a CPU depend on the number of threads. Several videos are in flight
at once, with different seeds. Ranks that are processes are those of workers, in tests/worker.
"""

from collections.abc import Sequence
from dataclasses import replace

from PIL import Image

from svdq.pipeline.loop.protocols import Request
from svdq.pipeline.models.compute.options import DEFAULTS, ComputeOptions
from svdq.pipeline.models.loader import dtype_for, open_model
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.video_model import Frames, Role
from svdq.pipeline.planning.binding import Components
from svdq.pipeline.planning.planner import Planner
from svdq.pipeline.video_parameters import VideoParameters
from tests.pipeline.fakes import CPU, Chain


def render(
    model: str,
    image: Image.Image,
    videos: Sequence[VideoParameters],
    *,
    num_ranks: int,
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
    requests = [
        Request(
            job_id=f"video-{number}",
            parameters=video,
            photo=image,
            last_photo=last_photo if getattr(video, "last_image", None) else None,
            num_waiting=len(videos) - number - 1,
        )
        for number, video in enumerate(videos)
    ]
    components = components or [None] * num_ranks
    resolved = resolve(model)
    dtype = dtype_for(resolved, CPU, options)
    models = [
        open_model(
            resolved,
            replace(Role.of_rank(rank), components=held, in_rounds=in_rounds, host_bytes=10**12 * in_rounds),
            CPU,
            dtype,
            options,
        )
        for rank, held in enumerate(components)
    ]
    chain = Chain(models, requests, planner=Planner(num_ranks), components=components)
    chain.run()
    assert [report.failure for report in chain.source.reports.values()] == [None] * len(videos)
    return [chain.sink.frames[each.job_id] for each in requests]
