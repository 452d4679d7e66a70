"""What is read of workflows: of ComfyUI's own templates, and of nodes that people use."""

import contextlib
import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.comfyui.recipe import Recipe, read_recipe
from svdq.pipeline.models.comfyui.workflow import read_workflow
from svdq.pipeline.models.wan.family import FAMILY as WAN
from svdq.pipeline.models.wan.workflow import READER
from tests.pipeline.models.comfyui.workflows import TEMPLATES, ltx, node, read, template, two_experts, wrapper, written

EULER = "FlowMatchEulerDiscreteScheduler"
A14B, TI2V = "Wan-AI/Wan2.2-I2V-A14B-Diffusers", "Wan-AI/Wan2.2-TI2V-5B-Diffusers"
LTX_2_3, LTX_2_5 = "diffusers/LTX-2.3-Distilled-Diffusers", "Lightricks/LTX-2.5-Diffusers"
#: The bases of ComfyUI's templates that make videos of photos with Wan or LTX-2.
IMPORTED = {
    "image_to_video_wan": "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
    "wan2.1_flf2v_720_f16": "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers",
    "video_wan2_2_5B_ti2v": TI2V,
    "video_wan2_2_14B_i2v": A14B,
    "video_wan2_2_14B_flf2v": A14B,
    "templates-6-key-frames": A14B,
    "video_ltx2_3_i2v": LTX_2_3,
    "video_ltx2_3_flf2v": LTX_2_3,
    "template_ltx2_3_style_transition": LTX_2_3,
    "video_ltx2_5_i2v": LTX_2_5,
    "video_ltx2_5_flf2v": LTX_2_5,
}
LOCAL = sorted(
    path.stem
    for pattern in ("*wan*.json", "*ltx*.json", "*key-frames*.json")
    for path in TEMPLATES.glob(pattern)
    if not path.stem.startswith("api_")
)


def guidance(recipe: Recipe) -> tuple[float, ...]:
    names = ("guidance_scale", "guidance_scale_2")
    return tuple(recipe.defaults[name] for name in names if name in recipe.defaults)


def test_the_templates_are_all_there() -> None:
    assert set(LOCAL) >= IMPORTED.keys()
    assert len(LOCAL) > 50


@pytest.mark.parametrize("name", LOCAL)
def test_a_template_is_imported_or_its_node_named(name: str) -> None:
    if name in IMPORTED:
        found = template(name)
        assert (found.base, "fps" in found.defaults) == (IMPORTED[name], True)
        parts = {"transformer"} if "LTX" in found.base else {"transformer", "text_encoder", "vae"}
        assert parts <= found.weights.keys()
        written(found)  # which checks all values
    else:
        with pytest.raises(InputError, match=r"\w+ \([\d:]+\) |nodes? .*\([\d:]+\)"):
            template(name)


def test_the_template_of_wan_2_2_is_read_whole() -> None:
    found = template("video_wan2_2_14B_i2v")
    assert found.weights == {
        "transformer": "wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors",
        "transformer_2": "wan2.2_i2v_low_noise_14B_fp8_scaled.safetensors",
        "text_encoder": "umt5_xxl_fp8_e4m3fn_scaled.safetensors",
        "vae": "wan_2.1_vae.safetensors",
    }
    # Its switch for the LoRAs of 4 steps is off.
    assert (found.defaults["steps"], guidance(found), found.loras, found.notes) == (20, (3.5, 3.5), (), ())
    euler = {"class": EULER, "shift": 5.0, "sigmas": "simple", "switch_at": 10}
    assert found.scheduler == euler
    assert (found.source.size, found.source.frames, found.defaults["fps"], found.seed) == (
        (640, 640),
        81,
        16,
        264244520398999,
    )
    assert found.source.photo == "video_wan2_2_14B_i2v_input_image.jpg"


