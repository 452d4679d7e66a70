"""Wan's folders: a role opens only its files, and a wrong folder is one sentence before anything is loaded."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys

import pytest
import torch

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.base import Role
from svdq.pipeline.models.folder_check import check_folder
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.model_names import resolve
from svdq.pipeline.models.wan.family import FAMILY, read_facts
from svdq.pipeline.models.wan.layout import LAYOUT
from svdq.pipeline.models.wan.parameters import WanParameters
from svdq.pipeline.models.wan.tiny import write_tiny_wan

CPU = torch.device("cpu")
EXPERTS = {"transformer", "transformer_2"}
#: Opens a model for each role in a fork of its own, and prints the components of which each opened or mapped weights.
OPENS = """
import json, os, sys, torch
from pathlib import Path
from diffusers import AutoencoderKLWan, WanImageToVideoPipeline, WanTransformer3DModel
from transformers import UMT5EncoderModel
from svdq.pipeline.models.base import Role
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.model_names import resolve
found = []
sys.addaudithook(lambda event, given: event == "open" and found.append(str(given[0])))
folder, roles = sys.argv[1], json.loads(sys.argv[2])
resolved = resolve(folder)
found.clear()
for role in roles:
    if fork := os.fork():
        os.waitpid(fork, 0)
        continue
    names = role.pop("components")
    role = Role(**role, components=names and frozenset(names))
    model = open_model(resolved, role, torch.device("cpu"), torch.float32)
    # Of files that libraries open outside of Python: a mapping keeps its file's path.
    found += Path("/proc/self/maps").read_text().split()
    weights = [Path(each) for each in found if each.startswith(folder) and each.endswith(".safetensors")]
    print(json.dumps(sorted({each.parent.name for each in weights})), flush=True)
    os._exit(0)
