"""What is read of workflows of LTX-2."""

from typing import Any

import pytest

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.comfyui.recipe import Recipe
from svdq.pipeline.models.ltx.layout import STAGE_2_DISTILLED_SIGMA_VALUES
from tests.pipeline.models.comfyui.workflows import CHECKPOINT, ltx, node, read, template, written


def other_notes(recipe: Recipe) -> list[str]:
    """The notes, without those of files that the base has in their place."""
    return [each for each in recipe.notes if "of the base" not in each]


def test_one_stage_and_two() -> None:
    for stages in (1, 2):
        found = read(ltx(stages=stages))
        assert other_notes(found) == []
        weights = dict.fromkeys(("transformer", "connectors", "vae", "audio_vae", "vocoder"), CHECKPOINT)
        weights |= {"text_encoder": "gemma.safetensors"}
        weights |= {"latent_upsampler": "ltx-2.3-spatial-upscaler-x2-1.1.safetensors"} if stages == 2 else {}
        assert (found.base, found.weights) == ("diffusers/LTX-2.3-Distilled-Diffusers", weights)
        assert found.defaults == {
            "stages": stages, "width": 768, "height": 512, "frames": 97, "negative_prompt": "blurry", "fps": 24
        }  # fmt: skip
        assert (found.scheduler, found.seed, found.loras) == ({}, 7, ())
        assert (found.source.photo, found.source.prompt, found.source.last_photo) == ("cat.png", "The cat meows.", None)


def test_parts_in_files_of_other_loaders_are_taken_where_svdq_reads_them() -> None:
    workflow = ltx(stages=2)
    workflow["model"] = node("UNETLoader", unet_name="ltx-2.3-22b-distilled-bf16.safetensors")
    workflow["vae"] = node("VAELoader", vae_name="ltx23_video_vae.safetensors")
    workflow["sound"] = node("VAELoaderKJ", vae_name="ltx23_audio_vae.safetensors")
    texts = {"clip_name1": "gemma_mxfp4.safetensors", "clip_name2": "ltx23_text_projection.safetensors"}
    workflow["clip"] = node("DualCLIPLoader", **texts)
    workflow["of_another"] = node("VAELoader", vae_name="taeltx2_3.safetensors")
    for name in ("i2v_0", "i2v_1", "upsampled", "frames"):
        workflow[name]["inputs"]["vae"] = ["vae", 0]
    found = read(workflow)
    assert found.weights == {
        "transformer": "ltx-2.3-22b-distilled-bf16.safetensors",
        "vae": "ltx23_video_vae.safetensors",
        "audio_vae": "ltx23_audio_vae.safetensors",
        "vocoder": "ltx23_audio_vae.safetensors",
        "connectors": "ltx23_text_projection.safetensors",
        "latent_upsampler": "ltx-2.3-spatial-upscaler-x2-1.1.safetensors",
    }
    assert found.notes == (
        "DualCLIPLoader (clip) loads gemma_mxfp4.safetensors; svdq takes the text_encoder of the base.",
    )


def test_a_missing_checkpoint_belongs_to_the_checkpoints_whatever_it_is_for() -> None:
    """A GGUF transformer, with all else from a whole checkpoint and Lightricks' loader of Gemma."""
    workflow = ltx()
    workflow["model"] = node("UnetLoaderGGUF", unet_name="ltx-2.3-22b-distilled-Q4_K_M.gguf")
    workflow["clip"] = node("LTXVGemmaCLIPModelLoader", gemma_path="gemma/model.safetensors", ltxv_path=CHECKPOINT)
    workflow["vae"] = node("CheckpointLoaderSimple", ckpt_name=CHECKPOINT)
    for name in ("i2v_0", "frames"):
        workflow[name]["inputs"]["vae"] = ["vae", 2]
    found = read(workflow)
    assert found.notes == ()
    assert found.weights == {
        "transformer": "ltx-2.3-22b-distilled-Q4_K_M.gguf",
        "text_encoder": "gemma/model.safetensors",
        **dict.fromkeys(("connectors", "vae", "audio_vae", "vocoder"), CHECKPOINT),
    }
    made = written(found)
    assert {(str(each.path.relative_to("ComfyUI/models")), bool(each.about)) for each in made.missing} == {
        ("diffusion_models/ltx-2.3-22b-distilled-Q4_K_M.gguf", True),
        ("text_encoders/gemma/model.safetensors", True),
        (f"checkpoints/{CHECKPOINT}", False),
    }


