"""Wan in half precision, with int8 weights and compiled."""

import itertools
import json
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import comfy_kitchen
import psutil
import pytest
import torch

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.compute import int8_attention
from svdq.pipeline.models.compute import options as compute
from svdq.pipeline.models.compute.options import ComputeOptions
from svdq.pipeline.models.loader import dtype_for, open_model
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.needs import SizedModel
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.models.wan.family import WanParameters
from svdq.pipeline.models.wan.tiny import write_tiny_wan
from tests.pipeline.references import call_diffusers
from tests.pipeline.rendering import denoise, pipeline_of

CPU = torch.device("cpu")
EVERYTHING = Role(embed=True, encode=True, decode=True)


def parameters(model):
    return model.complete(WanParameters(prompt="A dog.", seed=3, frames=5, steps=4, width=64, height=64))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["i2v-a14b", "distilled"])
def test_bfloat16_keeps_what_must_be_float32_and_equals_diffusers(folder_of, photo, kind):
    model = open_model(resolve(str(folder_of(kind))), EVERYTHING, CPU, torch.bfloat16)
    for transformer in (model.pipeline.transformer, model.pipeline.transformer_2):
        dtypes = {name: weight.dtype for name, weight in transformer.named_parameters()}
        full = ("time_embedder", "scale_shift_table", "norm2")
        assert {dtypes[name] for name in dtypes if any(each in name for each in full)} == {torch.float32}
        assert {dtypes[name] for name in dtypes if "to_q" in name or "ffn" in name} == {torch.bfloat16}
    assert {each.dtype for each in model.pipeline.vae.parameters()} == {torch.float32}
    values = parameters(model)
    state = denoise(model, model.encode(photo, values), values)
    assert state["prompt_embeds"].dtype == torch.bfloat16
    assert state["condition"].dtype == torch.float32
    expected = call_diffusers(pipeline_of(folder_of(kind), torch.bfloat16), photo, values, output_type="latent")
    assert torch.equal(state["latents"], expected.to(state["latents"].dtype))
    assert state["latents"].std() > 0.1


def test_the_default_on_gpus_is_bfloat16(tiny_wan, tiny_model):
    gpu = torch.device("cuda")
    assert dtype_for(resolve(str(tiny_wan)), CPU) == torch.float32
    assert dtype_for(resolve(str(tiny_wan)), gpu) == torch.bfloat16
    assert dtype_for(resolve(str(tiny_wan)), gpu, ComputeOptions(dtype="fp16")) == torch.float16
    assert dtype_for(resolve(str(tiny_model)), gpu) == dtype_for(resolve("preview"), gpu) == torch.float16


def test_attention_is_left_alone_on_gpus(tiny_wan):
    transformer = open_model(resolve(str(tiny_wan)), Role(), CPU, torch.float32).pipeline.transformer
    before = dict(transformer.attn_processors)
    compute.apply(transformer, compute.DEFAULTS, {"WanTransformerBlock"}, torch.device("cuda"))
    assert dict(transformer.attn_processors) == before


