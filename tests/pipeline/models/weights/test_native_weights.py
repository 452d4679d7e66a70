"""Layers that multiply in the format of their file have the bits of comfy-kitchen's own tensors, on all ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.compute.options import ComputeOptions
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.ltx.family import FAMILY as LTX
from svdq.pipeline.models.ltx.family import LtxParameters
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.resolved_model import ResolvedModel
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.models.wan.family import FAMILY, WanParameters
from svdq.pipeline.models.weights.comfy_quant import DATA, SCALE, SECOND_SCALE, Mark
from svdq.pipeline.models.weights.kitchen import multiply_of
from svdq.worker.roles import choose_native
from tests.pipeline import ranks
from tests.pipeline.models.comfy_files import KINDS, quantized, save_quantized
from tests.pipeline.models.ltx.test_files import original as original_ltx_name
from tests.pipeline.models.wan_files import original_name, write_model_file
from tests.pipeline.references import call_diffusers, call_ltx, open_diffusers
from tests.pipeline.rendering import denoise, one_thread

CPU = torch.device("cpu")
EVERYTHING = Role(embed=True, encode=True, decode=True)
HIGH, LOW = frozenset({"transformer"}), frozenset({"transformer_2"})
VIDEO = WanParameters(prompt="A dog runs.", seed=1, steps=4, frames=5, width=64, height=64)


class QuantizesInput(nn.Linear):
    """A layer as ComfyUI has it for fp8, whose input is quantized, too."""

    def forward(self, x: Tensor) -> Tensor:
        from comfy_kitchen.tensor import QuantizedTensor

        rows: Any = QuantizedTensor.from_float(x.reshape(-1, x.shape[-1]), "TensorCoreFP8Layout")
        return functional.linear(rows, self.weight, self.bias).reshape(*x.shape[:-1], -1)


def hold_quantized(transformer: nn.Module, kind: str) -> None:
    """Put comfy-kitchen's tensors in place of the weights of the linear layers in blocks."""
    from comfy_kitchen.tensor import QuantizedTensor

    for name, layer in transformer.named_modules():
        if isinstance(layer, nn.Linear) and "blocks." in name and layer.in_features % KINDS[kind].multiple == 0:
            made: Any = QuantizedTensor.from_float(layer.weight.detach(), KINDS[kind].layout, **KINDS[kind].settings)
            layer.weight = nn.Parameter(made, requires_grad=False)
            if kind == "fp8":
                layer.__class__ = QuantizesInput


def write_model(folder: Path, base: Path, kind: str) -> str:
    """A model file with both experts of Wan in a format."""
    text = f'base = "{base}"\n[weights]\n'
    for component in ("transformer", "transformer_2"):
        weights = load_file(next((base / component).glob("*.safetensors")))
        save_quantized(folder / f"{component}.safetensors", weights, kind, original_name)
        text += f'{component} = "{component}.safetensors"\n'
    (folder / "mine.toml").write_text(text)
    return str(folder / "mine.toml")


