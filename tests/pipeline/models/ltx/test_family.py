"""LTX-2's parameters, defaults and facts, and what is known of the published models."""

import shutil

import pytest
import torch
from pydantic import ValidationError

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.family import Facts
from svdq.pipeline.models.ltx import layout
from svdq.pipeline.models.ltx.family import FAMILY, MODELS, PUBLISHED, LtxParameters, audio_frames, stages_of
from svdq.pipeline.models.model_file import SchedulerEntry
from svdq.pipeline.models.weights.model_folder import read_json

DEV: Facts = {name: value for name, value in PUBLISHED.items() if name != "sigmas"}


def completed(facts: Facts = PUBLISHED, **given: object) -> LtxParameters:
    return FAMILY.complete(LtxParameters.model_validate({"seed": 1} | given), facts)


def test_a_distilled_model_has_stages_of_8_and_3_steps_without_guidance():
    values = completed()
    assert (values.width, values.height, values.frames, values.fps) == (768, 512, 121, 24)
    assert (values.stages, values.steps, values.guided, values.stg_scale, values.modality_scale) == (2, 11, False, 0, 1)
    assert [(each.first_step, each.num_steps) for each in stages_of(values, PUBLISHED)] == [(0, 8), (8, 3)]
    assert [(each.frames, each.height, each.width) for each in stages_of(values, PUBLISHED)] == [
        (16, 8, 12),
        (16, 16, 24),
    ]
    assert completed(stages=1).steps == 8
    assert audio_frames(values, PUBLISHED) == 126
    assert FAMILY.complete(values, PUBLISHED) == values


@pytest.mark.parametrize(("size", "cost"), [((768, 512), 4.1), ((1280, 704), 4.9), ((1536, 1024), 5.7)])
def test_steps_of_the_second_stage_cost_more(size, cost):
    values = completed(width=size[0], height=size[1])
    (segment,) = FAMILY.unit_costs(values, PUBLISHED).segments
    assert (segment.component, segment.start, segment.stop) == ("transformer", 0, 11)
    assert segment.costs == pytest.approx((1.0,) * 8 + (cost,) * 3, abs=0.1)
    (segment,) = FAMILY.unit_costs(completed(stages=1), PUBLISHED).segments
    assert segment.costs == ()


def test_a_model_that_is_not_distilled_takes_one_stage_with_guidance():
    values = completed(DEV)
    assert (values.stages, values.steps, values.guided) == (1, 30, True)
    assert (values.guidance_scale, values.audio_guidance_scale, values.guidance_rescale) == (3, 7, 0.7)
    assert completed(DEV, stages=2).steps == 33
    with pytest.raises(InputError, match="Two stages need more than 3 steps, and 3 were asked for"):
        completed(DEV, stages=2, steps=3)
    with pytest.raises(InputError, match="has no latent_upsampler, so it makes videos in one stage; use stages 1"):
        completed({**DEV, "has_upsampler": False}, stages=2)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"frames": 120}, "1 more than a multiple of 8, the nearest being 113 and 121"),
        ({"width": 800}, "multiple of 64"),
        ({"stages": 3}, "less than or equal to 2"),
        ({"loop": True, "last_image": "b"}, "exclude each other"),
        ({"loop": True, "frames": 1}, "leaves no room"),
        ({"prompt": "\x07"}, "without control characters"),
    ],
)
def test_what_is_not_allowed(given, reason):
    with pytest.raises(ValidationError, match=reason):
        LtxParameters.model_validate({"seed": 1} | given)


def test_a_model_file_gives_the_noise_levels_of_a_distilled_lora():
    facts = FAMILY.use_scheduler(DEV, SchedulerEntry(sigmas=(1.0, 0.9, 0.5)))
    assert completed({**DEV, **facts}, stages=2).steps == 6
    second = FAMILY.use_scheduler(PUBLISHED, SchedulerEntry(stage_2_sigmas=(0.85, 0.4)))
    values = completed({**PUBLISHED, **second})
    assert [(each.num_steps, each.sigmas) for each in stages_of(values, {**PUBLISHED, **second})][1] == (2, (0.85, 0.4))
    refused = ({"shift": 5.0}, {"sigmas": "simple"}, {"sigmas": (1.0, 0.5), "boundary": 0.9})
    for given in (*refused, {"class": "UniPCMultistepScheduler"}):
        with pytest.raises(InputError, match=r"has lists of sigmas and stage_2_sigmas, and the class Flow.*leave all"):
            FAMILY.use_scheduler(DEV, SchedulerEntry(**given))