def write_wide_transformer(folder):
    """Replace the transformer by two layers of the published width, in float32 zeros; return the largest weight."""
    from diffusers import WanTransformer3DModel

    path = folder / "config.json"
    wide = {"num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824, "num_layers": 2}
    path.write_text(json.dumps(json.loads(path.read_text()) | wide))
    with torch.device("meta"):
        weights = WanTransformer3DModel.from_config(json.loads(path.read_text())).state_dict()
    stops = list(itertools.accumulate(4 * weight.numel() for weight in weights.values()))
    header = {
        name: {"dtype": "F32", "shape": list(weight.shape), "data_offsets": [start, stop]}
        for (name, weight), start, stop in zip(weights.items(), [0, *stops], stops, strict=False)
    }
    text = json.dumps(header).encode()
    with (folder / "diffusion_pytorch_model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + stops[-1])  # a hole: zeros that take no disk
    return max(weights.values(), key=torch.numel)


class PeakMemory:
    """The largest growth of this process's own memory, without pages of mapped files, in bytes."""

    def __enter__(self):
        self._start, self.peak, self._done = self._own(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_error):
        self._done.set()
        self._thread.join()

    @staticmethod
    def _own() -> int:
        found = psutil.Process().memory_info()
        return found.rss - found.shared

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.peak = max(self.peak, self._own() - self._start)


def peak_of_loading(folder):
    """Load a model in int8; return peak bytes beside its weights, sizes of these, and the estimate."""
    arguments = Role(), CPU, torch.bfloat16, ComputeOptions(approximate=("int8",))
    open_model(resolve(str(folder)), *arguments)  # imports take memory
    largest = write_wide_transformer(folder / "transformer")
    with PeakMemory() as memory:
        model = open_model(resolve(str(folder)), *arguments)
    estimated = SizedModel.of(resolve(str(folder)), "bfloat16", arguments[-1]).weights("transformer")
    weights = compute.weight_bytes(model.pipeline.transformer)
    return memory.peak - weights, weights, largest.numel(), estimated


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the pages of mapped files apart")
def test_float32_files_are_quantized_one_weight_at_a_time(tmp_path, monkeypatch):
    """In a new process with malloc's own limits: what earlier tests have freed stays in this one."""
    write_tiny_wan(tmp_path, "ti2v-5b")
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        beside, weight_bytes, largest, estimated = process.submit(peak_of_loading, tmp_path).result()
    assert weight_bytes == pytest.approx(estimated, rel=0.03)
    # In bfloat16, rotated in float32, and as comfy-kitchen rounds it; two layers have 700 million weights.
    assert beside < 16 * largest


@pytest.mark.slow
@pytest.mark.parametrize("what", ["blocks", "whole"])
def test_compiled_transformers_give_the_same_bits(tiny_wan, photo, monkeypatch, what):
    monkeypatch.setattr(compute, "BACKEND", "eager")
    usual = open_model(resolve(str(tiny_wan)), EVERYTHING, CPU, torch.float32)
    model = open_model(resolve(str(tiny_wan)), EVERYTHING, CPU, torch.float32, ComputeOptions(compiled=what))
    values = parameters(usual)
    model.warm_up(values)
    found, expected = (denoise(each, each.encode(photo, values), values)["latents"] for each in (model, usual))
    assert torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("received", [False, True])
def test_what_was_compiled_at_the_warm_up_serves_every_video_of_the_shape(folder_of, photo, monkeypatch, received):
    """Tensors that this rank has made in inference mode, and those that a thread has received, are of other kinds."""
    graphs = []
    monkeypatch.setattr(compute, "BACKEND", lambda graph, _inputs: graphs.append(graph) or graph.forward)
    monkeypatch.setattr("svdq.pipeline.models.wan.model.IMAGE_TOKENS", 50)  # of the tiny model
    torch.compiler.reset()
    model = resolve(str(folder_of("i2v-14b")))
    model = open_model(model, EVERYTHING, CPU, torch.float32, ComputeOptions(compiled="whole"))
    values = parameters(model)
    model.warm_up(values)
    assert len(graphs) == 1
    state = dict(model.encode(photo, values))
    if received:
        state = {name: torch.from_numpy(tensor.numpy().copy()) for name, tensor in state.items()}
    state |= model.denoiser(state, values).step(state, 0)
    assert len(graphs) == 1
    torch.compiler.reset()


@pytest.mark.long
@pytest.mark.timeout(900)  # the compiler takes minutes on a busy machine
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when its compiler is imported
def test_the_real_compiler_changes_only_rounding_and_keeps_its_code(tiny_wan, photo, monkeypatch, tmp_path):
    """On Wan, whose blocks compile as one graph; those of Stable Video Diffusion take nine."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    plain = open_model(resolve(str(tiny_wan)), EVERYTHING, CPU, torch.float32)
    values = parameters(plain)
    state = plain.encode(photo, values)
    compiled = open_model(resolve(str(tiny_wan)), Role(), CPU, torch.float32, ComputeOptions(compiled="blocks"))
    expected, found = (denoise(model, state, values)["latents"] for model in (plain, compiled))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    assert any(path.suffix in {".so", ".cpp"} for path in tmp_path.rglob("*"))


@pytest.mark.slow
def test_attention_is_dispatched_to_a_backend(tiny_wan, photo):
    resolved = resolve(str(tiny_wan))
    plain = open_model(resolved, EVERYTHING, CPU, torch.float32)
    values = parameters(plain)
    expected = denoise(plain, plain.encode(photo, values), values)["latents"]
    other = open_model(resolved, EVERYTHING, CPU, torch.float32, ComputeOptions(attention="_native_math"))
    found = denoise(other, other.encode(photo, values), values)["latents"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    assert not torch.equal(found, expected), "another order of sums"
    assert other.info.compute == {"dtype": "float32", "attention": "_native_math"}
    assert "approximate" not in other.info.notice
    again = denoise(plain, plain.encode(photo, values), values)["latents"]
    assert torch.equal(again, expected), "other models keep theirs"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("flashy", "--attention flashy is not known; the backends of this diffusers are flash, "),
        ("sage", r"--attention sage cannot be used here \(.*\); install it, or choose another"),
        ("int8", r"--attention int8 cannot be used here: it is for GPUs; leave it out\."),
    ],
)
def test_a_backend_of_attention_that_cannot_be_used_is_a_sentence(tiny_wan, name, says):
    with pytest.raises(InputError, match=says):
        open_model(resolve(str(tiny_wan)), EVERYTHING, CPU, torch.float32, ComputeOptions(attention=name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny_wan", "tiny_ltx"])
def test_int8_attention_is_given_heads_and_masks_as_torchs_own(request, monkeypatch, photo, name):
    """With torch's in place of the kernel, which runs on GPUs only, the bits are the same."""
    resolved, calls = resolve(str(request.getfixturevalue(name))), []

    def attention(query, key, value, *, scale, attn_mask):
        calls.append(attn_mask)
        assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, scale=scale)

    monkeypatch.setattr(comfy_kitchen, "int8_attention", attention)
    monkeypatch.setattr(int8_attention, "_lack", lambda _: "")
    found = []
    for options in (ComputeOptions(), ComputeOptions(attention="int8")):
        model = open_model(resolved, EVERYTHING, CPU, torch.float32, options)
        video = model.family.parameters(prompt="A dog.", seed=3, frames=9, steps=2, width=64, height=64)
        values = model.complete(video)
        found.append(denoise(model, model.encode(photo, values), values)["latents"])
        assert bool(calls) == (options.attention == "int8")
    assert torch.equal(*found)
    assert any(mask is not None for mask in calls) == (name == "tiny_ltx")
    assert model.info.compute["approximate"] == ["int8 attention"]
    assert "approximate (int8 attention)" in model.info.notice


@pytest.mark.parametrize(
    ("capability", "cuda", "says"),
    [
        ((7, 0), "13.0", "has no kernel for this GPU"),
        ((8, 9), "12.8", "it needs torch for CUDA 13, and this one is for 12.8"),
    ],
)
def test_int8_attention_on_a_gpu_that_cannot(tiny_wan, monkeypatch, capability, cuda, says):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    transformer = open_model(resolve(str(tiny_wan)), Role(), CPU, torch.float32).pipeline.transformer
    with pytest.raises(InputError, match=f"^--attention int8 cannot be used here: .*{says}"):
        compute.apply(transformer, ComputeOptions(attention="int8"), (), torch.device("cuda"))
    monkeypatch.setitem(sys.modules, "comfy_kitchen", None)
    with pytest.raises(InputError, match=r"it needs the package comfy-kitchen; run `pip install .*int8"):
        compute.apply(transformer, ComputeOptions(attention="int8"), (), torch.device("cuda"))


def test_attention_in_int8_is_approximate(tiny_model):
    assert ComputeOptions(attention="sage").changed() == {"attention": "sage", "approximate": ["sage"]}
    both = ComputeOptions(attention="int8", approximate=("int8",))
    assert both.changed() == {"attention": "int8", "approximate": ["int8", "int8 attention"], "native": ["int8"]}
    assert ComputeOptions(attention="flash").changed() == {"attention": "flash"}
    with pytest.raises(InputError, match="--attention is for transformers, "):
        open_model(resolve(str(tiny_model)), EVERYTHING, CPU, torch.float32, ComputeOptions(attention="flash"))
