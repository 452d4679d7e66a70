import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.compute.options import ComputeOptions
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.resolved_model import LoraFile
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.models.wan.layout import LAYOUTS
from svdq.pipeline.models.weights.formats import renaming
from svdq.pipeline.models.weights.loras import Lora, open_lora, warnings_of
from svdq.pipeline.models.weights.made_weights import NativeWeight
from tests.pipeline.models.wan_files import save_lora

NAMES = LAYOUTS["WanImageToVideoPipeline"].file_names


def opened(file: Path, weights: dict[str, Tensor], component: str = "transformer", strength: float = 1.0) -> Lora:
    import diffusers

    lora = LoraFile(file=file, component=component, strength=strength)
    shapes = {name: weight.shape for name, weight in weights.items()}
    return open_lora(lora, shapes, renaming(diffusers.WanTransformer3DModel, NAMES[component]))


@pytest.fixture
def weights(tiny_wan: Path) -> dict[str, Tensor]:
    return load_file(next((tiny_wan / "transformer").glob("*.safetensors")))


def add(lora: Lora, name: str, weight: Tensor) -> Tensor:
    return lora.add(name, weight, lora.read(name)) if name in lora.parts else weight


def test_what_a_lora_does_not_change_is_said_with_numbers(weights: dict[str, Tensor], tmp_path: Path) -> None:
    file = tmp_path / "lora.safetensors"
    save_lora(file, weights, "comfyui")
    save_file(load_file(file) | {"diffusion_model.blocks.9.ffn.0.diff_b": torch.ones(2)}, file)
    unmatched, dropped = warnings_of(opened(file, weights))
    assert unmatched.startswith("The LoRA lora.safetensors: 80 of 82 keys match the transformer; 1 do not, such as ")
    assert dropped.endswith("1 differences are dropped, as in diffusers, such as diffusion_model.blocks.0.norm3.diff.")


def test_differences_count_as_in_diffusers(tiny_wan: Path, weights: dict[str, Tensor], tmp_path: Path) -> None:
    import diffusers

    file = tmp_path / "lora.safetensors"
    save_lora(file, weights, "comfyui")
    head, patch = weights["proj_out.weight"], weights["patch_embedding.weight"]
    alone = {"head.head.diff": torch.randn(head.shape), "head.head.diff_b": torch.randn(len(head))}
    alone |= {"patch_embedding.diff": torch.randn(patch.shape), "patch_embedding.diff_b": torch.randn(len(patch))}
    alone |= {"time_projection.1.diff_b": torch.ones(len(weights["condition_embedder.time_proj.bias"]))}
    # As in LightX2V's files, which have no alpha.
    kept = {key: tensor for key, tensor in load_file(file).items() if not key.endswith(".alpha")}
    save_file(kept | {f"diffusion_model.{key}": tensor for key, tensor in alone.items()}, file)
    pipeline = diffusers.WanImageToVideoPipeline.from_pretrained(tiny_wan)
    pipeline.load_lora_weights(str(file))
    pipeline.fuse_lora(components=["transformer"])
    pipeline.unload_lora_weights()
    lora = opened(file, weights)
    for name, theirs in pipeline.transformer.state_dict().items():
        torch.testing.assert_close(add(lora, name, weights[name]), theirs, atol=1e-6, rtol=0)
    assert {key.partition(".")[2] for key in lora.dropped} == {"blocks.0.norm3.diff", *list(alone)[2:]}


def test_alpha_of_a_configuration_scales_biases_too(weights: dict[str, Tensor], tmp_path: Path) -> None:
    module = "transformer.blocks.0.attn1.to_q"
    save_file(
        {f"{module}.lora_A.weight": torch.ones(2, 24), f"{module}.lora_B.weight": torch.ones(24, 2)}
        | {f"{module}.lora_B.bias": torch.ones(24), "text_encoder.q.lora_A.weight": torch.ones(2, 2)},
        tmp_path / "lora.safetensors",
        metadata={"lora_adapter_metadata": json.dumps({"transformer.r": 2, "transformer.lora_alpha": 6})},
    )
    lora = opened(tmp_path / "lora.safetensors", weights)
    for kind, added in (("weight", 6.0), ("bias", 3.0)):
        name = f"blocks.0.attn1.to_q.{kind}"
        assert add(lora, name, torch.zeros_like(weights[name])).unique().tolist() == [added]
    (warning,) = warnings_of(lora)
    assert "3 of 4 keys match the transformer; 1 do not, such as text_encoder.q" in warning


