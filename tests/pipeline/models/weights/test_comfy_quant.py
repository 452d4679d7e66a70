"""Files in ComfyUI's int8, mxfp8, nvfp4 and W4A4 have the weights that comfy-kitchen makes of them, bit by bit."""

import importlib.util
import json
import shutil
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.compute.options import ComputeOptions, weight_bytes
from svdq.pipeline.models.families import layout_of
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.names.sized_model import sized_model
from svdq.pipeline.models.needs import SizedModel
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.models.wan.family import FAMILY, WanParameters
from svdq.pipeline.models.weights.components import ComponentLoader, check_model_file
from svdq.pipeline.models.weights.formats import open_file
from svdq.pipeline.models.weights.made_weights import Keeping, MadeWeight
from svdq.worker.cards import Cards
from svdq.worker.fit import ways
from tests.pipeline.models.comfy_files import KINDS, quantized, save_quantized
from tests.pipeline.models.comfyui.workflows import template, written
from tests.pipeline.models.ltx.test_files import assert_same
from tests.pipeline.models.ltx.test_files import original as original_ltx_name
from tests.pipeline.models.ltx.test_files import stored as stored_ltx
from tests.pipeline.models.wan_files import original_name, original_t5_name
from tests.pipeline.rendering import denoise, diffusers_frames

CPU = torch.device("cpu")
EVERYTHING = Role(embed=True, encode=True, decode=True)
WEIGHT = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))