def test_a_text_encoder_with_its_projection_is_both_components() -> None:
    file = "gemma_3_12B_it_fp8_with_projection.safetensors"
    workflow = ltx()
    workflow["clip"] = node("LTXAVTextEncoderLoader", text_encoder=file)
    found = read(workflow)
    assert (found.weights["text_encoder"], found.weights["connectors"]) == (file, file)


@pytest.mark.parametrize(
    ("name", "loader", "component"),
    [
        ("clip", node("LTXAVTextEncoderLoader", text_encoder="t5xxl.safetensors"), "text_encoder"),
        ("clip", node("CLIPLoader", clip_name="gemma-00001-of-00005.safetensors"), "text_encoder"),
        ("sound", node("LTXVAudioVAELoader", ckpt_name="audio_svdq.safetensors"), "audio_vae"),
        ("upscaler", node("LatentUpscaleModelLoader", model_name="ltx-2.3-spatial-x1.5.safetensors"), "upsampler"),
    ],
)
def test_files_that_svdq_does_not_read_are_noted(name: str, loader: dict[str, Any], component: str) -> None:
    found = read(ltx(stages=2) | {name: loader})
    file = next(iter(loader["inputs"].values()))
    assert file not in found.weights.values()
    assert any(f"({name}) loads " in note and f"{component}" in note for note in found.notes), found.notes


def test_the_template_of_ltx_2_3_is_read_whole() -> None:
    found = template("video_ltx2_3_i2v")
    assert [(component, lora.file, lora.strength) for component, lora in found.loras] == [
        ("transformer", "ltx_2.3_22b_distilled_1.1_lora_dynamic_fro09_avg_rank_111_bf16.safetensors", 0.5)
    ]
    assert (found.source.size, found.source.frames, found.defaults["fps"], found.defaults["stages"], found.seed) == (
        (1280, 704), 121, 25, 2, 60540193790228
    )  # fmt: skip
    assert found.source.photo == "egyptian_queen.png"
    assert (found.source.prompt or "").startswith("Egyptian royal")
    assert found.scheduler["stage_2_sigmas"] == [0.85, 0.725, 0.4219]
    notes = "\n".join(found.notes)
    for sentence in (
        "SamplerCustomAdvanced (320:308) has the seed 42; svdq draws the noise of both stages from the first seed.",
        "LTXVPreprocess (320:289) compresses the photo by 18; svdq does by 33, as diffusers.",
        "LTXVImgToVideoInplace (320:296) holds to the photo with the strength 0.7; svdq does with 1.",
    ):
        assert sentence in notes
    made = written(found)
    assert str(made.missing[0].path) == "ComfyUI/models/checkpoints/ltx-2.3-22b-dev-fp8.safetensors"
    assert made.missing[0].about == "23.1 GB"
    assert [each.path.parent.name for each in made.missing] == [
        "checkpoints",
        "text_encoders",
        "latent_upscale_models",
        "loras",
    ]


def test_first_and_last_photo_of_a_template_with_a_fixed_size() -> None:
    found = template("video_ltx2_3_flf2v")
    assert (found.source.photo, found.source.last_photo) == ("high_view_classic_car.png", "low_view_classic_car.png")
    assert (found.source.size, found.defaults["stages"], found.scheduler) == ((1280, 704), 1, {})
    # With an eta of 0, the ancestral sampler adds no noise, so that it is Euler's method.
    assert not any("sampler" in note for note in found.notes)


