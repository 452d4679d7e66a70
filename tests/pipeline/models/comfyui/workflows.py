"""Workflows in the API format, as small as they can be, for tests to change."""

import importlib.resources
import json
from pathlib import Path
from typing import Any

from svdq.pipeline.models.comfyui.model_toml import Imported, to_model_file
from svdq.pipeline.models.comfyui.recipe import Recipe, read_recipe
from svdq.pipeline.models.comfyui.workflow import read_workflow
from svdq.pipeline.models.comfyui_folders import Folders
from svdq.pipeline.models.families import FAMILIES

TEMPLATES = Path(str(importlib.resources.files("comfyui_workflow_templates_json"))) / "templates"
CHECKPOINT = "ltx-2.3-22b-distilled.safetensors"
Api = dict[str, dict[str, Any]]


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    """A node of the API format."""
    return {"class_type": kind, "inputs": inputs}


def read(workflow: dict[str, Any]) -> Recipe:
    """Read a workflow as JSON has it."""
    return read_recipe(json.loads(json.dumps(workflow)), FAMILIES)


def template(name: str) -> Recipe:
    """Read a workflow that comes with ComfyUI."""
    return read(read_workflow(TEMPLATES / f"{name}.json"))


def written(recipe: Recipe, folders: Folders = Folders(models=None), path: Path = Path("w.json")) -> Imported:  # noqa: B008
    """Return what was read as a model file."""
    return to_model_file(recipe, folders, path, FAMILIES)


def two_experts() -> Api:
    """Wan 2.2 with a LoRA for each expert, 2 + 2 steps."""
    api: Api = {
        "clip": node("CLIPLoader", clip_name="umt5_xxl_fp8_e4m3fn_scaled.safetensors", type="wan", device="default"),
        "vae": node("VAELoader", vae_name="wan_2.1_vae.safetensors"),
        "photo": node("LoadImage", image="cat.png"),
        "yes": node("CLIPTextEncode", text="The cat jumps.", clip=["clip", 0]),
        "no": node("CLIPTextEncode", text="blurry", clip=["clip", 0]),
        "i2v": node(
            "WanImageToVideo", width=832, height=480, length=81, batch_size=1,
            positive=["yes", 0], negative=["no", 0], vae=["vae", 0], start_image=["photo", 0],
        ),
        "decode": node("VAEDecode", samples=["low", 0], vae=["vae", 0]),
        "save": node("CreateVideo", fps=16, images=["decode", 0]),
    }  # fmt: skip
    for place, name in enumerate(("high", "low")):
        api[f"unet_{name}"] = node("UNETLoader", unet_name=f"wan2.2_i2v_{name}_noise_14B_fp8_scaled.safetensors")
        lora = {"lora_name": f"{name}.safetensors", "strength_model": 1.0000000000000002}
        api[f"lora_{name}"] = node("LoraLoaderModelOnly", model=[f"unet_{name}", 0], **lora)
        api[f"shift_{name}"] = node("ModelSamplingSD3", model=[f"lora_{name}", 0], shift=5.000000000000001)
        api[name] = node(
            "KSamplerAdvanced", add_noise="disable" if place else "enable", noise_seed=7, steps=4, cfg=1.0,
            sampler_name="euler", scheduler="simple", start_at_step=2 * place, end_at_step=10_000 if place else 2,
            return_with_leftover_noise="disable" if place else "enable", model=[f"shift_{name}", 0],
            positive=["i2v", 0], negative=["i2v", 1], latent_image=["high" if place else "i2v", 0 if place else 2],
        )  # fmt: skip
    return api