def test_a_file_for_both_experts_changes_each_by_its_own_keys(weights: dict[str, Tensor], tmp_path: Path) -> None:
    name = "blocks.0.attn1.to_q.weight"
    module = name.removesuffix(".weight")
    down, up = torch.ones(2, weights[name].shape[1]), torch.ones(weights[name].shape[0], 2)
    keys = {f"{each}.{module}.lora_{part}.weight": number * tensor
            for number, each in enumerate(("transformer", "transformer_2"), start=1)
            for part, tensor in (("A", down), ("B", up))}  # fmt: skip
    config = {f"transformer_2.{setting}": value for setting, value in (("r", 2), ("lora_alpha", 1))}
    save_file(keys, tmp_path / "both.safetensors", metadata={"lora_adapter_metadata": json.dumps(config)})
    lora = opened(tmp_path / "both.safetensors", weights, "transformer_2")
    added = add(lora, name, torch.zeros_like(weights[name]))
    assert added.unique().tolist() == [4.0]  # 2 * 2 of two ranks, by alpha / rank = 1 / 2


def test_a_file_of_peft_itself(weights: dict[str, Tensor], tmp_path: Path) -> None:
    module = "base_model.model.blocks.0.attn1.to_q"
    file = tmp_path / "adapter_model.safetensors"
    save_file({f"{module}.lora_A.weight": torch.ones(2, 24), f"{module}.lora_B.weight": torch.ones(24, 2)}, file)
    lora = opened(file, weights)
    name = "blocks.0.attn1.to_q.weight"
    assert add(lora, name, torch.zeros_like(weights[name])).unique().tolist() == [2.0]
    assert list(warnings_of(lora)) == []


@pytest.mark.parametrize("key", ["diff_m", "modulation.diff"])
def test_the_modulation_of_lightx2v_is_added(weights: dict[str, Tensor], tmp_path: Path, key: str) -> None:
    table = weights["blocks.1.scale_shift_table"]
    save_file({f"diffusion_model.blocks.1.{key}": torch.full_like(table, 2.0)}, tmp_path / "lora.safetensors")
    lora = opened(tmp_path / "lora.safetensors", weights, strength=0.5)
    assert torch.equal(add(lora, "blocks.1.scale_shift_table", table), table + 1)
    assert list(warnings_of(lora)) == []


def test_a_patch_embedding_of_text_to_video_is_left_out_and_named(weights: dict[str, Tensor], tmp_path: Path) -> None:
    file, key = tmp_path / "lora.safetensors", "diffusion_model.patch_embedding.lora_"
    save_lora(file, weights, "peft")
    patch = {f"{key}down.weight": torch.ones(4, 16, 1, 2, 2), f"{key}up.weight": torch.ones(24, 4, 1, 1, 1)}
    save_file(load_file(file) | patch, file)
    lora = opened(file, weights)
    assert "patch_embedding.weight" not in lora.parts
    (warning,) = warnings_of(lora)
    assert warning == (
        f"The LoRA lora.safetensors: {key}down.weight has another shape than the transformer's and is left out."
    )
    save_file(patch, file)
    with pytest.raises(InputError, match="is of another model: 0 of its 2 keys match"):
        opened(file, weights)


FACTORS = {"lora_A.weight": torch.ones(2, 24), "lora_B.weight": torch.ones(24, 2)}