def test_both_experts_of_the_api_format() -> None:
    found = read(two_experts())
    assert found.notes == ()
    assert (found.base, found.defaults["steps"], guidance(found), found.seed) == (A14B, 4, (1.0, 1.0), 7)
    assert [(component, lora.file) for component, lora in found.loras] == [
        ("transformer", "high.safetensors"),
        ("transformer_2", "low.safetensors"),
    ]
    assert (found.source.prompt, found.source.negative_prompt) == ("The cat jumps.", "blurry")
    assert found.scheduler == {
        "class": EULER, "shift": 5.0, "sigmas": "simple", "switch_at": 2
    }  # fmt: skip


def test_stacks_of_rgthree_without_those_that_are_off() -> None:
    workflow = two_experts()
    entries = {
        "lora_1": {"on": True, "lora": "a/style.safetensors", "strength": 0.7},
        "lora_2": {"on": False, "lora": "b"},
    }
    workflow["lora_high"] = node("Power Lora Loader (rgthree)", model=["unet_high", 0], clip=["clip", 0], **entries)
    stack = {"lora_01": "c.safetensors", "strength_01": 0.5, "lora_02": "None", "strength_02": 1.0}
    workflow["lora_low"] = node("Lora Loader Stack (rgthree)", model=["unet_low", 0], clip=["clip", 0], **stack)
    found = read(workflow)
    assert [(component, lora.file, lora.strength) for component, lora in found.loras] == [
        ("transformer", "a/style.safetensors", 0.7),
        ("transformer_2", "c.safetensors", 0.5),
    ]
    assert found.notes == ()


def test_loras_are_added_from_the_loader_on() -> None:
    workflow = two_experts()
    workflow["more"] = node(
        "LoraLoader", model=["lora_high", 0], clip=["clip", 0], lora_name="z.safetensors", strength_model=0.3
    )
    workflow["shift_high"]["inputs"]["model"] = ["more", 0]
    loras = [lora.file for component, lora in read(workflow).loras if component == "transformer"]
    assert loras == ["high.safetensors", "z.safetensors"]


def test_kijais_wrapper_with_a_chain_of_loras() -> None:
    found = read(wrapper())
    assert (found.base, found.defaults["steps"], found.notes) == (A14B, 8, ())
    # Euler of diffusers with its own noise levels.
    assert found.scheduler == {"class": EULER, "shift": 8.0, "switch_at": 4}
    assert [(lora.file, lora.strength) for component, lora in found.loras if component == "transformer_2"] == [
        ("first.safetensors", 0.5),
        ("second.safetensors", 1.0),
    ]
    assert (found.source.prompt, found.source.negative_prompt, found.defaults["fps"]) == ("It jumps.", "blurry", 16)
    assert found.weights["text_encoder"] == "umt5-xxl-enc-bf16.safetensors"


def with_sigmas_by_hand() -> dict[str, Any]:
    workflow = two_experts()
    workflow["sigmas"] = node("ManualSigmas", sigmas="1.0, 0.9, 0.6, 0.3, 0.0")
    workflow["split"] = node("SplitSigmas", sigmas=["sigmas", 0], step=1)
    workflow["euler"] = node("KSamplerSelect", sampler_name="euler")
    workflow["noise"] = node("RandomNoise", noise_seed=11)
    workflow["none"] = node("DisableNoise")
    for slot, name in enumerate(("high", "low")):
        guider = {"positive": ["i2v", 0], "negative": ["i2v", 1], "cfg": 2.0 - slot}
        workflow[f"guider_{name}"] = node("CFGGuider", model=[f"shift_{name}", 0], **guider)
        workflow[name] = node(
            "SamplerCustomAdvanced", noise=["none" if slot else "noise", 0], guider=[f"guider_{name}", 0],
            sampler=["euler", 0], sigmas=["split", slot], latent_image=["high", 0] if slot else ["i2v", 2],
        )  # fmt: skip
    return workflow


def test_custom_samplers_and_noise_levels_by_hand() -> None:
    found = read(with_sigmas_by_hand())
    assert (found.defaults["steps"], guidance(found), found.seed, found.notes) == (4, (2.0, 1.0), 11, ())
    assert found.scheduler["sigmas"] == [1.0, 0.9, 0.6, 0.3]
    assert (found.scheduler["shift"], found.scheduler["switch_at"]) == (1.0, 1)


