"""Files that people have: all components in one, parts as ComfyUI has them, Gemma in GGUF and fp8, and LoRAs."""

import json
import re
import shutil
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from svdq.pipeline.models.compute.options import ComputeOptions
from svdq.pipeline.models.families import layout_of
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.ltx.family import LtxParameters
from svdq.pipeline.models.ltx.layout import FILE_NAMES
from svdq.pipeline.models.names.model_names import family_of_model, resolve
from svdq.pipeline.models.needs import SizedModel
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.models.weights.components import check_model_file
from svdq.pipeline.models.weights.model_folder import weights_in
from tests.pipeline.models.wan_files import finish
from tests.pipeline.rendering import denoise

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
EVERYTHING = Role(embed=True, encode=True, decode=True)
#: Patterns in diffusers' names and what the original names have in their place, by component.
NAMES = {
    "transformer": {
        r"^audio_proj_in\.": "audio_patchify_proj.",
        r"^proj_in\.": "patchify_proj.",
        r"^(audio_)?time_embed\.": r"\1adaln_single.",
        r"^(audio_)?prompt_adaln\.": r"\1prompt_adaln_single.",
        r"^av_cross_attn_(video|audio)_scale_shift\.": r"av_ca_\1_scale_shift_adaln_single.",
        r"^av_cross_attn_(?:video|audio)_(a2v|v2a)_gate\.": r"av_ca_\1_gate_adaln_single.",
        r"(video|audio)_a2v_cross_attn_scale_shift_table": r"scale_shift_table_a2v_ca_\1",
        r"norm_(q|k)\b": r"\1_norm",
    },
    "vae": {
        r"^encoder\.down_blocks\.(\d)\.resnets": r"encoder.down_blocks.<2*\1>.resnets",
        r"^encoder\.down_blocks\.(\d)\.downsamplers\.0": r"encoder.down_blocks.<2*\1+1>",
        r"^encoder\.mid_block": "encoder.down_blocks.8",
        r"^decoder\.up_blocks\.(\d)\.resnets": r"decoder.up_blocks.<2*\1+2>.resnets",
        r"^decoder\.up_blocks\.(\d)\.upsamplers\.0": r"decoder.up_blocks.<2*\1+1>",
        r"^decoder\.mid_block": "decoder.up_blocks.0",
        r"\.resnets\.": ".res_blocks.",
        r"^latents_(mean|std)$": r"per_channel_statistics.\1-of-means",
    },
    "audio_vae": {r"^latents_(mean|std)$": r"per_channel_statistics.\1-of-means"},
    "vocoder": {
        r"\.upsamplers\.": ".ups.",
        r"\.resnets\.": ".resblocks.",
        r"\.conv_in\.": ".conv_pre.",
        r"\.conv_out\.": ".conv_post.",
        r"\.act_out\.": ".act_post.",
        r"\.downsample\.filter": ".downsample.lowpass.filter",
    },
    "connectors": {
        r"^(video|audio)_connector\.": r"\1_embeddings_connector.",
        r"\.transformer_blocks\.": ".transformer_1d_blocks.",
        r"norm_(q|k)\b": r"\1_norm",
        r"^(video|audio)_text_proj_in\.": r"text_embedding_projection.\1_aggregate_embed.",
    },
    "text_encoder": {r"^(?:language_model\.model|model\.language_model)\.": "model."},
}
PREFIXES = {"transformer": "model.diffusion_model.", **{each: f"{each}." for each in ("vae", "audio_vae", "vocoder")}}
#: From transformers' names of Gemma's layers to llama.cpp's.
GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers.": "blk.",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "layer_scalar": "layer_output_scale.weight",
}


def original(name: str, component: str = "transformer") -> str:
    for pattern, theirs in NAMES.get(component, {}).items():
        name = re.sub(pattern, theirs, name)
    return re.sub(r"<(\d)\*(\d)(\+\d)?>", lambda found: str(2 * int(found[2]) + int(found[3] or 0)), name)


