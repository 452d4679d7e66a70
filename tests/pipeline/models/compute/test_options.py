"""The options of computing: what each changes in the result, that ranks agree, and that compiling serves all videos."""

import importlib.util

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.compute import options
from svdq.pipeline.models.compute.options import ComputeOptions
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.svd.family import LAYOUT, SvdParameters
from svdq.pipeline.models.svd.model import SvdModel
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.models.weights.model_folder import DTYPES
from tests.pipeline import ranks, rendering

CPU = torch.device("cpu")
PARAMETERS = SvdParameters(seed=3, steps=2, frames=2, width=64, height=64)


@pytest.fixture(scope="module")
def tensors(tiny_model, photo):
    """The tensors that rank 0 sends on for two photos and two seeds."""
    model = SvdModel(resolve(str(tiny_model)), Role(encode=True, components=frozenset()), CPU, torch.float32)
    photos = [photo, photo.rotate(90)]
    return [model.encode(each, PARAMETERS.model_copy(update={"seed": n})) for n, each in enumerate(photos)]


def denoise(model, tensors, parameters=PARAMETERS):
    """Do all steps of one video, on tensors as they come from a neighbor: made outside of inference mode."""
    tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    with torch.inference_mode():
        return rendering.denoise(model, tensors, parameters)["latents"]


def open_with(folder, chosen=options.DEFAULTS, dtype=torch.float32):
    return SvdModel(resolve(str(folder)), Role(), CPU, dtype, chosen)


@pytest.fixture(scope="module")
def eager(tiny_model, tensors):
    model = open_with(tiny_model)
    return [denoise(model, each) for each in tensors]