def test_one_sampler_for_both_experts_has_a_boundary() -> None:
    workflow = two_experts()
    for name in ("high", "low"):
        del workflow[name]
    workflow["both"] = node(
        "WanMoeKSampler", model_high_noise=["lora_high", 0], model_low_noise=["lora_low", 0], boundary=0.875, seed=5,
        steps=20, cfg_high_noise=4.0, cfg_low_noise=3.0, sampler_name="euler", scheduler="beta", sigma_shift=6.0,
        positive=["i2v", 0], negative=["i2v", 1], latent_image=["i2v", 2],
    )  # fmt: skip
    workflow["decode"]["inputs"]["samples"] = ["both", 0]
    found = read(workflow)
    assert (guidance(found), found.notes) == ((4.0, 3.0), ())
    expected = {"class": EULER, "shift": 6.0, "sigmas": "beta", "boundary": 0.875}
    assert found.scheduler == expected


def test_experts_with_other_shifts_have_their_noise_levels_listed() -> None:
    workflow = two_experts()
    workflow["shift_low"]["inputs"]["shift"] = 8.0
    found = read(workflow)
    assert found.scheduler["sigmas"] == [1.0, 0.9375, 0.888889, 0.727273]
    assert found.notes == (
        "KSamplerAdvanced (low) goes on from a noise level of 0.889, where the one before ends at 0.833; svdq steps "
        "from one schedule to the other.",
    )
    assert (found.scheduler["shift"], found.scheduler["switch_at"], found.defaults["steps"]) == (1.0, 2, 4)


def test_what_is_not_carried_over_is_named_by_node() -> None:
    workflow = two_experts()
    workflow["high"]["inputs"] |= {"sampler_name": "lcm", "scheduler": "karras"}
    workflow["nag"] = node("WanVideoNAG", model=["lora_high", 0], nag_scale=11.0)
    workflow["sage"] = node("PathchSageAttentionKJ", model=["nag", 0], sage_attention="auto")
    workflow["shift_high"]["inputs"]["model"] = ["sage", 0]
    workflow["size"] = node("ImageResizeKJv2", image=["photo", 0], width=640, height=640)
    workflow["i2v"]["inputs"] |= {"width": ["size", 1], "height": ["size", 2], "start_image": ["size", 0]}
    workflow["more"] = node("RIFE VFI", frames=["decode", 0], multiplier=2, ckpt_name="rife47.pth")
    workflow["save"]["inputs"] |= {"images": ["more", 0], "fps": 32}
    workflow["low"]["inputs"]["cfg"] = 3.5
    found = read(workflow)
    assert (found.defaults["fps"], found.source.size, found.source.photo) == (16, None, "cat.png")
    for sentence in (
        "KSamplerAdvanced (high) has the sampler lcm, which svdq lacks; svdq uses Euler's method",
        "KSamplerAdvanced (high) has the schedule karras, which svdq lacks; svdq uses simple.",
        "KSamplerAdvanced (low) guides by 3.5; svdq guides no step",
        "WanVideoNAG (nag) changes the model; svdq runs it unchanged.",
        "PathchSageAttentionKJ (sage) concerns speed or memory only",
        "ImageResizeKJv2 (size) computes the size from the photo; `--size auto` does so here.",
        "RIFE VFI (more) interpolates frames; `svdq submit --interpolate` does so by motion estimation.",
    ):
        assert any(note.startswith(sentence) for note in found.notes), sentence


def test_stable_video_diffusion_and_a_photo_that_another_model_makes() -> None:
    found = template("txt_to_image_to_video")
    assert (found.base, found.weights, found.loras, found.scheduler) == (
        "stabilityai/stable-video-diffusion-img2vid-xt", {}, (), {}
    )  # fmt: skip
    assert found.defaults == {
        "steps": 20,
        "width": 1024,
        "height": 576,
        "frames": 25,
        "motion_bucket_id": 127,
        "fps": 6,
        "noise_aug_strength": 0,
        "min_guidance_scale": 1,
        "max_guidance_scale": 2.5,
    }
    assert [note.partition(";")[0] for note in found.notes] == [
        "KSampler (17) makes what the video starts from",
        "ImageOnlyCheckpointLoader (15) loads svd_xt.safetensors, a checkpoint in one file",
        "SVD_img2vid_Conditioning (12) makes a video of 6 frames a second, to be played at 10",
    ]