def stored(folder: Path, component: str, *, is_whole: bool = True) -> dict[str, torch.Tensor]:
    """The weights of a component under the original names, with the prefixes that they have in a file with all."""
    weights = load_file(next((folder / component).glob("*.safetensors")))
    found = {}
    for name, weight in weights.items():
        theirs, prefix = original(name, component), PREFIXES.get(component, "") if is_whole else ""
        if is_whole and "_embeddings_connector" in theirs:
            prefix = PREFIXES["transformer"]
        if component != "text_encoder" or theirs.startswith("model."):  # people's files may lack what is for images
            found[prefix + theirs] = weight
    return found


def result_of(name: str, image, stages: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """The frames and the sound of a video."""
    model = open_model(resolve(name), EVERYTHING, CPU, torch.float32)
    values = model.complete(LtxParameters(prompt="A dog.", frames=9, width=64, height=64, seed=1, stages=stages))
    state = model.encode(image, values)
    denoiser = model.denoiser(state, values)
    for index in range(values.steps):
        state |= denoiser.step(state, index)
    return model.decode(state, values, 9), model.sound(state, values)


def write_model_file(folder: Path, base: Path, **weights: str) -> str:
    lines = "\n".join(f'{component} = "{file}"' for component, file in weights.items())
    (folder / "mine.toml").write_text(f'base = "{base}"\n[weights]\n{lines}\n')
    return str(folder / "mine.toml")


def without_weights(folder: Path, target: Path, components: Collection[str]) -> Path:
    """Copy a model without the weights of some components, so that these are surely not read."""
    left_out = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(folder, target, ignore=lambda at, names: left_out(at, names) if Path(at).name in components else [])
    return target


def assert_same(mine: str, folder: Path, image) -> None:
    for ours, theirs in zip(result_of(mine, image), result_of(str(folder), image), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["2.3", "2.5"])
def test_one_file_of_all_components_makes_the_video_of_the_folder(folder_of, image, tmp_path, kind):
    parts = ("transformer", "vae", "audio_vae", "vocoder", "connectors")
    weights = {part: stored(folder_of(kind), part) for part in parts}
    save_file(
        {name: weight for each in weights.values() for name, weight in each.items()}, tmp_path / "all.safetensors"
    )
    for part in parts:
        assert len(weights_in(tmp_path / "all.safetensors", FILE_NAMES[part])) == len(weights[part]), part
    base = without_weights(folder_of(kind), tmp_path / "base", parts)
    mine = write_model_file(tmp_path, base, **dict.fromkeys(parts, "all.safetensors"))
    sentences = list(check_model_file(model := resolve(mine), layout_of(model)))
    assert sorted(each.partition(":")[0] for each in sentences) == sorted(parts)
    assert_same(mine, folder_of(kind), image)


@pytest.mark.parametrize("kind", ["2.3", "2.5"])
def test_parts_of_comfyui_make_the_video_of_the_folder(folder_of, image, tmp_path, kind):
    folder, projection = folder_of(kind), "text_embedding_projection."
    connectors = stored(folder, "connectors")
    of_text = {name: weight for name, weight in connectors.items() if name.startswith(projection)}
    files = {
        "transformer": stored(folder, "transformer") | {each: connectors[each] for each in connectors.keys() - of_text},
        "vae": stored(folder, "vae", is_whole=False),
        "audio_vae": stored(folder, "audio_vae") | stored(folder, "vocoder"),
        "text_encoder": stored(folder, "text_encoder") | of_text,
        "latent_upsampler": stored(folder, "latent_upsampler"),
    }
    for name, weights in files.items():
        save_file(weights, tmp_path / f"{name}.safetensors")
    named = {name: f"{name}.safetensors" for name in files}
    named |= {"vocoder": named["audio_vae"], "connectors": named["transformer"]}
    base = without_weights(folder, tmp_path / "base", named)
    assert_same(write_model_file(tmp_path, base, **named), folder, image)
    size = SizedModel.of(resolve(str(tmp_path / "mine.toml")), "bfloat16")
    for component in ("transformer", "vae", "audio_vae", "vocoder", "connectors"):
        weights = load_file(next((folder / component).glob("*.safetensors")))
        assert size.num_weights[component] == sum(weight.numel() for weight in weights.values()), component


@pytest.mark.parametrize(("kind", "architecture"), [("2.3", "gemma3"), ("2.5", "gemma4")])
def test_gemma_in_gguf_makes_the_video_of_the_folder(folder_of, image, tmp_path, kind, architecture):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "gemma.gguf", architecture)
    for name, weight in stored(folder_of(kind), "text_encoder").items():
        for ours, theirs in GGUF.items():
            name = name.replace(ours, theirs)
        # llama.cpp's Gemma3Model.norm_shift is 1 for norms, which Gemma 4 multiplies by the weight alone.
        has_one_added = architecture == "gemma3" and name.endswith("norm.weight")
        writer.add_tensor(name, (weight + has_one_added).numpy())
    writer.add_tensor("rope_freqs.weight", torch.ones(8).numpy())
    finish(writer)
    base = without_weights(folder_of(kind), tmp_path / "base", ["text_encoder"])
    assert_same(write_model_file(tmp_path, base, text_encoder="gemma.gguf"), folder_of(kind), image)


