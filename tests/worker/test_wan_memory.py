"""Wan 2.2 I2V-A14B in full size: its published sizes, and the table of which GPUs hold which role."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.compute.memory import CONTEXT_BYTES, RESERVE_BYTES, WORKSPACE_BYTES, size_text
from svdq.pipeline.models.known_model import KnownModel
from svdq.pipeline.models.needs import INT8_BYTES, Residency, published
from svdq.pipeline.models.video_model import ModelInfo
from svdq.pipeline.models.wan.family import FAMILY, PUBLISHED, WanParameters
from svdq.pipeline.models.wan.layout import TRANSFORMER_DEFAULTS
from svdq.worker.memory_plan import DoesNotFitError, MemoryPlan, RankInfo, plan_of

MODEL = KnownModel(name="A14B", family=FAMILY, facts=PUBLISHED)
DOC = Path(__file__).parents[2] / "docs" / "models.md"
GPUS_GB = (16, 24, 40, 48, 80)
SIZES = {"480p": (832, 480), "720p": (1280, 720)}


def _bytes(model: torch.nn.Module, dtype: torch.dtype) -> int:
    """Return the bytes of a model's weights in a dtype, except for the layers that diffusers keeps in float32."""
    kept: Any = getattr(model, "_keep_in_fp32_modules", None) or []
    return sum(
        weight.numel() * (4 if not {*kept}.isdisjoint(name.split(".")) else dtype.itemsize)
        for name, weight in model.named_parameters()
    )


@pytest.fixture(scope="module")
def weights() -> dict[str, float]:
    """The bytes of each component as a GPU holds it: bfloat16, and the VAE in float32."""
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    with torch.device("meta"):
        config = {name: value for name, value in TRANSFORMER_DEFAULTS.items() if name != "in_channels"}
        expert = WanTransformer3DModel(in_channels=36, **config)
        vae = AutoencoderKLWan()
        # The configuration of google/umt5-xxl.
        text_encoder = UMT5EncoderModel(
            UMT5Config(
                vocab_size=256384, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64,
                feed_forward_proj="gated-gelu",
            )
        )  # fmt: skip
    assert sum(weight.numel() for weight in expert.parameters()) == 14_288_901_184
    # The files of an expert on the hub are float32.
    assert _bytes(expert, torch.float32) == 57_155_604_736
    return {
        "bf16": _bytes(expert, torch.bfloat16),
        "int8": expert.num_parameters() * INT8_BYTES,
        "text_encoder": 2 * sum(weight.numel() for weight in text_encoder.parameters()),
        "vae": _bytes(vae, torch.float32),
    }


def test_the_published_sizes(weights: dict[str, float]) -> None:
    assert size_text(int(weights["bf16"])) == "28.6 GB"
    assert size_text(int(weights["text_encoder"])) == "11.4 GB"
    assert size_text(int(weights["vae"])) == "507.6 MB"


def room(gpu_gb: int) -> int:
    """Return what a rank may use of a GPU, which is sold by GB of 2^30 bytes."""
    return gpu_gb * 2**30 - CONTEXT_BYTES - RESERVE_BYTES


def need(size: str, weight_bytes: float, *, decodes: bool = False, chunk: int | None = None) -> int:
    """Return what a worker expects a rank in the middle to need for 81 frames."""
    rank = RankInfo(capacity=None, weights=int(weight_bytes), device="a GPU", decodes=decodes)
    other = RankInfo(capacity=None, weights=0, device="a GPU")
    plan = MemoryPlan([other, rank, other], "bfloat16", MODEL, workspace=WORKSPACE_BYTES)
    return plan.need(1, video_of(size, chunk), *(["decode"] if decodes else []))


def rank_in_rounds(gpu_gb: int, *, int8: bool, streamed: bool = False) -> RankInfo:
    """Return what a rank reports that works in rounds alone, with the published sizes."""
    found = published("Wan-AI/Wan2.2-I2V-A14B-Diffusers")
    assert found is not None
    size, with_streams = (replace(found, int8=int8, streamed=each) for each in (streamed, True))
    return RankInfo(
        capacity=room(gpu_gb),
        weights=size.held("step", "rounds"),
        phase_weights=size.phase_weights(),
        streamed_weights=None if streamed else with_streams.held("step", "rounds"),
        device="a GPU",
        encodes=True,
        decodes=True,
    )