def note(mark: Any) -> Tensor:
    return torch.tensor(list(mark if isinstance(mark, bytes) else json.dumps(mark).encode()), dtype=torch.uint8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_header", [False, True])
def test_weights_are_those_of_comfy_kitchen(tmp_path: Path, kind: str, in_header: bool) -> None:
    weights = {"blocks.0.ffn.net.2.weight": WEIGHT, "blocks.0.ffn.net.2.bias": WEIGHT[0]}
    prefix = "model.diffusion_model."
    kept = save_quantized(tmp_path / "a.safetensors", weights, kind, str, prefix=prefix, in_header=in_header)
    for name, stored in open_file(tmp_path / "a.safetensors", weights, str).items():
        made = stored.dequantize(stored.read())
        assert (made.shape, stored.num_elements) == (kept[name].shape, kept[name].numel())
        assert torch.equal(made, kept[name])
    assert 0 < (kept["blocks.0.ffn.net.2.weight"] - WEIGHT).norm() / WEIGHT.norm() < 0.2


def test_int8_without_any_mark_is_by_rows(tmp_path: Path) -> None:
    """As LightX2V writes it."""
    bits, made = quantized(WEIGHT, KINDS["int8 by rows"])
    save_file({f"a.weight{end}": each for end, each in bits.items()}, tmp_path / "a.safetensors")
    stored = open_file(tmp_path / "a.safetensors", [], str)["a.weight"]
    assert torch.equal(stored.dequantize(stored.read()), made)


CONVROT = KINDS["int8 ConvRot"].mark


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("int8 ConvRot", {"a.comfy_quant": None}, "has a.weight of I8 without a mark of its format, which others"),
        ("int8 ConvRot", {"a.comfy_quant": note(b"{")}, "has a comfy_quant of a that is no JSON"),
        ("int8 ConvRot", {"a.comfy_quant": note({"format": "int9"})}, "has a in ComfyUI's format 'int9'"),
        ("int8 ConvRot", {"a.comfy_quant": note({"convrot": True})}, "has a in ComfyUI's format 'None'"),
        ("int8 ConvRot", {"a.comfy_quant": note({"format": "asym_w4a8_int8"})}, "ComfyUI's format 'asym_w4a8_int8'"),
        ("int8 ConvRot", {"a.comfy_quant": note(CONVROT | {"convrot_groupsize": 32})}, "rotates a in groups of 32"),
        ("int8 ConvRot", {"a.comfy_quant": note(CONVROT | {"convrot_groupsize": 1024})}, "256 columns, which are no"),
        ("int8 ConvRot", {"a.comfy_quant": note({"format": "mxfp8"})}, "has its weight as I8 in place of F8_E4M3"),
        ("int8 ConvRot", {"a.comfy_quant": note({"format": "float8_e4m3fn"})}, "as I8 in place of F8_E4M3"),
        ("int8 ConvRot", {"a.weight_scale": None}, "and has no weight_scale; get the file again"),
        ("int8 ConvRot", {"a.weight_scale": torch.ones(128, 1)}, "has scales of shape [128, 1] for 256 rows"),
        ("int8 ConvRot", {"a.weight_scale": torch.ones(256, 1).int()}, "has its scales as I32 in place of BF16"),
        ("int8 ConvRot", {"a.weight_scale": torch.zeros(256, 1)}, "has a.weight_scale with a scale of 0"),
        ("int8 ConvRot", {"a.weight_scale": torch.full((256, 1), torch.nan)}, "or one that is not finite"),
        ("int8 ConvRot", {"a.weight": WEIGHT > 0}, "has its weight as BOOL in place of I8"),
        ("int8 ConvRot", {"a.zero_point": torch.ones(256)}, "has a.zero_point beside a.weight"),
        ("mxfp8", {"a.comfy_quant": None}, "has a.weight_scale of U8 without a mark of the format"),
        ("mxfp8", {"a.comfy_quant": note({"format": "float8_e4m3fn"})}, "its scales as U8 in place of BF16"),
        ("mxfp8", {"a.comfy_quant": note({"format": "mxfp8", "convrot": True})}, "mxfp8 with convrot True"),
        ("mxfp8", {"a.weight_scale": torch.ones(256, 4).byte()}, "scales of shape [256, 4] in place of [256, 8]"),
        ("nvfp4", {"a.weight_scale_2": None}, "and has no weight_scale_2"),
        ("nvfp4", {"a.weight_scale_2": torch.zeros(())}, "has a.weight_scale_2 with a scale of 0"),
        ("nvfp4", {"a.comfy_quant": None}, "has a.weight of U8 without a mark of its format"),
        ("nvfp4", {"a.pre_quant_scale": torch.ones(256)}, "has a.pre_quant_scale beside a.weight"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_one_sentence(tmp_path: Path, kind: str, change: dict[str, Any], says: str) -> None:
    file = tmp_path / "a.safetensors"
    save_quantized(file, {"a.weight": WEIGHT, "b.weight": WEIGHT}, kind, str, is_quantized=lambda _: True)
    tensors = {name: each for name, each in (load_file(file) | change).items() if each is not None}
    save_file(tensors, file)
    with pytest.raises(InputError) as caught:
        open_file(file, [], str)
    assert says in str(caught.value)
    assert str(file) in str(caught.value)
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ("{}", "has a _quantization_metadata without layers"),
        ("nothing", "has a _quantization_metadata without layers"),
        ('{"layers": {"a": 1}}', "has a comfy_quant of a that is no JSON"),
        ('{"layers": {"a": {"format": "int8_tensorwise"}}}', "marks a as int8_tensorwise in its comfy_quant and as"),
        ('{"layers": {"elsewhere": {"format": "int9"}}}', ""),  # of a checkpoint that this was taken from
    ],
)
def test_marks_in_the_header_count_like_those_beside_weights(tmp_path: Path, header: str, says: str) -> None:
    file = tmp_path / "a.safetensors"
    save_quantized(file, {"a.weight": WEIGHT}, "int8 ConvRot", str, is_quantized=lambda _: True)
    save_file(load_file(file), file, {"_quantization_metadata": header})
    if says:
        with pytest.raises(InputError, match=says):
            open_file(file, [], str)
    else:
        assert open_file(file, [], str).keys() == {"a.weight"}


def test_without_the_extra_one_sentence_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("int8 ConvRot", "int8"):
        save_quantized(tmp_path / f"{kind}.safetensors", {"blocks.a.weight": WEIGHT}, kind, str)
    made = save_quantized(tmp_path / "fp8.safetensors", {"blocks.a.weight": WEIGHT}, "fp8", str)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "comfy_kitchen" else find(name))
    with pytest.raises(InputError, match=r"in int8_tensorwise, which need the package comfy-kitchen; run .*int8\]"):
        open_file(tmp_path / "int8.safetensors", [], str)
    stored = open_file(tmp_path / "fp8.safetensors", [], str)["blocks.a.weight"]  # which needs no package
    assert torch.equal(stored.dequantize(stored.read()), made["blocks.a.weight"])