def test_the_size_of_stable_video_diffusion_is_one_that_it_takes() -> None:
    workflow = read_workflow(TEMPLATES / "txt_to_image_to_video.json")
    conditioning = next(each for each in workflow["nodes"] if each["type"] == "SVD_img2vid_Conditioning")
    conditioning["widgets_values"][:2] = [1000, 600]
    found = read(workflow)
    assert (found.source.size, found.defaults["width"], found.defaults["height"]) == ((960, 576), 960, 576)


def test_samplers_that_do_not_go_on_where_the_one_before_ends() -> None:
    for inputs, sentence in (
        (
            {"start_at_step": 3},
            "KSamplerAdvanced (low) starts at step 3, where the one before ends at 2; svdq goes on.",
        ),
        ({"add_noise": "enable"}, "KSamplerAdvanced (low) adds noise again; svdq does not."),
        (
            {"positive": ["yes", 0]},
            "KSamplerAdvanced (low) has other prompts or photos than the first sampler; svdq takes the first's for "
            "both.",
        ),
        ({"steps": 8, "start_at_step": 4}, ""),  # the same noise level
    ):
        found = read(changed("low", **inputs))
        assert found.notes == ((sentence,) if sentence else ())
    whole = read(changed("high", end_at_step=10_000))
    assert "KSamplerAdvanced (low) denoises a finished video once more" in whole.notes[0]
    cleared = read(changed("high", return_with_leftover_noise="disable"))
    assert cleared.notes[0].startswith("KSamplerAdvanced (high) removes all noise at its end")


def test_contexts_of_rgthree_are_followed_to_what_they_bundle() -> None:
    workflow = two_experts()
    workflow["empty"] = node("Context (rgthree)")
    workflow["both"] = node("Context (rgthree)", model=["lora_high", 0], clip=["clip", 0], vae=["vae", 0])
    workflow["switch"] = node("Context Switch (rgthree)", ctx_01=["empty", 0], ctx_02=["both", 0])
    workflow["more"] = node("Context Big (rgthree)", base_ctx=["switch", 0], model=["shift_high", 0], steps=4)
    workflow["shift_high"]["inputs"]["model"] = ["switch", 1]
    workflow["high"]["inputs"] |= {"model": ["more", 1], "steps": ["more", 9]}
    workflow["yes"]["inputs"]["clip"] = ["more", 2]
    workflow["i2v"]["inputs"]["vae"] = ["more", 3]
    assert read(workflow) == read(two_experts())


def test_pipes_of_easy_use_are_followed_to_what_they_bundle() -> None:
    workflow = two_experts()
    workflow["in"] = node("easy pipeIn", model=["shift_high", 0], pos=["i2v", 0], neg=["i2v", 1], vae=["vae", 0])
    workflow["more"] = node("easy pipeIn", pipe=["in", 0], latent=["i2v", 2])
    workflow["out"] = node("easy pipeOut", pipe=["more", 0])
    names = {"model": 1, "positive": 2, "negative": 3, "latent_image": 4}
    workflow["high"]["inputs"] |= {name: ["out", slot] for name, slot in names.items()}
    workflow["i2v"]["inputs"]["vae"] = ["out", 5]
    assert read(workflow) == read(two_experts())