"""


@pytest.mark.slow
def test_a_role_opens_only_its_own_files(tiny_wan):
    roles = [
        ({"components": ["transformer"]}, ["transformer"]),
        ({"components": ["transformer_2"], "decode": True}, ["transformer_2", "vae"]),
        ({"components": ["transformer"], "encode": True}, ["text_encoder", "transformer", "vae"]),
        ({"components": None}, ["transformer", "transformer_2"]),
    ]
    command = [sys.executable, "-c", OPENS, str(tiny_wan), json.dumps([role for role, _ in roles])]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [json.loads(line) for line in ran.stdout.splitlines()] == [expected for _, expected in roles]


@pytest.mark.parametrize("expert", sorted(EXPERTS))
def test_a_role_does_not_load_the_other_expert(tiny_wan, expert):
    [other] = EXPERTS - {expert}
    model = open_model(resolve(str(tiny_wan)), Role(components=frozenset({expert})), CPU, torch.float32)
    assert (getattr(model.pipeline, other), model.pipeline.vae, model.pipeline.text_encoder) == (None, None, None)


def test_broken_weights_of_any_expert_are_seen_before_a_rank_starts(tiny_wan, tmp_path):
    shutil.copytree(tiny_wan, tmp_path / "model")
    (tmp_path / "model/transformer_2/diffusion_pytorch_model.safetensors").write_bytes(b"broken")
    with pytest.raises(InputError, match=r"transformer_2/diffusion\S+ of the model .* is no safetensors file"):
        resolve(str(tmp_path / "model"), on_gpus=False)


def test_only_the_rank_that_encodes_needs_ftfy(tiny_wan, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "ftfy" else find(name, *more))
    with pytest.raises(InputError, match=r"need ftfy, which is not installed; run `pip install"):
        open_model(resolve(str(tiny_wan)), Role(encode=True), CPU, torch.float32)
    assert open_model(resolve(str(tiny_wan)), Role(decode=True), CPU, torch.float32).pipeline.text_encoder is None


def test_only_what_encodes_and_decodes_is_kept(tiny_wan):
    encoder = open_model(resolve(str(tiny_wan)), Role(encode=True, components=frozenset()), CPU, torch.float32).pipeline
    assert encoder.text_encoder is not None
    assert encoder.vae.encoder is not None
    assert (encoder.vae.decoder, encoder.transformer, encoder.transformer_2) == (None, None, None)
    decoder = open_model(resolve(str(tiny_wan)), Role(decode=True, components=frozenset()), CPU, torch.float32).pipeline
    assert decoder.vae.decoder is not None
    assert (decoder.vae.encoder, decoder.text_encoder, decoder.tokenizer) == (None, None, None)


def configure(file, **values):
    def change(folder):
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def without(component):
    def change(folder):
        shutil.rmtree(folder / component)

    return change


def missing(file):
    return lambda folder: (folder / file).unlink()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("transformer_2"), "has no transformer_2; it must be a whole WanImageToVideoPipeline"),
        (without("transformer"), "has no transformer; it must be"),
        (without("text_encoder"), "has no text_encoder; it must be"),
        (configure("model_index.json", transformer_2=[None, None]), "has boundary_ratio 0.9 and no transformer_2 for"),
        (configure("model_index.json", boundary_ratio=None), "has a transformer_2 and no boundary_ratio"),
        (configure("model_index.json", boundary_ratio=9), "has boundary_ratio 9; it must be a number such as 0.9"),
        (configure("model_index.json", _class_name="WanPipeline"), "makes videos from text only (WanPipeline)"),
        (configure("transformer/config.json", in_channels=40), "do not belong together: in_channels is 40 in the"),
        (configure("transformer/config.json", _class_name="WanVACETransformer3DModel"), "do not belong together"),
        (configure("transformer_2/config.json", num_layers=3), "num_layers is 2 in the transformer and 3 in"),
        (configure("transformer/config.json", image_dim=1280), "do not belong together: image_dim"),
        (configure("vae/config.json", _class_name="AutoencoderKL"), "its class is AutoencoderKL where it must be"),
        (configure("text_encoder/config.json", d_model=64), "its text_dim is 32 where it must be 64"),
        (configure("scheduler/scheduler_config.json", _class_name="LCMScheduler"), "it is a LCMScheduler; svdq works"),
        (configure("scheduler/scheduler_config.json", use_flow_sigmas=False), "use_flow_sigmas is off"),
        (configure("scheduler/scheduler_config.json", use_karras_sigmas=True), "use_karras_sigmas is on"),
        (configure("model_index.json", vae=["diffusers", "AutoencoderKL"]), "is a AutoencoderKL; svdq works with"),
        (configure("model_index.json", _class_name="FluxPipeline"), " or WanImageToVideoPipeline such as Wan-AI/"),
        (lambda folder: (folder / "vae/diffusion_pytorch_model.safetensors").unlink(), "has no weights"),
        (missing("tokenizer/tokenizer.json"), "has no readable tokenizer/tokenizer.json"),
        (missing("tokenizer/tokenizer_config.json"), "has no readable tokenizer/tokenizer_config.json"),
        (lambda folder: (folder / "tokenizer/tokenizer.json").write_text('{"model": '), "has no readable tokenizer/"),
        (configure("tokenizer/tokenizer.json", model={"vocab": []}), "tokenizer.json of the model"),
        (configure("vae/config.json", base_dim=16), "has weights of another model: encoder.conv_in.weight is [8, 3"),
    ],
)
def test_a_wrong_folder_is_one_sentence(tiny_wan, tmp_path, change, words):
    folder = tmp_path / "model"
    shutil.copytree(tiny_wan, folder)
    change(folder)
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        open_model(resolve(str(folder)), Role(encode=True, decode=True), CPU, torch.float32)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


#: The settings that svdq itself reads.
SETTINGS = {
    "model_index.json": ["boundary_ratio", "expand_timesteps", "transformer", "transformer_2", "vae", "scheduler"],
    "transformer/config.json": ["patch_size", "num_attention_heads", "in_channels", "text_dim", "image_dim", "ffn_dim"],
    "transformer_2/config.json": ["num_layers", "_class_name"],
    "vae/config.json": ["base_dim", "z_dim", "in_channels", "scale_factor_temporal", "scale_factor_spatial"],
    "text_encoder/config.json": ["d_model", "vocab_size"],
    "scheduler/scheduler_config.json": ["_class_name", "flow_shift", "num_train_timesteps", "solver_p"],
}


@pytest.mark.parametrize(("file", "setting"), [(file, each) for file in SETTINGS for each in SETTINGS[file]])
def test_nonsense_in_a_config_is_one_sentence_or_harmless(tiny_wan, tmp_path, file, setting):
    shutil.copytree(tiny_wan, tmp_path / "model")
    for value in ("x", None, [], [1], {}, {"a": 1}, True, False, -1, 0, 10**30, 0.5, 1e300):
        shutil.copy(tiny_wan / file, tmp_path / "model" / file)
        configure(file, **{setting: value})(tmp_path / "model")
        try:
            check_folder(tmp_path / "model", "it", LAYOUT)
        except InputError as error:
            sentence = str(error)
        else:
            sentence = "."
            FAMILY.segments(WanParameters(seed=1, steps=9), read_facts(tmp_path / "model", "it"))
        assert sentence.endswith("."), value


def test_a_transformer_that_does_not_fit_the_vae(tmp_path):
    write_tiny_wan(tmp_path, "ti2v-5b")
    configure("transformer/config.json", in_channels=36)(tmp_path)
    with pytest.raises(InputError, match=r"its in_channels is 36 where it must be 48 \(latents, photo and mask\)"):
        open_model(resolve(str(tmp_path)), Role(), CPU, torch.float32)


def test_an_image_encoder_that_is_missing_or_not_used(tmp_path):
    write_tiny_wan(tmp_path / "a", "i2v-14b")
    configure("model_index.json", image_encoder=[None, None])(tmp_path / "a")
    with pytest.raises(InputError, match="needs one, and the folder has none"):
        open_model(resolve(str(tmp_path / "a")), Role(), CPU, torch.float32)
    write_tiny_wan(tmp_path / "b", "i2v-14b")
    configure("transformer/config.json", image_dim=None)(tmp_path / "b")
    with pytest.raises(InputError, match="uses none, and the folder has an image_encoder"):
        open_model(resolve(str(tmp_path / "b")), Role(), CPU, torch.float32)
    write_tiny_wan(tmp_path / "c", "i2v-14b")
    missing("image_processor/preprocessor_config.json")(tmp_path / "c")
    with pytest.raises(InputError, match="has no readable image_processor/preprocessor_config"):
        check_folder(tmp_path / "c", "it", LAYOUT)
    configure("model_index.json", image_processor=[None, None])(tmp_path / "c")
    with pytest.raises(InputError, match="has an image_encoder and no image_processor; get the model again"):
        check_folder(tmp_path / "c", "it", LAYOUT)