def test_weights_in_fp8_are_the_same_made_and_stored(tiny_ltx, image, tmp_path):
    files = {}
    for component in ("text_encoder", "transformer", "connectors"):
        rounded = {}
        for name, weight in stored(tiny_ltx, component).items():
            rounded[name] = weight
            in_block = "transformer_blocks" in name and name.endswith(".weight") and weight.ndim == 2
            if in_block or name.endswith("proj.weight"):
                scale = weight.abs().max() / 448
                rounded[name] = (weight / scale).to(torch.float8_e4m3fn)
                rounded[name.replace(".weight", ".scale_weight")] = scale
        files[component] = f"{component}.safetensors"
        save_file(rounded, tmp_path / files[component])
    mine = write_model_file(tmp_path, tiny_ltx, **files)
    made, kept, plain = (
        open_model(resolve(name), EVERYTHING, CPU, torch.float32, ComputeOptions(weights=each))
        for name, each in ((mine, "made"), (mine, "stored"), (str(tiny_ltx), "made"))
    )
    video = LtxParameters(prompt="A dog.", frames=9, width=64, height=64, seed=1, stages=1)
    states = []
    for each in (made, kept, plain):
        values = each.complete(video)
        states.append(denoise(each, each.encode(image, values) | each.embed(values), values))
    for name in ("video_text", "audio_text", "latents"):
        assert torch.equal(states[0][name], states[1][name]), name
        assert not torch.equal(states[0][name], states[2][name]), name


def test_keys_of_a_lora_for_the_text_projection_are_left_out_and_named(tiny_ltx, tmp_path):
    modules = {"diffusion_model.transformer_blocks.0.attn1.to_q": 32}
    modules["text_embedding_projection.video_aggregate_embed"] = 48
    lora = {}
    for module, columns in modules.items():
        lora |= {f"{module}.lora_A.weight": torch.ones(1, columns), f"{module}.lora_B.weight": torch.ones(32, 1)}
    save_file(lora, tmp_path / "style.safetensors")
    (tmp_path / "mine.toml").write_text(
        f'base = "{tiny_ltx}"\n[[lora]]\nfile = "style.safetensors"\ncomponent = "transformer"\n'
    )
    sentence, warning = check_model_file(model := resolve(str(tmp_path / "mine.toml")), layout_of(model))
    assert "changes 1 weights" in sentence
    assert "2 of 4 keys match the transformer; 2 do not, such as text_embedding_projection." in warning


@pytest.mark.parametrize("pipeline", ["LTX2ImageToVideoPipeline", "LTX2ConditionPipeline"])
def test_a_folder_that_another_pipeline_of_diffusers_has_saved(tiny_ltx, tmp_path, pipeline):
    folder = shutil.copytree(tiny_ltx, tmp_path / "ltx")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": pipeline}))
    ours, theirs = resolve(str(folder)), resolve(str(tiny_ltx))
    assert (ours.family, ours.layout, ours.facts) == (theirs.family, theirs.layout, theirs.facts)
    assert family_of_model(str(folder)) == "ltx"