def test_a_scheduler_for_two_experts_finds_its_shift() -> None:
    """ComfyUI-WanMoEScheduler: the shift with which the second expert begins at the boundary."""
    scheduler = node(
        "WanMoEScheduler", scheduler="simple", steps_high=2, steps_low=4, boundary=0.9, interval=0.01, denoise=1.0
    )
    by_sigmas = with_sigmas_by_hand() | {"split": scheduler}
    for slot, name in ((5, "high"), (6, "low")):
        by_sigmas[name]["inputs"]["sigmas"] = ["split", slot]
    by_shift = two_experts() | {"scheduler": scheduler}
    for name, place in (("high", "end_at_step"), ("low", "start_at_step")):
        by_shift[f"shift_{name}"]["inputs"]["shift"] = ["scheduler", 0]
        by_shift[name]["inputs"] |= {"steps": ["scheduler", 1], place: ["scheduler", 2]}
    shift = read(by_sigmas).scheduler["shift"]
    assert shift == read(by_shift).scheduler["shift"]
    # The level before the third of six steps is that of t = 0.667: s t / (1 + (s - 1) t).
    levels = [each * 0.667 / (1 + (each - 1) * 0.667) for each in (shift - 0.01, shift)]
    assert levels[0] < 0.9 <= levels[1]
    for workflow in (by_sigmas, by_shift):
        found = read(workflow)
        assert (found.scheduler["sigmas"], found.scheduler["switch_at"], found.notes) == ("simple", 2, ())
    workflow = wrapper() | {"scheduler": scheduler}
    for slot, name in ((5, "high"), (6, "low")):
        workflow[name]["inputs"] |= {"sigmas": ["scheduler", slot], "start_step": 0, "end_step": -1, "steps": 1}
    found = read(workflow)
    assert found.scheduler == {"class": EULER, "shift": shift, "sigmas": "simple", "switch_at": 2}
    assert (found.defaults["steps"], found.notes) == (6, ())
    for name, value in (("scheduler", "ddim_uniform"), ("interval", 1e-9), ("steps_low", 10**9), ("denoise", 0.5)):
        changed_split = node("WanMoEScheduler", **scheduler["inputs"] | {name: value})
        with pytest.raises(InputError, match=r"WanMoEScheduler \(split\) computes"):
            read(by_sigmas | {"split": changed_split})


@pytest.mark.parametrize(
    "half",
    [
        node("easy mathInt", a=["steps", 0], b=2, operation="divide"),
        node("MathExpression|pysssss", a=["steps", 0], expression="round(a / 2)"),
        node("SimpleMath+", a=["steps", 0], value="a/2"),
        node("ComfyMathExpression", expression="a // 2", **{"values.a": ["passed", 0]}),
    ],
)
def test_steps_that_nodes_compute_from_constants(half: dict[str, Any]) -> None:
    workflow = two_experts()
    workflow |= {"steps": node("PrimitiveInt", value=4), "half": half}
    workflow["passed"] = node("easy convertAnything", output_type="int", **{"*": ["steps", 0]})
    for name, place in (("high", "end_at_step"), ("low", "start_at_step")):
        workflow[name]["inputs"] |= {"steps": ["steps", 0], place: ["half", 0]}
    assert read(workflow) == read(two_experts())


@pytest.mark.parametrize(
    "more",
    [
        node("FrameInterpolate", images=["decode", 0], interp_model=["model", 0], multiplier=4),
        node("GIMMVFI_interpolate", images=["decode", 0], interpolation_factor=4),
        node("RIFEInterpolation", images=["decode", 0], source_fps=16.0, target_fps=64.0),
    ],
)
def test_frames_a_second_are_those_before_an_interpolation(more: dict[str, Any]) -> None:
    workflow = two_experts()
    workflow |= {"more": more, "model": node("FrameInterpolationModelLoader", model_name="rife.pth")}
    workflow["save"]["inputs"] |= {"images": ["more", 0], "fps": 64}
    found = read(workflow)
    assert found.defaults["fps"] == 16
    assert found.afterwards.options == ["--interpolate", "64"]
    assert any("(more) interpolates frames; `svdq submit --interpolate`" in note for note in found.notes)


