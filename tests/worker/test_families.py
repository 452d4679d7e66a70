"""The records that a worker writes about videos of different families."""

import pytest

from svdq.pipeline.loop.sample import Sample
from svdq.pipeline.models.svd.family import FAMILY, SvdParameters
from svdq.pipeline.models.video_model import ModelInfo
from svdq.pipeline.models.wan.family import WanParameters
from svdq.pipeline.video_parameters import VideoParameters
from svdq.producer.job import Job, SvdJob, WanJob
from svdq.worker.health.progress import meta_of
from svdq.worker.output.writer import notice_for

IMAGE = f"inputs/{'0' * 64}.png"
WAN = {"frames": 5, "steps": 4, "width": 48, "height": 32, "fps": 16, "decode_chunk_size": 5, "seed": 1}


def job_of(family: str) -> Job:
    if family == "svd":
        return SvdJob(image=IMAGE, name="photo", seed=1, frames=2, width=64, height=64)
    return WanJob(image=IMAGE, name="photo", prompt="a cat", **WAN)


def test_the_notice_of_a_preview_has_the_prompt_that_it_ignored() -> None:
    preview = ModelInfo(name="preview", notice="preview (no diffusion model)")
    tiny = ModelInfo(name="/models/tiny", notice="untrained", family=FAMILY)
    plain, prompted = job_of("svd"), job_of("wan")
    assert notice_for(preview, plain) == "preview (no diffusion model)"
    assert notice_for(preview, prompted) == "preview (no diffusion model), ignored the prompt: a cat"
    assert notice_for(preview, prompted.model_copy(update={"prompt": ""})) == preview.notice
    assert notice_for(tiny, prompted) == "untrained"


@pytest.mark.parametrize(
    ("parameters", "used"),
    [
        (SvdParameters(seed=1, frames=3, decode_chunk_size=2), {"frames": 3, "decode_chunk_size": 2}),
        (WanParameters(prompt="a cat", guidance_scale=3.5, **WAN), WAN | {"guidance_scale": 3.5}),
    ],
)
def test_what_a_job_left_open_is_recorded_as_used(parameters: VideoParameters, used: dict[str, object]) -> None:
    sample = Sample(job_id="an id", parameters=parameters, boundaries=(0, 6), step=1)
    recorded = meta_of(sample, 1, 0, "").used
    assert {name: value for name, value in recorded.items() if value is not None} == {
        name: value for name, value in used.items() if name != "seed"
    }
