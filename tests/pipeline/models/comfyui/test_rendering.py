"""A workflow of ComfyUI, imported and rendered with stand-ins for its files."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from svdq.pipeline.models.comfyui.folders import find_folders
from svdq.pipeline.models.comfyui.workflow import read_workflow
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.ltx.family import LtxParameters
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.models.wan.family import FAMILY
from tests.pipeline import ranks
from tests.pipeline.models.comfyui.workflows import TEMPLATES, ltx, read, written
from tests.pipeline.models.ltx.test_files import stored, without_weights
from tests.pipeline.models.test_model_file import VIDEO, with_diffusers
from tests.pipeline.models.wan_files import original_name, save_lora


@pytest.mark.slow
def test_the_template_renders_as_a_model_file_by_hand_and_as_diffusers(
    tiny_wan: Path, image: Image.Image, tmp_path: Path
) -> None:
    """ComfyUI's template with its LoRAs of 4 steps switched on, and stand-ins for its files."""
    document = json.loads((TEMPLATES / "video_wan2_2_14B_i2v.json").read_text())
    next(each for each in document["nodes"] if each["id"] == 129)["widgets_values"][-1] = True
    (tmp_path / "template.json").write_text(json.dumps(document))
    models = tmp_path / "ComfyUI" / "models"
    for folder in ("diffusion_models", "text_encoders", "vae", "loras"):
        (models / folder).mkdir(parents=True)
    for component, name in (("transformer", "high"), ("transformer_2", "low")):
        weights = load_file(next((tiny_wan / component).glob("*.safetensors")))
        file = models / "diffusion_models" / f"wan2.2_i2v_{name}_noise_14B_fp8_scaled.safetensors"
        save_file({original_name(each): weight for each, weight in weights.items()}, file)
        lora = models / "loras" / f"wan2.2_i2v_lightx2v_4steps_lora_v1_{name}_noise.safetensors"
        save_lora(lora, weights, "comfyui")
        (tmp_path / f"{component}.safetensors").symlink_to(lora)
    for component, name in (("text_encoder", "text_encoders/umt5_xxl_fp8_e4m3fn_scaled"), ("vae", "vae/wan_2.1_vae")):
        weights = load_file(next((tiny_wan / component).glob("*.safetensors")))
        save_file(weights, models / f"{name}.safetensors")
    path = tmp_path / "template.json"
    made = written(read(read_workflow(path)), find_folders(models, path), path)
    assert (made.missing, made.notes) == ((), ())
    target = tmp_path / "imported.toml"
    target.write_text(made.toml.replace("Wan-AI/Wan2.2-I2V-A14B-Diffusers", str(tiny_wan)))
    by_hand = tmp_path / "by-hand.toml"
    by_hand.write_text(f"""
base = "{tiny_wan}"
[[lora]]
file = "transformer.safetensors"
component = "transformer"
[[lora]]
file = "transformer_2.safetensors"
component = "transformer_2"
[defaults]
steps = 4
guidance_scale = 1.0
[scheduler]
class = "FlowMatchEulerDiscreteScheduler"
shift = 5.0
sigmas = [1.0, 0.75, 0.5, 0.25]
""")
    video = FAMILY.complete(VIDEO, resolve(str(target), dtype="fp32").facts)
    assert (video.steps, video.guidance_scale) == (4, 1.0)
    ours, theirs = (ranks.render(str(path), image, [video], num_ranks=1)[0] for path in (target, by_hand))
    np.testing.assert_array_equal(ours, theirs)
    reference = with_diffusers(tiny_wan, tmp_path, image, video, strengths=(1.0, 1.0))
    assert np.abs(ours.astype(int) - reference).max() <= 1


@pytest.mark.slow
def test_a_workflow_of_ltx_2_renders_as_a_model_file_by_hand(
    tiny_ltx: Path, image: Image.Image, tmp_path: Path
) -> None:
    """Two stages, with noise levels by hand, and stand-ins for the files; the base has no weights."""
    workflow = ltx(stages=2)
    workflow["empty"]["inputs"] |= {"width": 64, "height": 32, "length": 9}
    workflow["sigmas_0"]["inputs"]["sigmas"] = "1.0, 0.8, 0.4, 0.0"
    path, models = tmp_path / "ltx.json", tmp_path / "models"
    path.write_text(json.dumps(workflow))
    (models / "checkpoints").mkdir(parents=True)
    (models / "text_encoders").mkdir()
    (models / "latent_upscale_models").mkdir()
    parts = ("transformer", "connectors", "vae", "audio_vae", "vocoder")
    weights = {name: weight for part in parts for name, weight in stored(tiny_ltx, part).items()}
    save_file(weights, models / "checkpoints" / "ltx-2.3-22b-distilled.safetensors")
    save_file(stored(tiny_ltx, "text_encoder"), models / "text_encoders" / "gemma.safetensors")
    upsampler = models / "latent_upscale_models" / "ltx-2.3-spatial-upscaler-x2-1.1.safetensors"
    save_file(stored(tiny_ltx, "latent_upsampler"), upsampler)
    made = written(read(read_workflow(path)), find_folders(models, path), path)
    assert (made.missing, made.notes) == ((), ())
    base = without_weights(tiny_ltx, tmp_path / "base", (*parts, "text_encoder", "latent_upsampler"))
    imported, by_hand = tmp_path / "imported.toml", tmp_path / "by-hand.toml"
    imported.write_text(made.toml.replace("diffusers/LTX-2.3-Distilled-Diffusers", str(base)))
    by_hand.write_text(f'base = "{tiny_ltx}"\n[scheduler]\nsigmas = [1.0, 0.8, 0.4]\n')
    given = LtxParameters(prompt="The cat meows.", seed=7)
    by_options = LtxParameters(**given.model_dump(exclude_none=True), frames=9, width=128, height=64, stages=2)
    ours, theirs = _ltx_frames(imported, given, image), _ltx_frames(by_hand, by_options, image)
    assert {64, 128} <= {*ours.shape}
    assert torch.equal(ours, theirs)


def _ltx_frames(path: Path, parameters: LtxParameters, image: Image.Image) -> torch.Tensor:
    everything = Role(embed=True, encode=True, decode=True)
    model = open_model(resolve(str(path)), everything, torch.device("cpu"), torch.float32)
    values = model.complete(parameters)
    state = model.encode(image.resize((128, 64)), values)
    denoiser = model.denoiser(state, values)
    for index in range(values.steps):
        state |= denoiser.step(state, index)
    return model.decode(state, values, 9)
