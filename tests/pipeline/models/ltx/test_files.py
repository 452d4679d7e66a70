"""Files that people have: a transformer in one file under the original names, alone or beside other components."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from svdq.pipeline.models.components import check_model_file
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.ltx.family import LtxParameters
from svdq.pipeline.models.ltx.layout import LAYOUT
from svdq.pipeline.models.model_folder import weights_in
from svdq.pipeline.models.model_names import resolve
from svdq.pipeline.models.video_model import Role

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
EVERYTHING = Role(embed=True, encode=True, decode=True)
#: From diffusers' names to the original ones.
NAMES = {
    "audio_proj_in.": "audio_patchify_proj.",
    "proj_in.": "patchify_proj.",
    "audio_time_embed.": "audio_adaln_single.",
    "time_embed.": "adaln_single.",
    "audio_prompt_adaln.": "audio_prompt_adaln_single.",
    "prompt_adaln.": "prompt_adaln_single.",
    "av_cross_attn_video_scale_shift.": "av_ca_video_scale_shift_adaln_single.",
    "av_cross_attn_video_a2v_gate.": "av_ca_a2v_gate_adaln_single.",
    "av_cross_attn_audio_scale_shift.": "av_ca_audio_scale_shift_adaln_single.",
    "av_cross_attn_audio_v2a_gate.": "av_ca_v2a_gate_adaln_single.",
    "video_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_video",
    "audio_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_audio",
    "norm_q": "q_norm",
    "norm_k": "k_norm",
}


def original(name: str) -> str:
    start = next((ours for ours in NAMES if name.startswith(ours)), "")
    name = NAMES[start] + name.removeprefix(start) if start else name
    for ours in (
        "video_a2v_cross_attn_scale_shift_table",
        "audio_a2v_cross_attn_scale_shift_table",
        "norm_q",
        "norm_k",
    ):
        name = name.replace(ours, NAMES[ours])
    return name


def frames_of(name: str, image) -> torch.Tensor:
    model = open_model(resolve(name), EVERYTHING, CPU, torch.float32)
    values = model.complete(LtxParameters(prompt="A dog.", frames=9, width=64, height=64, seed=1, stages=1))
    state = model.encode(image, values)
    denoiser = model.denoiser(state, values)
    for index in range(values.steps):
        state |= denoiser.step(state, index)
    return model.decode(state, values, 9)


@pytest.mark.parametrize("is_whole", [False, True], ids=["transformer only", "all components"])
def test_a_transformer_in_one_file_makes_the_video_of_the_folder(tiny_ltx, image, tmp_path, is_whole):
    weights = load_file(next((tiny_ltx / "transformer").glob("*.safetensors")))
    prefix = "model.diffusion_model." if is_whole else ""
    stored = {f"{prefix}{original(name)}": weight for name, weight in weights.items()}
    if is_whole:
        others = ("vae.encoder.conv_in.conv.weight", f"{prefix}video_embeddings_connector.learnable_registers")
        stored |= {name: torch.ones(3) for name in others}
    save_file(stored, tmp_path / "ltx.safetensors")
    assert len(weights_in(tmp_path / "ltx.safetensors")) == len(weights)
    (tmp_path / "mine.toml").write_text(f'base = "{tiny_ltx}"\n[weights]\ntransformer = "ltx.safetensors"\n')
    (sentence,) = check_model_file(resolve(str(tmp_path / "mine.toml")), LAYOUT)
    assert sentence.startswith("transformer: all weights are in")
    assert torch.equal(frames_of(str(tmp_path / "mine.toml"), image), frames_of(str(tiny_ltx), image))


@pytest.mark.parametrize("prefix", ["diffusion_model.", "transformer."])
def test_a_lora_under_original_names_and_under_those_of_diffusers(tiny_ltx, image, tmp_path, prefix):
    weights = load_file(next((tiny_ltx / "transformer").glob("*.safetensors")))
    modules = [
        name.removesuffix(".weight") for name in weights if name.endswith(("to_q.weight", "adaln.linear.weight"))
    ]
    lora = {}
    for seed, module in enumerate(modules):
        name = prefix + (original(f"{module}.")[:-1] if prefix == "diffusion_model." else module)
        rows, columns = weights[f"{module}.weight"].shape
        generator = torch.Generator().manual_seed(seed)
        lora[f"{name}.lora_A.weight"] = torch.randn(2, columns, generator=generator)
        lora[f"{name}.lora_B.weight"] = torch.randn(rows, 2, generator=generator)
    save_file(lora, tmp_path / "style.safetensors")
    (tmp_path / "mine.toml").write_text(
        f'base = "{tiny_ltx}"\n[[lora]]\nfile = "style.safetensors"\ncomponent = "transformer"\nstrength = 0.1\n'
    )
    (sentence,) = check_model_file(resolve(str(tmp_path / "mine.toml")), LAYOUT)
    assert f"changes {len(modules)} weights" in sentence
    assert not torch.equal(frames_of(str(tmp_path / "mine.toml"), image), frames_of(str(tiny_ltx), image))