def native(model: str) -> ComputeOptions:
    return ComputeOptions(weights="stored", native=resolve(model).formats)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["int8 ConvRot", *(pytest.param(each, marks=pytest.mark.long) for each in ("int8 by rows", "fp8"))]
)
def test_frames_are_those_of_diffusers_with_quantized_tensors(wide_wan: Path, tmp_path: Path, image, kind) -> None:
    model = write_model(tmp_path, wide_wan, kind)
    assert resolve(model).formats == (kind.split()[0],)
    videos = [FAMILY.complete(VIDEO.model_copy(update={"seed": seed}), resolve(model).facts) for seed in (1, 2)]
    pipeline = open_diffusers("wan", str(wide_wan), torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    with one_thread(), torch.inference_mode():
        for component in (pipeline.transformer, pipeline.transformer_2):
            hold_quantized(component, kind)
        expected = [
            np.stack([np.asarray(frame) for frame in call_diffusers(pipeline, image, video)[0]]) for video in videos
        ]
    assert expected[0].std() > 20
    groups: list[dict[str, Any]] = [
        {"num_ranks": 1},
        {"num_ranks": 3, "components": (HIGH, None, LOW)},
        {"num_ranks": 1, "in_rounds": True},
    ]
    for group in groups:
        np.testing.assert_array_equal(ranks.render(model, image, videos, options=native(model), **group), expected)
    made = ranks.render(model, image, videos, options=ComputeOptions(weights="made"), num_ranks=1)
    assert not np.array_equal(made, expected)


def product_of_blocks(*args: Any) -> Tensor:
    """What a GPU multiplies, of dequantized factors: comfy-kitchen's own arguments, of mxfp8 or nvfp4."""
    import comfy_kitchen

    data, others, bias, dtype = args[:2], args[2:-2], args[-2], args[-1]
    if len(others) == 2:
        rows, weight = (comfy_kitchen.dequantize_mxfp8(*pair, torch.float32) for pair in zip(data, others, strict=True))
    else:
        scales = zip(data, others[:2], others[2:], strict=True)
        rows, weight = (comfy_kitchen.dequantize_nvfp4(*each, torch.float32) for each in scales)
    return functional.linear(rows, weight, bias).to(dtype)


@pytest.mark.parametrize(("kind", "function"), [("mxfp8", "scaled_mm_mxfp8"), ("nvfp4", "scaled_mm_nvfp4")])
def test_formats_in_blocks_are_given_to_the_gpu_as_by_quantized_tensors(monkeypatch, kind, function) -> None:
    import comfy_kitchen
    from comfy_kitchen.tensor import QuantizedTensor

    given = []

    def multiply(*args: Any, bias: Tensor | None = None, out_dtype: torch.dtype | None = None, **scales: Any) -> Tensor:
        values = (*args, *scales.values(), *([] if len(args) > 4 else [bias, out_dtype]))
        given.append(values)
        return product_of_blocks(*values)

    monkeypatch.setattr(comfy_kitchen, function, multiply)
    generator = torch.Generator().manual_seed(1)
    weight, rows, bias = (torch.randn(*shape, generator=generator) for shape in ((64, 96), (50, 96), (64,)))
    layout = KINDS[kind].layout
    theirs: Any = QuantizedTensor.from_float(weight, layout)
    with torch.inference_mode():
        expected = functional.linear(QuantizedTensor.from_float(rows, layout), theirs, bias)  # type: ignore[arg-type]
    bits, _ = quantized(weight, KINDS[kind])
    tensors = {DATA: bits[""], SCALE: bits["_scale"]} | ({SECOND_SCALE: bits["_scale_2"]} if "_scale_2" in bits else {})
    product = multiply_of(Mark(name=kind))(rows, tensors, bias)
    assert product.shape == (50, 64)
    assert torch.equal(product, expected)
    assert len(given) == 2
    torch.testing.assert_close(product, functional.linear(rows, weight, bias), rtol=0.3, atol=4)


@pytest.mark.slow
def test_frames_and_sound_of_ltx_are_those_of_quantized_tensors(tiny_ltx: Path, tmp_path: Path, image) -> None:
    file = next((tiny_ltx / "transformer").glob("*.safetensors"))
    save_quantized(tmp_path / "a.safetensors", load_file(file), "int8 ConvRot in 16s", original_ltx_name)
    (tmp_path / "mine.toml").write_text(f'base = "{tiny_ltx}"\n[weights]\ntransformer = "a.safetensors"\n')
    model = resolve(str(tmp_path / "mine.toml"))
    pipeline = open_diffusers("ltx", str(tiny_ltx), torch.float32)
    hold_quantized(pipeline.transformer, "int8 ConvRot in 16s")
    video = LTX.complete(LtxParameters(prompt="A dog.", seed=3, frames=9, width=64, height=64), model.facts)
    with one_thread(), torch.inference_mode():
        frames, sound = call_ltx(pipeline, image, video)
    expected = np.stack([np.asarray(frame) for frame in frames[0]])
    opened = open_model(model, EVERYTHING, CPU, torch.float32, native(str(tmp_path / "mine.toml")))
    with one_thread():
        state = denoise(opened, opened.encode(image, video), video)
        np.testing.assert_array_equal(opened.decode(state, video, 9).numpy(), expected)
        ours = opened.sound(state, video)
    assert ours is not None
    assert torch.equal(ours, sound[0])
    assert expected.std() > 20


@pytest.mark.slow
def test_blocks_that_are_quantized_can_be_streamed(wide_wan: Path, image) -> None:
    states = []
    for offload in ("off", "blocks"):
        options = ComputeOptions(approximate=("int8",), offload=offload)
        opened = open_model(resolve(str(wide_wan)), EVERYTHING, CPU, torch.float32, options)
        video = opened.complete(VIDEO)
        states.append(denoise(opened, opened.encode(image, video), video)["latents"])
    assert torch.equal(*states)
    assert states[0].std() > 0.1


def test_loras_are_added_beside_a_product_and_not_quantized(wide_wan: Path, tmp_path: Path) -> None:
    """What they add is as exact as the type computed in; in the weight's format it would be off by a percent."""
    layers = {}
    for lora in (False, True):
        model = resolve(str(write_model_file(tmp_path, wide_wan, "convrot.safetensors", lora=lora)))
        opened = open_model(model, Role(components=HIGH), CPU, torch.float32, native(str(tmp_path / "mine.toml")))
        layers[lora] = opened.pipeline.transformer.blocks[0].ffn.net[2]
        assert type(layers[lora]).__name__ == "NativeLinear"
    rows = torch.randn(2, 3, 512, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        added = layers[True](rows) - layers[False](rows)
        changes = [getattr(layers[True], name) - getattr(layers[False], name) for name in ("weight", "bias")]
        expected = functional.linear(rows, *changes)
    torch.testing.assert_close(added, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert expected.std() > 0.01


@pytest.mark.parametrize(
    ("weights", "formats", "capability", "expected"),
    [
        ("auto --dtype fp32", ("int8",), (7, 5), ()),
        ("native --dtype fp32", ("int8",), (7, 5), "on a GPU with --dtype fp32, which has no kernel"),
        ("native --dtype fp32", ("int8",), None, ("int8",)),
        ("auto", ("int8",), (7, 5), ("int8",)),
        ("auto", ("fp8", "int8"), (8, 6), ("int8",)),
        ("auto", ("fp8", "nvfp4"), (8, 9), ("fp8",)),
        ("auto", ("fp8", "mxfp8", "nvfp4"), (12, 0), ("fp8", "mxfp8", "nvfp4")),
        ("auto", ("W4A4",), (9, 0), ()),
        ("auto", ("int8",), None, ()),  # a processor
        ("native", ("int8",), None, ("int8",)),
        ("stored", ("int8",), (7, 5), ()),
        ("made", ("int8",), (7, 5), ()),
        ("native", ("mxfp8",), (8, 9), "--weights native does not work with mxfp8 on a GPU, which has no kernel"),
        ("native", (), (8, 9), ()),
    ],
)
def test_layers_multiply_in_formats_that_every_visible_gpu_has_kernels_for(
    monkeypatch, weights, formats, capability, expected
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: [(12, 0), capability][number])
    model, device = ResolvedModel(name="m", formats=formats), torch.device("cpu" if capability is None else "cuda")
    held, _, dtype = weights.partition(" --dtype ")
    options = ComputeOptions(weights=held, dtype=dtype or "auto")
    if isinstance(expected, str):
        with pytest.raises(InputError, match=expected):
            choose_native(model, options, device)
        return
    assert choose_native(model, options, device) == expected