def test_the_size_of_a_selector_and_weights_in_int8() -> None:
    found = template("video_ltx2_5_i2v")
    assert found.source.size == (1280, 704)
    assert "int8-convrot" in found.weights["transformer"]
    assert "int8-convrot" in found.weights["text_encoder"]
    assert not any("int8" in note for note in found.notes)


def test_samplers_and_levels_of_both_stages() -> None:
    found = template("video_ltx2_5_i2v")
    assert found.scheduler == {"class": "LTXEulerAncestralRFScheduler", "stage_2_sigmas": [0.85, 0.725, 0.4219]}
    assert not any("sampler" in note or "levels" in note for note in found.notes)
    workflow = ltx(stages=2)
    workflow["noisy"] = node("SamplerEulerAncestral", eta=1.0, s_noise=1.0)
    workflow["stage_1"]["inputs"]["sampler"] = ["noisy", 0]
    found = read(workflow)
    assert found.scheduler == {}
    assert other_notes(found) == [
        "SamplerCustomAdvanced (stage_1) has the sampler SamplerEulerAncestral; svdq takes the first sampler's for "
        "both stages."
    ]
    workflow["noisy"]["inputs"]["eta"] = 0.5
    assert "(stage_1) has the sampler SamplerEulerAncestral, which svdq lacks" in other_notes(read(workflow))[0]


@pytest.mark.slow
def test_a_schedule_by_the_number_of_tokens_and_guidance() -> None:
    workflow = ltx()
    workflow["sigmas_0"] = node("LTXVScheduler", steps=4, latent=["both_0", 0])
    workflow["guider_0"]["inputs"]["cfg"] = 4.0
    found = read(workflow)
    # (768 / 32) (512 / 32) (1 + 96 / 8) = 4992 tokens, as diffusers' scheduler with its dynamic shift.
    assert found.scheduler["sigmas"] == pytest.approx(_of_diffusers(4, 4992), abs=2e-6)
    assert {name: found.defaults[name] for name in ("guidance_scale", "audio_guidance_scale", "stg_scale")} == {
        "guidance_scale": 4.0, "audio_guidance_scale": 4.0, "stg_scale": 0.0
    }  # fmt: skip


def test_a_part_of_a_schedule_and_one_that_svdq_lacks() -> None:
    workflow = ltx()
    workflow["whole"] = node("LTXVScheduler", steps=4, latent=["both_0", 0])
    whole = read(workflow | {"sigmas_0": workflow["whole"]}).scheduler["sigmas"]
    workflow["sigmas_0"] = node("SplitSigmas", sigmas=["whole", 0], step=3)
    assert read(workflow).scheduler["sigmas"] == whole[:3]
    workflow["sigmas_0"] = node("BasicScheduler", scheduler="beta", steps=4, denoise=1.0)
    found = read(workflow)
    assert found.scheduler["sigmas"] == whole
    assert "SamplerCustomAdvanced (stage_0) has the schedule beta, which svdq lacks for LTX-2" in found.notes[0]


def _of_diffusers(steps: int, tokens: int) -> list[float]:
    import numpy as np
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.ltx2.pipeline_ltx2 import calculate_shift

    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_image_seq_len=1024, max_image_seq_len=4096, base_shift=0.95, max_shift=2.05,
        shift_terminal=0.1,
    )  # fmt: skip
    mu = calculate_shift(tokens, 1024, 4096, 0.95, 2.05)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    return [float(each) for each in scheduler.sigmas[:-1]]


