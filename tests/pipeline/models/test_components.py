"""A role opens only its files; what fails while they are loaded is one sentence."""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.pipeline.models.components import ComponentLoader
from svdq.pipeline.models.failures import in_a_sentence
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
        ({"components": ["transformer"], "encode": True}, ["transformer", "vae"]),
        ({"components": ["transformer"], "embed": True, "encode": True}, ["text_encoder", "transformer", "vae"]),
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


def test_only_the_rank_that_encodes_needs_ftfy(tiny_wan, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "ftfy" else find(name, *more))
    with pytest.raises(InputError, match=r"need ftfy, which is not installed; run `pip install"):
        open_model(resolve(str(tiny_wan)), Role(embed=True, encode=True), CPU, torch.float32)
    assert open_model(resolve(str(tiny_wan)), Role(decode=True), CPU, torch.float32).pipeline.text_encoder is None


def test_only_what_encodes_and_decodes_is_kept(tiny_wan):
    encoder = open_model(
        resolve(str(tiny_wan)), Role(embed=True, encode=True, components=frozenset()), CPU, torch.float32
    ).pipeline
    assert encoder.text_encoder is not None
    assert encoder.vae.encoder is not None
    assert (encoder.vae.decoder, encoder.transformer, encoder.transformer_2) == (None, None, None)
    decoder = open_model(resolve(str(tiny_wan)), Role(decode=True, components=frozenset()), CPU, torch.float32).pipeline
    assert decoder.vae.decoder is not None
    assert (decoder.vae.encoder, decoder.text_encoder, decoder.tokenizer) == (None, None, None)


def runs_out(*_) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def test_memory_that_runs_out_says_what_is_needed_and_what_to_do(tiny_model, monkeypatch) -> None:
    monkeypatch.setattr(ComponentLoader, "load", runs_out)
    weights = sum(file.stat().st_size for file in tiny_model.glob("unet/*.safetensors"))
    for dtype, share in ((torch.float32, 1.0), (torch.float16, 0.5)):
        with pytest.raises(
            InputError, match=r"memory ran out, and this rank needs .* fewer ranks \(--ranks\)"
        ) as caught:
            open_model(resolve(str(tiny_model)), Role(), CPU, dtype)
        # The headers are not weights.
        needed = float(str(caught.value).partition("needs ")[2].partition(" MB")[0])
        assert needed == pytest.approx(weights * share / 1e6, rel=0.02)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "memory ran out"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), "memory ran out"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "memory ran out"),
        (ZeroDivisionError("division by zero"), r"cannot be loaded \(division by zero\)"),
        (KeyError("quick"), r"cannot be loaded \(KeyError 'quick'\)"),
        (ValueError("first line:\n    second line."), r"cannot be loaded \(first line: second line\)"),
    ],
)
def test_whatever_is_raised_becomes_one_sentence(error: Exception, words: str) -> None:
    with pytest.raises(InputError, match=rf"^The model x .*{words}.*\.$") as caught, in_a_sentence("The model x", CPU):
        raise error
    assert "\n" not in str(caught.value)
    assert "StableVideo" not in str(caught.value)  # models of any family are loaded


def test_our_own_errors_are_sentences_already() -> None:
    with pytest.raises(UnavailableError, match=r"^As it is\.$"), in_a_sentence("The model x", CPU):
        raise UnavailableError("As it is.")