@pytest.mark.parametrize(
    ("changes", "settings", "says"),
    [
        ({"alpha": torch.ones(2)}, "{}", "attn1.to_q.alpha that is not one number"),
        ({"alpha": torch.tensor(float("nan"))}, "{}", "attn1.to_q.alpha that is not one number"),
        ({"lora_A.weight": torch.ones(0, 24), "lora_B.weight": torch.ones(24, 0)}, "{}", r"of shape \[0, 24\]"),
        ({"lora_A.weight": torch.ones(24), "lora_B.weight": torch.ones(24)}, "{}", r"of shape \[24\]"),
        ({}, "[]", "a lora_adapter_metadata that is no JSON object"),
        ({}, "nothing", "a lora_adapter_metadata that is no JSON object"),
        ({}, '{"transformer.r": 0}', "has r 0 and lora_alpha 0 for blocks.0.attn1.to_q in its"),
        ({}, '{"r": "many"}', "which is no scale"),
        ({}, '{"r": 2, "alpha_pattern": [1]}', "which is no scale"),
    ],
)
def test_numbers_that_scale_nothing_are_refused(
    weights: dict[str, Tensor], tmp_path: Path, changes: dict[str, Tensor], settings: str, says: str
) -> None:
    keys = {f"transformer.blocks.0.attn1.to_q.{end}": each for end, each in (FACTORS | changes).items()}
    save_file(keys, tmp_path / "lora.safetensors", metadata={"lora_adapter_metadata": settings})
    with pytest.raises(InputError, match=says):
        opened(tmp_path / "lora.safetensors", weights)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("lora.safetensors", {"unet.conv_in.lora_A.weight": 1}, r"^None of the 1 keys .* match a weight of the trans"),
        ("lora.safetensors", {"transformer.blocks.0.attn1.to_q.lora_A.weight": 1}, "only one of the two factors"),
        ("lora.safetensors", {"transformer.blocks.0.attn1.to_q.dora_scale": 1}, "DoRA"),
        ("lora.safetensors", {"lora_unet_blocks_0_self_attn_q.lokr_w1_a": 1}, "LoKr"),
        ("lora.safetensors", {"transformer.blocks.0.attn1.to_q.lora_magnitude_vector": 1}, "DoRA"),
        ("lora.safetensors", {"lora_unet_blocks_0_self_attn_q.oft_blocks": 1}, "only plain LoRAs"),
        ("lora.safetensors", {"lora_unet_blocks_0_self_attn_q.alpha": 1}, "^None of the 1 keys"),
        ("lora.pt", {}, "reads no pickles"),
        ("lora.safetensors", None, "cannot be read"),
    ],
)
def test_other_files_are_refused(
    weights: dict[str, Tensor], tmp_path: Path, name: str, keys: dict, message: str
) -> None:
    if keys is not None:
        save_file({key: torch.ones(2, 2) for key in keys}, tmp_path / name)
    else:
        (tmp_path / name).write_text("no weights")
    with pytest.raises(InputError, match=message):
        opened(tmp_path / name, weights)


def test_a_lora_of_svd_changes_convolutions_and_attention(tiny_model: Path, tmp_path: Path) -> None:
    weights = load_file(next((tiny_model / "unet").glob("*.safetensors")))
    lora, expected = {}, {}
    attention = next(name for name in weights if name.endswith("attn1.to_q.weight"))
    for name in (attention, "conv_in.weight"):
        weight = weights[name]
        down, up = torch.randn(4, *weight.shape[1:]), torch.randn(weight.shape[0], 4, *(1,) * (weight.ndim - 2))
        module = f"unet.{name.removesuffix('.weight')}"
        lora |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
        expected[name] = weight + 0.5 * (up.flatten(1) @ down.flatten(1)).reshape(weight.shape)
    save_file(lora, tmp_path / "lora.safetensors")
    entry = 'file = "lora.safetensors"\ncomponent = "unet"\nstrength = 0.5\n'
    (tmp_path / "svd-lora.toml").write_text(f'base = "{tiny_model}"\n[[lora]]\n{entry}')
    model = resolve(str(tmp_path / "svd-lora.toml"), dtype="fp32")
    unet = open_model(model, Role(), torch.device("cpu"), torch.float32).pipeline.unet.state_dict()
    assert {name for name, weight in unet.items() if not torch.equal(weight, weights[name])} == {*expected}
    for name, weight in expected.items():
        torch.testing.assert_close(unet[name], weight)


def test_weights_with_a_lora_are_quantized_as_those_without(tiny_wan: Path, tmp_path: Path) -> None:
    weights = load_file(next((tiny_wan / "transformer").glob("*.safetensors")))
    save_lora(tmp_path / "lora.safetensors", weights, "peft")
    entry = 'file = "lora.safetensors"\ncomponent = "transformer"\n'
    (tmp_path / "lora.toml").write_text(f'base = "{tiny_wan}"\n[[lora]]\n{entry}')
    quantized = []
    for name in (str(tiny_wan), str(tmp_path / "lora.toml")):
        model, int8 = resolve(name, dtype="fp32"), ComputeOptions(approximate=("int8",))
        transformer = open_model(model, Role(), torch.device("cpu"), torch.float32, int8).pipeline.transformer
        quantized.append([name for name, each in transformer.named_modules() if isinstance(each, NativeWeight)])
    assert quantized[0]
    assert quantized[0] == quantized[1]