def write_model_file(folder: Path, base: Path, **files: str) -> Path:
    lines = [f'weights.{component} = "{file}"' for component, file in files.items()]
    (folder / "mine.toml").write_text("\n".join([f'base = "{base}"', *lines]))
    return folder / "mine.toml"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8 ConvRot", "int8 by rows", "mxfp8", "nvfp4", "W4A4 ConvRot"])
def test_frames_are_those_of_diffusers_with_dequantized_weights(wide_wan, tmp_path, photo, kind) -> None:
    shutil.copytree(wide_wan, tmp_path / "made")
    for component in ("transformer", "transformer_2"):
        file = next((wide_wan / component).glob("*.safetensors"))
        kept = save_quantized(tmp_path / f"{component}.safetensors", load_file(file), kind, original_name)
        save_file(kept, tmp_path / "made" / component / file.name)
    files = {component: f"{component}.safetensors" for component in ("transformer", "transformer_2")}
    mine = str(write_model_file(tmp_path, wide_wan, **files))
    model = resolve(mine)
    assert len(list(check_model_file(model, layout_of(model)))) == 2
    video = FAMILY.complete(WanParameters(prompt="A dog.", seed=3, frames=5, steps=4, width=64, height=64), model.facts)
    expected = diffusers_frames(tmp_path / "made", photo, video)
    for weights in ("made", "stored"):
        options = ComputeOptions(weights=weights)
        opened = open_model(model, EVERYTHING, CPU, torch.float32, options)
        is_kept = any(isinstance(each, MadeWeight) for each in opened.pipeline.transformer.modules())
        assert is_kept == (weights == "stored")
        state = denoise(opened, opened.encode(photo, video), video)
        np.testing.assert_array_equal(opened.decode(state, video, 5).numpy(), expected)
        estimated = SizedModel.of(model, "float32", options).weights("transformer")
        assert weight_bytes(opened.pipeline.transformer) == pytest.approx(estimated, rel=0.03)
    assert expected.std() > 20


original_gemma_name = partial(original_ltx_name, component="text_encoder")


def is_of_t5(name: str) -> bool:
    return "layer" in name or "shared" in name


def is_of_gemma(name: str) -> bool:
    return "embed_tokens" in name or (".layers." in name and "_proj" in name and "vision" not in name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "component", "kind", "rename", "is_quantized"),
    [
        ("2.3", "transformer", "int8 ConvRot in 16s", original_ltx_name, None),
        ("2.5", "transformer", "mxfp8", original_ltx_name, None),
        ("2.3", "transformer", "nvfp4", original_ltx_name, None),
        ("2.3", "text_encoder", "int8 ConvRot in 16s", original_gemma_name, is_of_gemma),
        ("2.5", "text_encoder", "int8", original_gemma_name, is_of_gemma),
        ("i2v-a14b", "text_encoder", "int8 by rows", original_t5_name, is_of_t5),
    ],
)
def test_every_component_loads_to_its_dequantized_weights(
    folder_of, tmp_path, base, component, kind, rename, is_quantized
) -> None:
    weights = load_file(next((folder_of(base) / component).glob("*.safetensors")))
    how = {} if is_quantized is None else {"is_quantized": is_quantized}
    file = f"{component}.safetensors"
    kept = save_quantized(tmp_path / file, weights, kind, rename, in_header=is_quantized is None, **how)
    model = resolve(str(write_model_file(tmp_path, folder_of(base), **{component: file})))
    assert next(check_model_file(model, layout_of(model))) == f"{component}: all weights are in {tmp_path / file}."
    loader = ComponentLoader(model=model, layout=layout_of(model), role=Role(), dtype=torch.float32)
    keeping = Keeping(blocks=loader.layout.blocks, device=CPU)
    made, stored = (loader.load(component, CPU, how) for how in (None, keeping))
    changed = [name for name, weight in weights.items() if not torch.equal(weight, kept[name])]
    assert len(changed) > 5
    assert component == "transformer" or any("embed" in name or "shared" in name for name in changed)
    state = made.state_dict()
    for name, weight in kept.items():
        assert name not in state or torch.equal(state[name], weight), name
    layers = {name: layer for name, layer in stored.named_modules() if isinstance(layer, MadeWeight)}
    assert layers
    assert all(torch.equal(layer.weight, state[f"{name}.weight"]) for name, layer in layers.items())


