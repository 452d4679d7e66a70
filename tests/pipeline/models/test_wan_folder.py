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
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.model_names import resolve
from svdq.pipeline.models.video_model import Role

CPU = torch.device("cpu")
EXPERTS = {"transformer", "transformer_2"}
#: Opens a model for each role in a fork of its own, and prints the components of which each opened or mapped weights.
OPENS = """
import json, os, sys, torch
from pathlib import Path
from diffusers import AutoencoderKLWan, WanImageToVideoPipeline, WanTransformer3DModel
from transformers import UMT5EncoderModel
from svdq.pipeline.models.video_model import Role
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
    with pytest.raises(InputError, match=r"transformer_2/diffusion\S+ of the model .* is cut off or no safetensors"):
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
        (without("text_encoder"), "has no text_encoder; it must be"),
        (configure("model_index.json", transformer_2=[None, None]), "must have both boundary_ratio and transformer_2"),
        (configure("model_index.json", boundary_ratio=None), "must have both boundary_ratio and transformer_2"),
        (configure("model_index.json", _class_name="WanPipeline"), "makes videos from text only (WanPipeline)"),
        (
            configure("scheduler/scheduler_config.json", stochastic_sampling=True),
            "has stochastic_sampling",
        ),
        (configure("model_index.json", scheduler=["diffusers", "LCMScheduler"]), "is a LCMScheduler; svdq works with"),
        (configure("model_index.json", vae=["diffusers", "AutoencoderKL"]), "is a AutoencoderKL; svdq works with"),
        (configure("model_index.json", _class_name="FluxPipeline"), " or WanImageToVideoPipeline such as Wan-AI/"),
        (missing("vae/diffusion_pytorch_model.safetensors"), "has no weights"),
        (missing("tokenizer/tokenizer.json"), "has no readable tokenizer/tokenizer.json"),
        (lambda folder: (folder / "tokenizer/tokenizer.json").write_text('{"model": '), "has no readable tokenizer/"),
        (configure("vae/config.json", base_dim=16), "cannot be loaded (Cannot load"),
        (configure("transformer/config.json", num_layers="x"), "The transformer of the model"),
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
