"""A role loads only its components; what fails while they are loaded is one sentence."""

import importlib.util

import pytest
import torch

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.pipeline.models.compute.failures import in_a_sentence
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.models.weights.components import ComponentLoader

CPU = torch.device("cpu")
EXPERTS = {"transformer", "transformer_2"}


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


def runs_out(*_, **__) -> None:
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