def test_guidance_of_video_and_sound_by_lightricks_nodes() -> None:
    workflow = ltx()
    sound = {"modality": "AUDIO", "cfg": 7.0, "stg": 1.0, "rescale": 0.7, "modality_scale": 3.0, "skip_step": 0}
    workflow["of_sound"] = node("GuiderParameters", **sound)
    workflow["of_video"] = node(
        "GuiderParameters", **sound | {"modality": "VIDEO", "cfg": 3.0, "rescale": 0.9}, parameters=["of_sound", 0]
    )
    workflow["guider_0"]["class_type"] = "MultimodalGuider"
    workflow["guider_0"]["inputs"] |= {"parameters": ["of_video", 0], "skip_blocks": "28"}
    found = read(workflow)
    assert {name: value for name, value in found.defaults.items() if "guidance" in name or "scale" in name} == {
        "guidance_scale": 3.0,
        "audio_guidance_scale": 7.0,
        "stg_scale": 1.0,
        "modality_scale": 3.0,
        "guidance_rescale": 0.9,
    }
    assert other_notes(found) == [
        "GuiderParameters (of_sound) guides the sound; svdq takes its cfg, and all else of the video's guidance for "
        "both."
    ]


def test_a_second_stage_that_svdq_lacks_leaves_the_first() -> None:
    workflow = ltx(stages=2)
    lora = {"lora_name": "distilled.safetensors", "strength_model": 1.0}
    workflow["lora"] = node("LoraLoaderModelOnly", model=["model", 0], **lora)
    workflow["guider_1"]["inputs"]["model"] = ["lora", 0]
    found = read(workflow)
    assert (found.loras, found.defaults["stages"]) == ((), 2)
    assert "SamplerCustomAdvanced (stage_1) has other LoRAs, or other strengths, than the first" in found.notes[0]
    workflow["guider_0"]["inputs"]["cfg"] = 4.0
    found = read(workflow)
    assert (found.defaults["stages"], found.source.size) == (1, (768, 512))
    assert "SamplerCustomAdvanced (stage_1) goes on with another model or guidance" in found.notes[0]


def test_in_context_loras_are_refused_whatever_loads_them() -> None:
    workflow = ltx()
    lora = {"lora_name": "ltx-2.3-22b-ic-lora-union-control.safetensors", "strength_model": 1.0}
    workflow["lora"] = node("LoraLoaderModelOnly", model=["model", 0], **lora)
    workflow["guider_0"]["inputs"]["model"] = ["lora", 0]
    with pytest.raises(InputError, match=r"LoraLoaderModelOnly \(lora\) adds ltx-2.3-22b-ic-lora-.* in-context LoRA"):
        read(workflow)


def test_levels_of_the_second_stage_are_those_of_diffusers() -> None:
    given = ltx(stages=2)["sigmas_1"]["inputs"]["sigmas"]
    assert [float(each) for each in given.split(",")][:-1] == list(STAGE_2_DISTILLED_SIGMA_VALUES)


@pytest.mark.parametrize(
    ("name", "given", "sentence"),
    [
        ("model", node("CheckpointLoaderSimple", ckpt_name="ltx-2-19b-dev.safetensors"), r"\(model\) .* is LTX-2.0"),
        ("i2v_0", node("LTXVImgToVideoInplace", latent=["empty", 0]), r"LatentVideo \(empty\) has no photo of"),
        ("empty_sound", node("LTXVAudioVAEEncode", audio=["x", 0]), r"Encode \(empty_sound\) makes a video from sound"),
        ("empty", node("VAEEncode", pixels=["image", 0]), r"VAEEncode \(empty\) makes a video from latents"),
        ("upsampled", node("LatentUpscaleBy", samples=["apart_0", 0]), r"\(stage_1\) goes on .* \(stage_0\) without"),
        ("both_0", node("LTXAddVideoICLoRAGuide", latent=["empty", 0]), r"\(both_0\) makes a video with an in-context"),
        ("both_0", node("LTXDirector", optional_latent=["empty", 0]), r"\(both_0\) makes a video along a timeline"),
        ("sigmas_0", node("SetFirstSigma", sigma=1.0), r"SetFirstSigma \(sigmas_0\) makes noise levels"),
    ],
)  # fmt: skip
def test_what_svdq_cannot_do_is_refused_with_the_node(name: str, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        read(ltx(stages=2 if name == "upsampled" else 1) | {name: given})