@pytest.mark.slow
def test_the_frames_and_sound_of_ltx(tiny_ltx: Path, tmp_path: Path, image) -> None:
    shutil.copytree(tiny_ltx, tmp_path / "made")
    file = next((tiny_ltx / "transformer").glob("*.safetensors"))
    kept = save_quantized(tmp_path / "a.safetensors", load_file(file), "int8 ConvRot in 16s", original_ltx_name)
    save_file(kept, tmp_path / "made" / "transformer" / file.name)
    assert_same(str(write_model_file(tmp_path, tiny_ltx, transformer="a.safetensors")), tmp_path / "made", image)


@pytest.mark.slow
def test_the_files_of_a_workflow_of_comfyui_are_read(folder_of, tmp_path: Path) -> None:
    """LTX-2.5's template names int8 files of the transformer and of Gemma, each with a part of the connectors."""
    toml = written(template("video_ltx2_5_i2v")).toml
    given = tomllib.loads(toml)["weights"]
    folder, projection = folder_of("2.5"), "text_embedding_projection."
    connectors = stored_ltx(folder, "connectors")
    others = {
        "transformer": {name: each for name, each in connectors.items() if not name.startswith(projection)},
        "text_encoder": {name: each for name, each in connectors.items() if name.startswith(projection)},
    }
    for component, is_quantized in (("transformer", lambda name: "blocks." in name), ("text_encoder", is_of_gemma)):
        file = tmp_path / given[component]
        file.parent.mkdir(parents=True, exist_ok=True)
        weights = load_file(next((folder / component).glob("*.safetensors")))
        prefix = "model.diffusion_model." if component == "transformer" else ""
        rename = partial(original_ltx_name, component=component)
        save_quantized(file, weights, "int8 ConvRot in 16s", rename, prefix=prefix, is_quantized=is_quantized)
        version = {"gemma_config": '{"gemma_version": "gemma4-12b-ltx-v1"}'} if component == "text_encoder" else None
        save_file(load_file(file) | others[component], file, version)
    for component, parts in (("audio_vae", ("audio_vae", "vocoder")), ("latent_upsampler", ("latent_upsampler",))):
        (tmp_path / given[component]).parent.mkdir(parents=True, exist_ok=True)
        weights = {name: each for part in parts for name, each in stored_ltx(folder, part).items()}
        save_file(weights, tmp_path / given[component])
    (tmp_path / "mine.toml").write_text(toml.replace("Lightricks/LTX-2.5-Diffusers", str(folder)))
    model = resolve(str(tmp_path / "mine.toml"))
    assert not any("read" in note for note in written(template("video_ltx2_5_i2v")).notes)
    known = sized_model(str(tmp_path / "mine.toml"))
    assert (known.missing_files, known.download_bytes, known.kept) == (0, 0, True)
    assert any(way.fits for way in ways(known, known.video(), Cards(number=1, total_bytes=24 * 2**30), 1, None))
    checked = [each.partition(":")[0] for each in check_model_file(model, layout_of(model))]
    assert checked == ["audio_vae", "connectors", "latent_upsampler", "text_encoder", "transformer", "vocoder"]
    save_file(load_file(tmp_path / given["text_encoder"]), tmp_path / given["text_encoder"])
    (warning,) = (each for each in check_model_file(model, layout_of(model)) if not each.endswith(".safetensors."))
    assert f"{given['text_encoder']} does not say that it is gemma4-12b-ltx, which {folder} needs" in warning
    numbers, whole = (SizedModel.of(each, "float32").num_weights for each in (model, resolve(str(folder))))
    assert all(numbers[each] == whole[each] for each in ("transformer", "text_encoder", "audio_vae"))