@pytest.mark.parametrize(
    ("model", "more", "upscale"),
    [
        ("4x-UltraSharp.pth", [], "4"),
        ("RealESRGAN_x4plus.safetensors", [node("ImageScaleBy", scale_by=0.5)], "2"),
        ("RealESRGAN_x4plus.pth", [node("ImageScale", width=1664, height=960)], "1664x960"),
        ("RealESRGAN_x2plus.pth", [node("ImageScaleBy", scale_by=0.25)], ""),  # smaller than it was
        ("DAT_light.pth", [], ""),  # by how much is not in its name
    ],
)
def test_frames_that_are_upscaled_and_interpolated(model: str, more: list[dict[str, Any]], upscale: str) -> None:
    workflow = two_experts()
    workflow["loader"] = node("UpscaleModelLoader", model_name=model)
    workflow["upscaled"] = node("ImageUpscaleWithModel", upscale_model=["loader", 0], image=["decode", 0])
    before = "upscaled"
    for number, each in enumerate(more):
        each["inputs"]["image"] = [before, 0]
        workflow[before := f"scaled{number}"] = each
    workflow["rife"] = node("RIFE VFI", frames=[before, 0], multiplier=2, ckpt_name="rife47.pth")
    workflow["save"]["inputs"] |= {"images": ["rife", 0], "fps": 32}
    found = read(workflow).afterwards
    assert found.upscaler == model
    assert found.options == [*(["--upscale", upscale] if upscale else []), "--interpolate", "32"]


def test_nodes_in_place_of_wan_image_to_video_and_a_view_of_sigmas() -> None:
    workflow = two_experts()
    workflow["i2v"]["class_type"] = "PainterI2V"
    workflow["i2v"]["inputs"]["motion_amplitude"] = 1.15
    assert read(workflow).notes[0].startswith("PainterI2V (i2v) has the motion_amplitude 1.15, which svdq has not")
    workflow = with_sigmas_by_hand()
    workflow["view"] = node("VisualizeSigmasKJ", sigmas=["sigmas", 0], start_step=0, end_step=-1)
    workflow["split"]["inputs"]["sigmas"] = ["view", 0]
    assert read(workflow) == read(with_sigmas_by_hand())


def test_weights_in_formats_that_svdq_does_not_read_are_named() -> None:
    found = read(changed("unet_low", unet_name="wan2.2_i2v_low_noise_14B_mxfp4.safetensors"))
    assert found.notes == (
        "UNETLoader (unet_low) loads wan2.2_i2v_low_noise_14B_mxfp4.safetensors; svdq does not read weights in mxfp4: "
        "name the model's file in bf16, fp8, int8 or GGUF in `[weights]`.",
    )


def changed(name: str, **inputs: Any) -> dict[str, Any]:
    workflow = two_experts()
    workflow[name]["inputs"] |= inputs
    return workflow


def with_third_sampler() -> dict[str, Any]:
    workflow = two_experts()
    workflow["plain"] = node(
        "KSamplerAdvanced", **workflow["high"]["inputs"] | {"model": ["unet_high", 0], "end_at_step": 1}
    )
    workflow["high"]["inputs"] |= {"latent_image": ["plain", 0], "start_at_step": 1}
    return workflow


def with_one_expert() -> dict[str, Any]:
    workflow = changed("high", end_at_step=10_000)
    workflow["decode"]["inputs"]["samples"] = ["high", 0]
    del workflow["low"]
    return workflow


def from_text() -> dict[str, Any]:
    workflow = two_experts()
    workflow["i2v"] = node("EmptyHunyuanLatentVideo", width=832, height=480, length=81)
    return workflow


