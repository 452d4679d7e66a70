"""The memory that ranks need in each phase of the published models, without their files and with diffusers' modules."""

from dataclasses import replace
from typing import Any

import pytest

from svdq.pipeline.models.compute.memory import CONTEXT_BYTES, RESERVE_BYTES
from svdq.pipeline.models.compute.options import weight_bytes
from svdq.pipeline.models.families import FAMILIES
from svdq.pipeline.models.needs import SizedModel, published

A14B = "Wan-AI/Wan2.2-I2V-A14B-Diffusers"
IDS = [model for family in FAMILIES for model in family.models]


def video_of(size: SizedModel, **shape: Any) -> Any:
    parameters = size.family.parameters.model_validate({"seed": 0, "decode_chunk_size": 1, **shape})
    return size.family.complete(parameters, size.facts)


def size_of(name: str, **options: bool) -> SizedModel:
    found = published(name)
    assert found is not None
    return replace(found, **options)


def need(size: SizedModel, residency: Any, **shape: Any) -> int:
    return max(size.phases(video_of(size, **shape), residency).values())


def room(gpu_gb: int) -> int:
    """Return what is left of a GPU, which is sold by GB of 2^30 bytes, besides CUDA's context and the reserve."""
    return gpu_gb * 2**30 - CONTEXT_BYTES - RESERVE_BYTES


def test_other_models_are_not_known() -> None:
    assert published("someone/else") is None
    assert published(f"{A14B}@main") == published(A14B)


@pytest.mark.parametrize("name", IDS)
def test_a_rank_needs_its_largest_phase_and_no_more_than_all_together(name: str) -> None:
    for size in (size_of(name), size_of(name, int8=True)):
        in_rounds, bound, resident = (need(size, each) for each in ("rounds", "bound", "resident"))
        assert in_rounds < bound <= resident
        phases = size.phases(video_of(size), "rounds")
        assert need(size, "rounds") == max(phases.values()) < sum(phases.values())


@pytest.mark.parametrize("name", [name for name in IDS if name.startswith("Wan-AI/")])
def test_streamed_blocks_leave_the_other_phases_as_they_are(name: str) -> None:
    whole, streamed = size_of(name), size_of(name, streamed=True)
    before, after = (size.phases(video_of(size), "rounds") for size in (whole, streamed))
    assert after.pop("step") < before.pop("step") / 2
    assert after == before


def test_the_a14b_in_int8_at_480p_fits_one_rank_of_24_gb_only_in_rounds() -> None:
    size = size_of(A14B, int8=True)
    assert need(size, "rounds") <= room(24) < need(size, "bound") < need(size, "resident")
    assert need(size, "rounds") > room(16)
    assert need(size_of(A14B, streamed=True), "rounds") <= room(16), "in bfloat16, without quantizing"
    assert need(size_of(A14B), "rounds") > room(24)


def test_a_rank_that_neither_encodes_nor_decodes_holds_no_text_encoder() -> None:
    size = size_of(A14B)
    inner = size.phases(video_of(size), "bound", encodes=False, decodes=False)
    first = size.phases(video_of(size), "bound", decodes=False)
    assert set(inner) == {"step"}
    assert first["step"] - inner["step"] == size.weights("text_encoder")


@pytest.mark.parametrize(
    ("gpu_gb", "int8", "leaves"),
    [(80, False, "nothing"), (40, False, "text"), (48, True, "nothing"), (24, True, "experts")],
)
def test_as_little_as_possible_leaves_the_first_rank_with_an_expert(gpu_gb: int, int8: bool, leaves: str) -> None:
    """At 480p: 40 GB suffice for bfloat16 because the text encoder leaves, and 24 GB for int8 if the expert does."""
    size = size_of(A14B, int8=int8)
    video = video_of(size)
    found = size.leaves(room(gpu_gb), video, "bound", alone=False)
    assert found == leaves
    assert max(size.phases(video, "bound", decodes=False, leaves=found).values()) <= room(gpu_gb)


def test_experts_stay_where_several_or_streamed_ones_are_on_a_rank() -> None:
    size = size_of(A14B)
    video = video_of(size)
    assert size.leaves(0, video, "bound", alone=False) == "experts"
    assert size.leaves(0, video, "bound", alone=True) == "text"
    assert size.leaves(0, video, "resident", alone=False) == "text"
    assert size_of(A14B, streamed=True).leaves(0, video, "bound", alone=False) == "text"
    svd = size_of("stabilityai/stable-video-diffusion-img2vid-xt")
    assert svd.leaves(0, video_of(svd), "resident", alone=False) == "nothing"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in IDS if "LTX" not in name])
def test_the_published_numbers_of_weights_are_those_of_diffusers_modules(name: str) -> None:
    """On the meta device, from the configs that the facts are of; the encoders' configs are those of their papers."""
    import torch
    from diffusers import (
        AutoencoderKLTemporalDecoder,
        AutoencoderKLWan,
        UNetSpatioTemporalConditionModel,
        WanTransformer3DModel,
    )
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection, UMT5Config, UMT5EncoderModel

    size = size_of(name)
    vae: Any
    with torch.device("meta"):
        if size.family.name == "svd":
            vae = AutoencoderKLTemporalDecoder(
                block_out_channels=(128, 256, 512, 512),
                down_block_types=("DownEncoderBlock2D",) * 4,  # type: ignore[arg-type]
                layers_per_block=2,
            )
            modules = {"unet": UNetSpatioTemporalConditionModel(num_attention_heads=(5, 10, 20, 20)), "vae": vae}
        else:
            config = dict(size.facts["transformer"])
            if config["image_dim"]:
                config["added_kv_proj_dim"] = config["num_attention_heads"] * config["attention_head_dim"]
            modules = {
                each: WanTransformer3DModel(**config) for each in size.num_weights if each.startswith("transformer")
            }
            facts = size.facts["vae"]
            residual = {"is_residual": True, "out_channels": 12, "patch_size": 2, "latents_mean": [0.0] * 48}
            modules["vae"] = AutoencoderKLWan(**facts, **(residual if facts["z_dim"] == 48 else {}))
            modules["text_encoder"] = UMT5EncoderModel(
                UMT5Config(
                    vocab_size=256384, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64,
                    feed_forward_proj="gated-gelu",
                )
            )  # fmt: skip
        if "image_encoder" in size.num_weights:
            modules["image_encoder"] = CLIPVisionModelWithProjection(
                CLIPVisionConfig(
                    hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=16,
                    patch_size=14, projection_dim=1024,
                )
            )  # fmt: skip
    counted = {each: sum(weight.numel() for weight in module.parameters()) for each, module in modules.items()}
    assert counted == size.num_weights
    if size.family.name == "wan":
        transformer = modules["transformer"]
        assert size.family.num_blocks(size.facts) == len(transformer.blocks)
        # As a rank counts what it has loaded: in float32 on the meta device.
        exact = weight_bytes(transformer, {"WanTransformerBlock"})
        estimate = replace(size, dtype="float32", streamed=True).weights("transformer")
        assert exact < estimate < 1.2 * exact