def difference(latents, expected):
    return float((latents.float() - expected).abs().max() / expected.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most"), [("fp16", 0.02), ("bf16", 0.2)])
def test_half_precision_is_near_and_written_down(tiny_model, tensors, eager, name, most) -> None:
    chosen = ComputeOptions(dtype=name)
    dtype = getattr(torch, DTYPES[name])
    model = open_with(tiny_model, chosen, dtype)
    latents = denoise(model, {key: tensor.to(dtype) for key, tensor in tensors[0].items()})
    assert latents.dtype == dtype
    assert 0 < difference(latents, eager[0]) < most
    assert model.info.compute == {"dtype": DTYPES[name]}


class AttentionBatches(TorchFunctionMode):
    """Notes the batch of each call of scaled dot-product attention."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.found.append(len(args[0]))
        return func(*args, **(kwargs or {}))


def test_split_attention_gives_the_same_bits(tiny_model, tensors, eager) -> None:
    model = open_with(tiny_model)
    options.split_attention(model.pipeline.unet, max_batch=20)
    with AttentionBatches() as batches:
        found = denoise(model, tensors[0])
    assert torch.equal(found, eager[0])
    assert max(batches.found) == 16  # half of 2 x 4 x 4, the elements of attention along the frames


def test_on_cuda_no_attention_has_a_larger_batch_than_its_kernels_take(tiny_model) -> None:
    """At twice 2048x1152, since the tiny model attends at half the resolution; without contents, for want of a GPU."""
    unet = open_with(tiny_model).pipeline.unet
    unet = options.apply(unet, options.DEFAULTS, LAYOUT.blocks, torch.device("cuda")).to("meta")

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta")

    with torch.inference_mode(), AttentionBatches() as batches:
        unet(empty(2, 1, 8, 288, 512), empty(), empty(2, 1, unet.config.cross_attention_dim), empty(2, 3))
    assert max(batches.found) == 36_864  # half of 73,728


@pytest.mark.slow
def test_split_attention_compiles_in_one_piece(tiny_model, compiled_graphs) -> None:
    model = open_with(tiny_model)
    modules = model.pipeline.unet.modules()
    block = next(each for each in modules if type(each).__name__ == "TemporalBasicTransformerBlock")
    frames = torch.randn(4, 16, block.norm_in.normalized_shape[0])
    context = torch.randn(32, 1, block.attn2.to_k.in_features)
    with torch.inference_mode():
        whole = block(frames, num_frames=2, encoder_hidden_states=context)
        options.split_attention(model.pipeline.unet, max_batch=20)
        compiled = torch.compile(block, fullgraph=True, dynamic=False, backend=options.BACKEND)
        assert torch.equal(compiled(frames, num_frames=2, encoder_hidden_states=context), whole)
    assert len(compiled_graphs) == 1


@pytest.mark.slow
def test_frames_do_not_depend_on_the_ranks_with_int8_weights(tiny_model, photo) -> None:
    options = ComputeOptions(approximate=("int8",))
    videos = [PARAMETERS, PARAMETERS.model_copy(update={"seed": 4, "steps": 3, "max_guidance_scale": 1.0})]
    shared = ranks.render(str(tiny_model), photo, videos, num_ranks=2, options=options)
    alone = SvdModel(resolve(str(tiny_model)), Role.of_rank(0), CPU, torch.float32, options)
    for frames, video in zip(shared, videos, strict=True):
        made = alone.encode(photo, video)
        made["latents"] = denoise(alone, made, video)
        assert frames.std() > 5
        np.testing.assert_array_equal(frames, alone.decode(made, video, video.num_frames).numpy())


@pytest.fixture
def compiled_graphs(monkeypatch):
    """The compiled graphs; the compiler leaves each as it is."""
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(options, "BACKEND", backend)
    torch.compiler.reset()
    yield graphs
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["blocks", pytest.param("whole", marks=pytest.mark.long)])
def test_what_was_compiled_at_the_warm_up_serves_every_video_of_the_shape(
    tiny_model, tensors, eager, compiled_graphs, compiled
) -> None:
    model = open_with(tiny_model, ComputeOptions(compiled=compiled))
    model.warm_up(PARAMETERS)
    num_graphs = len(compiled_graphs)
    assert num_graphs >= 1
    found = [denoise(model, each) for each in tensors]
    assert max(map(difference, found, eager)) < 1e-4
    # Latents in other orders in memory are made alike.
    strided = {**tensors[0], "latents": tensors[0]["latents"].transpose(2, 4).contiguous().transpose(2, 4)}
    assert torch.equal(denoise(model, strided), found[0])
    assert len(compiled_graphs) == num_graphs

    # Another shape; with blocks that is more than the eight forms that torch would keep of one function.
    longer = PARAMETERS.model_copy(update={"frames": 3})
    latents = tensors[0]["latents"][:, :1].repeat(1, 3, 1, 1, 1)
    assert denoise(model, {**tensors[0], "latents": latents}, longer).shape[1] == 3
    assert len(compiled_graphs) == 2 * num_graphs


class Reads(TorchDispatchMode):
    """Notes what has to wait for a device: copies from the host or to it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            devices = {each.device.type for each in (*args, result) if isinstance(each, torch.Tensor)}
            if len(devices) > 1:
                self.found.append(str(func))
        return result


@pytest.mark.slow
def test_a_step_never_waits_for_the_device(tiny_model) -> None:
    """On the meta device, which has no contents: whatever reads a value back raises."""
    model = open_with(tiny_model)
    meta = torch.device("meta")
    shape = (1, 2, 4, 8, 8)
    made = {"image_embedding": torch.zeros(1, 1, 32), "image_latents": torch.zeros(1, 4, 8, 8)}
    made["image_embedding"] = torch.zeros(1, 1, model.pipeline.unet.config.cross_attention_dim)
    for guided in (True, False):
        parameters = PARAMETERS if guided else PARAMETERS.model_copy(update={"max_guidance_scale": 1.0})
        denoiser = model.denoiser(made, parameters)
        denoiser.unet = lambda: model.pipeline.unet.to(meta)
        for name in ("image_embedding", "image_latents", "added_time_ids", "guidance_scale"):
            setattr(denoiser, name, getattr(denoiser, name).to(meta))
        denoiser.scheduler.timesteps = denoiser.scheduler.timesteps.to(meta)
        state = {"latents": torch.zeros(shape, device=meta)}
        with Reads() as reads:
            for index in range(parameters.steps):
                state = denoiser.step(state, index)
        assert state["latents"].device == meta
        assert state["latents"].shape == shape
        assert reads.found == []
        # It would be seen: with its sigmas on the device diffusers' scheduler compares them there.
        denoiser.scheduler.sigmas = denoiser.scheduler.sigmas.to(meta)
        with pytest.raises(RuntimeError, match="meta"):
            denoiser.step(state, 0)


def test_samples_share_tables_but_no_counter(tiny_model, tensors) -> None:
    model = open_with(tiny_model)
    first, second = (model.denoiser(tensors[0], PARAMETERS).scheduler for _ in range(2))
    assert first.timesteps is second.timesteps  # set once: that reads them back from the device
    first.set_begin_index(1)
    assert (first.begin_index, second.begin_index) == (1, None)


@pytest.mark.slow
def test_int8_is_near_and_says_so(tiny_model, tensors, eager) -> None:
    chosen = ComputeOptions(approximate=("int8",))
    model = open_with(tiny_model, chosen)
    assert 1e-4 < difference(denoise(model, tensors[0]), eager[0]) < 0.1
    assert "approximate (int8)" in model.info.notice
    assert model.info.compute["approximate"] == model.info.compute["native"] == ["int8"]
    assert options.weight_bytes(model.pipeline.unet) < 0.7 * options.weight_bytes(open_with(tiny_model).pipeline.unet)


def test_int8_without_its_package_is_one_sentence(tiny_model, monkeypatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "comfy_kitchen" else find(name))
    with pytest.raises(
        InputError, match=r"^--approximate int8 needs the package comfy-kitchen; run `pip install .*\[int8\]"
    ):
        open_with(tiny_model, ComputeOptions(approximate=("int8",)))


def test_models_without_a_unet_take_no_options() -> None:
    for name in ("preview", "simulated:step_ms=1"):
        with pytest.raises(InputError, match="has no weights, so it cannot be run with compiled, dtype"):
            open_model(resolve(name), Role(), CPU, torch.float32, ComputeOptions(dtype="bf16", compiled="blocks"))