@pytest.mark.parametrize(
    ("workflow", "sentence"),
    [
        (with_third_sampler(), r"KSamplerAdvanced \(high\) goes on with the model of KSamplerAdvanced \(plain\)"),
        (with_one_expert(), r"UNETLoader \(unet_high\) loads wan2.2_.* alone; svdq needs the files of both experts"),
        (from_text(), r"EmptyHunyuanLatentVideo \(i2v\) makes a video from text alone, which svdq cannot"),
        (
            changed("unet_high", unet_name="wan2.2_t2v_high.safetensors"),
            r"UNETLoader \(unet_high\) loads .*, which makes",
        ),
        ({"1": node("Wan2ImageToVideoApi", prompt="")}, r"no sampler that svdq reads \(Wan2ImageToVideoApi \(1\)\)"),
        ({"1": node("KSampler (Efficient)")}, r"no sampler that svdq reads \(KSampler \(Efficient\) \(1\)\)"),
        (
            changed("high", model=["photo", 0]),
            r"The sampler KSamplerAdvanced \(high\) has no model that .*: the way there ends at LoadImage \(photo\)",
        ),
        (
            changed("high", steps=["decode", 0]),
            r"KSamplerAdvanced \(high\) has an input that VAEDecode \(decode\) computes",
        ),
        (changed("high", steps=1_000_000_000), r"KSamplerAdvanced \(high\) has 1000000000 steps"),
        ({"nodes": [{"type": "KSampler"}]}, r"The workflow is not as ComfyUI writes it \(KeyError"),
        ({"nodes": []}, r"The workflow has no node that runs"),
    ],
)
def test_what_svdq_cannot_do_is_refused_with_the_node(workflow: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        read(workflow)


def test_parts_of_a_loader_and_stacks_of_other_nodes() -> None:
    workflow = wrapper()
    workflow["blocks"] = node("WanVideoBlockSwap", blocks_to_swap=20)
    workflow["vace"] = node("WanVideoVACEModelSelect", vace_model="vace.safetensors")
    workflow["model_low"]["inputs"] |= {"block_swap_args": ["blocks", 0], "vace_model": ["vace", 0]}
    workflow["i2v"]["inputs"]["noise_aug_strength"] = 0.03
    stack = {"switch_1": "On", "lora_name_1": "a.safetensors", "model_weight_1": 0.4}
    off = {"switch_2": "Off", "lora_name_2": "b.safetensors", "model_weight_2": 1.0}
    workflow["second"] = node("CR LoRA Stack", **stack, **off)
    found = read(workflow)
    assert [(lora.file, lora.strength) for _, lora in found.loras] == [("a.safetensors", 0.4)] * 2
    assert found.notes == (
        "WanVideoBlockSwap (blocks) concerns speed or memory only; see `svdq worker --attention`, `--compile` and "
        "`--offload`.",
        "WanVideoVACEModelSelect (vace) is the vace_model of WanVideoModelLoader (model_low), which svdq has not; svdq "
        "renders without.",
        "WanVideoImageToVideoEncode (i2v) has the noise_aug_strength 0.03, which svdq has not; svdq takes the photo as "
        "it is.",
    )


def test_weights_that_comfyui_rounds_and_last_photos_that_a_model_lacks() -> None:
    workflow = two_experts()
    workflow["unet_high"]["inputs"] |= {
        "unet_name": "wan2.1_i2v_720p_14B_bf16.safetensors",
        "weight_dtype": "fp8_e4m3fn",
    }
    workflow["high"]["inputs"] |= {"end_at_step": 10_000, "sampler_name": "euler"}
    workflow["decode"]["inputs"]["samples"] = ["high", 0]
    del workflow["low"]
    workflow["end"] = node("LoadImage", image="end.png")
    workflow["i2v"] = node("WanFirstLastFrameToVideo", **workflow["i2v"]["inputs"], end_image=["end", 0])
    found = read(workflow)
    assert (found.base, found.source.has_last_photo) == ("Wan-AI/Wan2.1-I2V-14B-720P-Diffusers", False)
    assert found.notes == (
        "UNETLoader (unet_high) rounds weights to fp8_e4m3fn; svdq takes them as the file has them.",
        "WanFirstLastFrameToVideo (i2v) has a last photo, which Wan 2.1 I2V does not take in svdq; svdq renders "
        "without.",
    )


@pytest.mark.parametrize("seed", [-1, -2, 2**63, 2**64 - 1])
def test_seeds_that_svdq_does_not_take_are_said(seed: int) -> None:
    api = two_experts()
    api["seed"] = node("Seed (rgthree)", seed=seed, button="")
    api["high"]["inputs"]["noise_seed"] = ["seed", 0]
    found = read(api)
    assert found.seed is None
    assert any(f"has the seed {seed}" in note for note in found.notes)
    api["seed"]["inputs"]["seed"] = 5
    assert read(api).seed == 5


def test_choices_in_prompts_are_said_and_not_passed_on() -> None:
    api = two_experts()
    api["yes"]["inputs"]["text"] = "A {red|blue} cat"
    found = read(api)
    assert found.source.prompt is None
    assert any("such as {red|blue}" in note for note in found.notes)
    api["yes"]["inputs"]["text"] = r"A \{red|blue} {cat}"
    assert read(api).source.prompt == r"A \{red|blue} {cat}"


def test_a_lora_of_the_manager_with_a_strength_of_0_is_off() -> None:
    api = two_experts()
    entries = [{"name": name, "strength": strength, "active": True} for name, strength in (("off", 0), ("on", 0.5))]
    api["lora_high"] = node("Lora Loader (LoraManager)", model=["unet_high", 0], loras={"__value__": entries})
    found = [(component, lora.file, lora.strength) for component, lora in read(api).loras]
    assert found[0] == ("transformer", "on.safetensors", 0.5)
    assert "off.safetensors" not in [file for _, file, _ in found]


def test_values_that_double_are_not_computed() -> None:
    api = two_experts()
    api["text0"], api["number0"] = node("PrimitiveString", value="x" * 50), node("PrimitiveInt", value=3)
    for step in range(1, 46):
        before = [f"text{step - 1}", 0]
        api[f"text{step}"] = node("StringConcatenate", string_a=before, string_b=before, delimiter="")
        api[f"number{step}"] = node("MathExpression|pysssss", a=[f"number{step - 1}", 0], expression="a * a")
    api["yes"]["inputs"]["text"], api["i2v"]["inputs"]["length"] = ["text45", 0], ["number45", 0]
    found = read(api)
    assert (found.source.prompt, found.source.frames) == (None, None)
    assert sum("which svdq cannot" in note for note in found.notes) == 2


def test_nodes_that_depend_on_each_other_are_a_sentence() -> None:
    api = two_experts()
    api["high"] = node(
        "SamplerCustom", model=["shift_high", 0], positive=["i2v", 0], negative=["i2v", 1], latent_image=["i2v", 2],
        sampler=["euler", 0], sigmas=["sigmas", 0], cfg=1.0,
    )  # fmt: skip
    api["euler"], api["sigmas"] = (
        node("KSamplerSelect", sampler_name="euler"),
        node("SplitSigmas", sigmas=["sigmas", 0]),
    )
    with pytest.raises(InputError, match=r"The noise levels of SplitSigmas \(sigmas\) depend on themselves"):
        read(api)
    with pytest.raises(InputError, match="more than 10,000 nodes"):
        read(two_experts() | {f"x{number}": node("X") for number in range(10_000)})


@pytest.mark.parametrize("workflow", [two_experts(), wrapper(), with_sigmas_by_hand(), ltx(stages=2)])
def test_values_of_the_wrong_kind_are_left_out_or_a_sentence(workflow: dict[str, Any]) -> None:
    inputs = [(place, name) for place, each in workflow.items() for name in each["inputs"]]
    wrong = itertools.cycle((None, "abc", -7, 1e300, 10**400, [1], {"lora": 5, "strength": []}, ["photo", -9]))
    for (place, name), value in zip(inputs, wrong, strict=False):
        changed = json.loads(json.dumps(workflow))
        changed[place]["inputs"][name] = value
        with contextlib.suppress(InputError):
            written(read(changed))


def broken(*_: object) -> Recipe:
    raise KeyError("ours")


BROKEN = replace(READER, read=broken)


def test_a_mistake_of_svdqs_own_is_no_advice_about_the_workflow() -> None:
    with pytest.raises(KeyError, match="ours"):
        read_recipe(two_experts(), [replace(WAN, workflow_reader=f"{__name__}:BROKEN")])