def in_rounds(gpu_gb: int, *, int8: bool, streamed: bool = False) -> MemoryPlan:
    """Return the plan of that rank."""
    rank = rank_in_rounds(gpu_gb, int8=int8, streamed=streamed)
    return MemoryPlan([rank], "bfloat16", MODEL, workspace=WORKSPACE_BYTES)


def video_of(size: str, chunk: int | None = None) -> WanParameters:
    """Return a complete video of 81 frames; a chunk of 1 decodes in tiles."""
    width, height = SIZES[size]
    return FAMILY.complete(  # type: ignore[return-value]
        WanParameters(seed=0, width=width, height=height, frames=81, decode_chunk_size=chunk), PUBLISHED
    )


def rounds(size: str, *, int8: bool, streamed: bool) -> int:
    """Return what a worker expects a rank to need that works in rounds alone, and decodes in tiles."""
    return in_rounds(0, int8=int8, streamed=streamed).need(0, video_of(size, chunk=1))


def first(size: str, dtype: str, *, alone: bool) -> int:
    """Return what the rank that encodes needs at least: a replica, or the first of ranks with one expert each."""
    found = published("Wan-AI/Wan2.2-I2V-A14B-Diffusers")
    assert found is not None
    model, video = replace(found, int8=dtype == "int8"), video_of(size)
    residency: Residency = "resident" if alone else "bound"
    leaves = model.leaves(0, video, residency, alone=alone)
    return max(model.phases(video, residency, decodes=alone, leaves=leaves).values())


def table(weights: dict[str, float]) -> list[str]:
    """Make the rows of the table."""
    lines = []
    for size in SIZES:
        for dtype in ("bf16", "int8"):
            expert, decoder = weights[dtype], weights["vae"]
            needs = [
                first(size, dtype, alone=True),
                first(size, dtype, alone=False),
                need(size, expert),
                need(size, expert + decoder, decodes=True),
                *(rounds(size, int8=dtype == "int8", streamed=each) for each in (False, True)),
            ]
            smallest = [next((f"{gpu} GB" for gpu in GPUS_GB if each <= room(gpu)), "none of these") for each in needs]
            cells = [f"{size_text(each)}: {gpu}" for each, gpu in zip(needs, smallest, strict=True)]
            lines.append(f"| {size} | {dtype} | {' | '.join(cells)} |")
    return lines


def test_the_table_in_the_documentation_is_what_a_worker_expects(weights: dict[str, float]) -> None:
    text = DOC.read_text(encoding="utf-8")
    rows = table(weights)
    assert all(row in text for row in rows), "\n" + "\n".join(rows)


def test_a_rank_of_24_gb_decodes_480p_in_tiles(weights: dict[str, float]) -> None:
    held = weights["int8"] + weights["vae"]
    assert need("480p", held, decodes=True, chunk=1) <= room(24) < need("480p", held, decodes=True)


def test_one_gpu_of_24_gb_makes_480p_in_int8_in_rounds() -> None:
    video = video_of("480p")
    assert in_rounds(24, int8=True).admit(video).decode_chunk_size == 81, "not in tiles"
    with pytest.raises(
        DoesNotFitError, match=r"on rank 0 of 1, which has 15\.9 GB: start the worker with --offload blocks"
    ):
        in_rounds(16, int8=True).admit(video)
    assert in_rounds(16, int8=False, streamed=True).admit(video).decode_chunk_size == 81


def test_weights_that_only_fit_streamed_are_refused_with_the_option() -> None:
    info = ModelInfo(name="A14B", notice="", family=FAMILY, facts=PUBLISHED, compute={"dtype": "bfloat16"})
    limits = {24: "start the worker with --offload blocks, or grant more", 8: "grant more, such as 24GB"}
    for gpu_gb, advice in limits.items():
        with pytest.raises(InputError, match=rf"^The weights alone need 28.6 GB .*; {advice}"):
            plan_of(info, [rank_in_rounds(gpu_gb, int8=False)], room(gpu_gb))


def test_what_streaming_does_not_help_is_not_told_of_it() -> None:
    """The encode of 720p needs more than 16 GB."""
    for streamed in (False, True):
        with pytest.raises(DoesNotFitError, match="choose fewer frames, a smaller size, or grant more"):
            in_rounds(16, int8=True, streamed=streamed).admit(video_of("720p"))
    assert in_rounds(24, int8=False, streamed=True).admit(video_of("720p")).decode_chunk_size == 1