@pytest.mark.slow
def test_noise_levels_and_the_compression_of_photos_equal_diffusers():
    from diffusers.pipelines.ltx2 import utils

    assert list(layout.DISTILLED_SIGMA_VALUES) == utils.DISTILLED_SIGMA_VALUES
    assert list(layout.STAGE_2_DISTILLED_SIGMA_VALUES) == utils.STAGE_2_DISTILLED_SIGMA_VALUES
    assert [*layout.IMAGE_CRF.values()] == [utils.DEFAULT_IMAGE_CRF, utils.LTX2_5_IMAGE_CRF]


@pytest.mark.slow
def test_the_facts_of_a_folder(folder_of, tmp_path):
    facts = {kind: FAMILY.read_facts(folder_of(kind), "tiny") for kind in ("2.3", "2.3-dev", "2.5")}
    assert [each["image_crf"] for each in facts.values()] == [33, 33, 18]
    assert ["sigmas" in each for each in facts.values()] == [True, False, True]
    assert all(each["has_upsampler"] and each["sound_rate"] == 48000 for each in facts.values())
    folder = shutil.copytree(folder_of("2.3"), tmp_path / "old")
    config = read_json(folder, "transformer/config.json", "old")
    (folder / "transformer" / "config.json").write_text(
        str(config | {"cross_attn_mod": 0})
        .replace("'", '"')
        .replace("True", "true")
        .replace("False", "false")
        .replace("None", "null")
    )
    with pytest.raises(InputError, match=r"is LTX-2\.0; svdq makes videos with LTX-2\.3 and 2\.5"):
        FAMILY.read_facts(folder, "old")
    shutil.rmtree(folder / "latent_upsampler")
    assert "latent_upsampler" not in layout.read_index(folder, "old", layout.LAYOUT)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_published_numbers_of_weights_are_those_of_diffusers_modules(name):
    """On the meta device, from the configs that the facts are of; VAE and text encoder have files to look at only."""
    from diffusers import AutoencoderKLLTX2Audio, LTX2VideoTransformer3DModel
    from diffusers.pipelines.ltx2 import LTX2LatentUpsamplerModel, LTX2TextConnectors

    new = {"ff_bias": False, "use_keyframes_abs_pos_embedding": True} if "2.5" in name else {}
    sizes = {"caption_channels": 3840, "text_proj_in_factor": 49, "video_hidden_dim": 4096, "audio_hidden_dim": 2048}
    for each, dim in (("video", 128), ("audio", 64)):
        connector = {"num_attention_heads": 32, "attention_head_dim": dim, "num_layers": 8}
        connector |= {"num_learnable_registers": 128}
        sizes |= {f"{each}_connector_{key}": value for key, value in connector.items()} | {f"{each}_gated_attn": True}
    with torch.device("meta"):
        modules = {
            "transformer": LTX2VideoTransformer3DModel(
                gated_attn=True, cross_attn_mod=True, audio_gated_attn=True, audio_cross_attn_mod=True,
                rope_type="split", use_prompt_embeddings=False, perturbed_attn=True, **new,
            ),
            "connectors": LTX2TextConnectors(
                rope_type="split", per_modality_projections=True, proj_bias=True, **sizes
            ),
            "latent_upsampler": LTX2LatentUpsamplerModel(),
            "audio_vae": AutoencoderKLLTX2Audio(),
        }  # fmt: skip
    counted = {each: sum(weight.numel() for weight in module.parameters()) for each, module in modules.items()}
    assert counted == {each: MODELS[name].num_weights[each] for each in counted}


def test_a_plan_says_the_bytes_that_pull_fetches_of_ltx_2_5() -> None:
    """By the sizes of the hub's files, without the second set of parts of transformer and connectors: 71.1 GB."""
    model = FAMILY.models["Lightricks/LTX-2.5-Diffusers"]
    total = sum(number * model.stored[component] for component, number in model.num_weights.items())
    assert total == pytest.approx(71.1e9, rel=0.001)