def wrapper() -> Api:
    """The same with the nodes of ComfyUI-WanVideoWrapper."""
    api: Api = {
        "t5": node("LoadWanVideoT5TextEncoder", model_name="umt5-xxl-enc-bf16.safetensors"),
        "vae": node("WanVideoVAELoader", model_name="Wan2_1_VAE_bf16.safetensors"),
        "photo": node("LoadImage", image="cat.png"),
        "texts": node("WanVideoTextEncode", positive_prompt="It jumps.", negative_prompt="blurry", t5=["t5", 0]),
        "i2v": node(
            "WanVideoImageToVideoEncode", width=832, height=480, num_frames=81, vae=["vae", 0], start_image=["photo", 0]
        ),
        "first": node("WanVideoLoraSelect", lora="first.safetensors", strength=0.5),
        "second": node("WanVideoLoraSelect", lora="second.safetensors", strength=1.0, prev_lora=["first", 0]),
        "decode": node("WanVideoDecode", samples=["low", 0], vae=["vae", 0]),
        "save": node("VHS_VideoCombine", frame_rate=16, images=["decode", 0]),
    }
    for place, name in enumerate(("high", "low")):
        api[f"model_{name}"] = node(
            "WanVideoModelLoader", model=f"Wan2_2-I2V-A14B-{name}.safetensors", lora=["second", 0]
        )
        api[name] = node(
            "WanVideoSampler", steps=8, cfg=1.0, shift=8.0, seed=3, scheduler="euler", start_step=4 * place,
            end_step=-1 if place else 4, model=[f"model_{name}", 0], image_embeds=["i2v", 0], text_embeds=["texts", 0],
            **({"samples": ["high", 0]} if place else {}),
        )  # fmt: skip
    return api


def ltx(*, stages: int = 1) -> Api:
    """A photo and a prompt, with the schedules of distilled models."""
    api: Api = {
        "model": node("CheckpointLoaderSimple", ckpt_name=CHECKPOINT),
        "clip": node("LTXAVTextEncoderLoader", text_encoder="gemma.safetensors", ckpt_name=CHECKPOINT),
        "sound": node("LTXVAudioVAELoader", ckpt_name=CHECKPOINT),
        "image": node("LoadImage", image="cat.png"),
        "photo": node("LTXVPreprocess", image=["image", 0], img_compression=33),
        "yes": node("CLIPTextEncode", text="The cat meows.", clip=["clip", 0]),
        "no": node("CLIPTextEncode", text="blurry", clip=["clip", 0]),
        "texts": node("LTXVConditioning", positive=["yes", 0], negative=["no", 0], frame_rate=24.0),
        "empty": node("EmptyLTXVLatentVideo", width=768 // stages, height=512 // stages, length=97, batch_size=1),
        "empty_sound": node("LTXVEmptyLatentAudio", audio_vae=["sound", 0], frames_number=97, frame_rate=24),
        "sampler": node("KSamplerSelect", sampler_name="euler"),
        "noise": node("RandomNoise", noise_seed=7),
        "save": node("CreateVideo", images=["frames", 0], audio=["decoded", 0], fps=24.0),
    }
    levels = ("1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0", "0.909375, 0.725, 0.421875, 0.0")
    before = ["empty", 0], ["empty_sound", 0]
    for place in range(stages):
        if place:
            api["upscaler"] = node("LatentUpscaleModelLoader", model_name="ltx-2.3-spatial-upscaler-x2-1.1.safetensors")
            upscaler = {"upscale_model": ["upscaler", 0], "vae": ["model", 2]}
            api["upsampled"] = node("LTXVLatentUpsampler", samples=["apart_0", 0], **upscaler)
            before = ["upsampled", 0], ["apart_0", 1]
        api[f"i2v_{place}"] = node(
            "LTXVImgToVideoInplace", vae=["model", 2], image=["photo", 0], latent=before[0], strength=1.0, bypass=False
        )
        api[f"both_{place}"] = node("LTXVConcatAVLatent", video_latent=[f"i2v_{place}", 0], audio_latent=before[1])
        guided = {"positive": ["texts", 0], "negative": ["texts", 1]}
        api[f"guider_{place}"] = node("CFGGuider", model=["model", 0], cfg=1.0, **guided)
        api[f"sigmas_{place}"] = node("ManualSigmas", sigmas=levels[place])
        api[f"stage_{place}"] = node(
            "SamplerCustomAdvanced", noise=["noise", 0], guider=[f"guider_{place}", 0], sampler=["sampler", 0],
            sigmas=[f"sigmas_{place}", 0], latent_image=[f"both_{place}", 0],
        )  # fmt: skip
        api[f"apart_{place}"] = node("LTXVSeparateAVLatent", av_latent=[f"stage_{place}", 0])
    api["frames"] = node("VAEDecodeTiled", samples=[f"apart_{stages - 1}", 0], vae=["model", 2])
    api["decoded"] = node("LTXVAudioVAEDecode", samples=[f"apart_{stages - 1}", 1], audio_vae=["sound", 0])
    return api
