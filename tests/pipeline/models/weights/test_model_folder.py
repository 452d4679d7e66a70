"""Model folders: a broken one is one sentence, and the weights that suit a dtype are chosen."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.video_model import Role

CPU = torch.device("cpu")
WEIGHTS = "diffusion_pytorch_model.safetensors"


def configure(file="model_index.json", **values):
    def change(folder):
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def without(component):
    return lambda folder: shutil.rmtree(folder / component)


def missing(file):
    return lambda folder: (folder / file).unlink()


def renamed(file, name):
    return lambda folder: (folder / file).rename(folder / name)


def written(file, content):
    return lambda folder: (folder / file).write_bytes(content)


def weights(change):
    def edit(folder):
        found = load_file(folder / "unet" / WEIGHTS)
        change(found)
        save_file(found, folder / "unet" / WEIGHTS)

    return edit


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without("unet"), "has no unet"),
        (configure(unet=[None, None]), "has no unet"),
        (configure(unet="nonsense"), "has no unet"),
        (configure(unet=["diffusers", "UNet2DConditionModel"]), "is a UNet2DConditionModel"),
        (configure(scheduler=["diffusers", "DDIMScheduler"]), "EulerDiscreteScheduler only"),
        (configure(_class_name="FluxPipeline"), "or WanImageToVideoPipeline such as Wan-AI/"),
        (written("model_index.json", b"[]"), "not a JSON object"),
        (missing("model_index.json"), "no readable"),
        (written("unet/config.json", b"{"), "no readable unet/config.json"),
        (written(f"unet/{WEIGHTS}", b"x" * 99), "no safetensors file"),
        (missing(f"unet/{WEIGHTS}"), "has no weights"),
        (weights(lambda found: found.pop("conv_out.bias")), "lacks 1 of its weights"),
        (weights(lambda found: found.update({"conv_out.bias": torch.ones(5)})), "unet of the model"),
    ],
)
def test_a_broken_folder_of_svd_is_one_sentence(tiny_model, tmp_path, damage, words):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    damage(folder)
    check_sentence(folder, words)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without("transformer_2"), "has no transformer_2; it must be a whole WanImageToVideoPipeline"),
        (without("text_encoder"), "has no text_encoder; it must be"),
        (configure(transformer_2=[None, None]), "must have both boundary_ratio and transformer_2"),
        (configure(boundary_ratio=None), "must have both boundary_ratio and transformer_2"),
        (configure(_class_name="WanPipeline"), "makes videos from text only (WanPipeline)"),
        (configure("scheduler/scheduler_config.json", stochastic_sampling=True), "has stochastic_sampling"),
        (configure(scheduler=["diffusers", "LCMScheduler"]), "is a LCMScheduler; svdq works with"),
        (configure(vae=["diffusers", "AutoencoderKL"]), "is a AutoencoderKL; svdq works with"),
        (configure(_class_name="FluxPipeline"), " or WanImageToVideoPipeline such as Wan-AI/"),
        (missing("vae/diffusion_pytorch_model.safetensors"), "has no weights"),
        (renamed(f"vae/{WEIGHTS}", "vae/mine.safetensors"), "has no weights but mine.safetensors, and svdq reads"),
        (renamed(f"vae/{WEIGHTS}", "vae/model.bin"), "has no weights but model.bin, and svdq reads"),
        (missing("tokenizer/tokenizer.json"), "has no readable tokenizer/tokenizer.json"),
        (lambda folder: (folder / "tokenizer/tokenizer.json").write_text('{"model": '), "has no readable tokenizer/"),
        (configure("vae/config.json", base_dim=16), "cannot be loaded (Cannot load"),
        (configure("transformer/config.json", num_layers="x"), "The transformer of the model"),
    ],
)
def test_a_broken_folder_of_wan_is_one_sentence(tiny_wan, tmp_path, damage, words):
    folder = shutil.copytree(tiny_wan, tmp_path / "model")
    damage(folder)
    check_sentence(folder, words)


def check_sentence(folder, words):
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        open_model(resolve(str(folder)), Role(encode=True, decode=True), CPU, torch.float32)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_weights_that_the_model_lacks_are_ignored(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    weights(lambda found: found.update(more=torch.ones(1)))(folder)
    open_model(resolve(str(folder)), Role(), CPU, torch.float32)


def test_broken_weights_of_any_expert_are_found_before_a_rank_starts(tiny_wan, tmp_path):
    folder = shutil.copytree(tiny_wan, tmp_path / "model")
    written(f"transformer_2/{WEIGHTS}", b"broken")(folder)
    with pytest.raises(InputError, match=r"transformer_2/diffusion\S+ of the model .* no safetensors file"):
        resolve(str(folder), on_gpus=False)


def test_half_precision_weights_are_preferred_for_float16(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    unet = folder / "unet"
    name = "diffusion_pytorch_model"
    (unet / f"{name}.safetensors").rename(unet / f"{name}.fp16.safetensors")
    model = open_model(resolve(str(folder)), Role(), CPU, torch.float16)
    assert model.pipeline.unet.dtype == torch.float16
    with pytest.raises(InputError, match="half precision weights only"):
        resolve(str(folder), on_gpus=False)


def test_components_that_are_loaded_in_float32_need_full_weights(tiny_wan, tmp_path):
    """Half precision ones of the VAE do not do, although the ranks are on GPUs."""
    folder = shutil.copytree(tiny_wan, tmp_path / "model")
    weights = folder / "vae/diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".fp16.safetensors"))
    with pytest.raises(InputError, match=r"The vae of the model .* has half precision weights only"):
        resolve(str(folder), on_gpus=True)


def test_several_files_of_one_component(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    file = folder / "unet" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    names = sorted(weights)
    file.unlink()
    index = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        shard = f"diffusion_pytorch_model-0000{number}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, file.with_name(shard))
        index |= dict.fromkeys(part, shard)
    (folder / "unet" / f"{file.name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    ours = open_model(resolve(str(folder)), Role(), CPU, torch.float32).pipeline.unet.state_dict()
    expected = open_model(resolve(str(tiny_model)), Role(), CPU, torch.float32).pipeline.unet.state_dict()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
    # What an earlier copy in three parts has left is not read, also where weights are read one by one.
    save_file({name: 0 * weights[name] for name in names}, file.with_name(f"{file.stem}-00003-of-00003.safetensors"))
    lora = {
        f"unet.conv_in.lora_{part}.weight": torch.ones(shape)
        for part, shape in (("A", (1, 8, 3, 3)), ("B", (32, 1, 1, 1)))
    }
    save_file(lora, tmp_path / "lora.safetensors")
    (tmp_path / "lora.toml").write_text(
        f'base = "{folder}"\nlora = [{{file = "lora.safetensors", component = "unet", strength = 0}}]'
    )
    ours = open_model(resolve(str(tmp_path / "lora.toml")), Role(), CPU, torch.float32).pipeline.unet.state_dict()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
    next((folder / "unet").glob("*-00002-of*.safetensors")).unlink()
    with pytest.raises(InputError, match=r"00002-of-00002\.safetensors of the model .* is missing"):
        open_model(resolve(str(folder)), Role(), CPU, torch.float32)
    (folder / "unet" / f"{file.name}.index.json").unlink()
    with pytest.raises(InputError, match=r"The unet of the model .* has weights in parts without an index of them"):
        open_model(resolve(str(folder)), Role(), CPU, torch.float32)
