"""LoRAs as trainers and other programs write them change weights as in diffusers' load_lora_weights and fuse_lora."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from svdq.pipeline.models.families import layout_of
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.resolved_model import LoraFile
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.models.weights.components import ComponentLoader
from tests.pipeline.models.ltx.test_files import original as original_ltx_name
from tests.pipeline.models.wan_files import original_name

pytestmark = pytest.mark.slow


def original_module(module: str) -> str:
    if module.startswith(("time_embed", "av_cross", "prompt_adaln", "proj_in", "audio_", "transformer_blocks.")):
        return original_ltx_name(f"{module}.").removesuffix(".")
    return original_name(f"{module}.").removesuffix(".")


def of_diffusers(module: str) -> str:
    return f"transformer.{module}"


def of_comfyui(module: str) -> str:
    return f"diffusion_model.{original_module(module)}"


def of_kohya(module: str) -> str:
    return f"lora_unet_{original_module(module).replace('.', '_')}"


def of_kohya_with_model(module: str) -> str:
    return f"lora_unet_model_{original_ltx_name(f'{module}.').removesuffix('.').replace('.', '_')}"


def of_videox(module: str) -> str:
    return of_kohya(module).replace("lora_unet_", "lora_unet__")


def of_diffsynth(module: str) -> str:
    return f"pipe.dit.{original_module(module)}"


def of_peft(module: str) -> str:
    return f"base_model.model.{module}"


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a program writes a LoRA."""

    of: Callable[[str], str]  # diffusers' name of a layer to that in the file
    ends: tuple[str, str] = ("lora_A.weight", "lora_B.weight")
    alpha: float | None = None
    blocks: bool = True  # of the layers in blocks alone
    bias: str = ""  # end of the keys that change biases
    dtype: torch.dtype = torch.float32
    settings: Mapping[str, Any] = field(default_factory=dict)  # what diffusers writes of peft's

    def save(self, path: Path, weights: Mapping[str, Tensor]) -> None:
        generator, tensors = torch.Generator().manual_seed(1), {}
        for name, weight in weights.items():
            module = name.removesuffix(".weight")
            if weight.ndim != 2 or name == module or "norm" in name or (self.blocks and "blocks." not in name):
                continue
            shapes = (4, weight.shape[1]), (weight.shape[0], 4)
            for end, shape in zip(self.ends, shapes, strict=True):
                tensors[f"{self.of(module)}.{end}"] = 0.2 * torch.randn(shape, generator=generator).to(self.dtype)
            if self.alpha is not None:
                tensors[f"{self.of(module)}.alpha"] = torch.tensor(self.alpha)
            if self.bias:
                tensors[f"{self.of(module)}.{self.bias}"] = torch.randn(len(weight), generator=generator)
        metadata = json.dumps({f"transformer.{name}": value for name, value in self.settings.items()})
        save_file(tensors, path, metadata={"lora_adapter_metadata": metadata} if self.settings else None)


LIGHTX2V = ("lora_down.weight", "lora_up.weight")
LAYERS = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]
STRENGTHS = (0.7, -0.4)
PATTERNS = {"alpha_pattern": {"blocks.1.attn1.to_q": 1, "ffn.net.2": 3}, "use_rslora": True}
FORMATS = {
    "diffusers": Format(of=of_diffusers),
    "diffusers with peft's settings": Format(
        of=of_diffusers, settings={"r": 4, "lora_alpha": 8, "target_modules": LAYERS} | PATTERNS
    ),
    "ai-toolkit, diffusion-pipe, Lightricks": Format(of=of_comfyui),
    "the same of all layers": Format(of=of_comfyui, blocks=False),
    "LightX2V": Format(of=of_comfyui, ends=LIGHTX2V, blocks=False, bias="diff_b"),
    "ComfyUI": Format(of=of_comfyui, ends=LIGHTX2V, alpha=2.0, dtype=torch.bfloat16, bias="diff_b"),
    "musubi-tuner": Format(of=of_kohya, ends=LIGHTX2V, alpha=2.0),
    # From here on diffusers refuses the files, or finds no key of its model in them.
    "peft": Format(of=of_peft),
    "DiffSynth-Studio": Format(of=original_module, ends=("lora_A.default.weight", "lora_B.default.weight")),
    "ComfyUI for LTX-2": Format(of=of_comfyui, ends=LIGHTX2V, alpha=4.0),
    "musubi-tuner for LTX-2": Format(of=of_kohya_with_model, ends=LIGHTX2V, alpha=4.0, blocks=False),
    "DiffSynth-Studio with its prefix": Format(
        of=of_diffsynth, ends=("lora_A.default.weight", "lora_B.default.weight")
    ),
    "VideoX-Fun": Format(of=of_videox, ends=LIGHTX2V, alpha=4.0),
    "musubi-tuner of all layers": Format(of=of_kohya, ends=LIGHTX2V, alpha=4.0, blocks=False),
    "diffusers of all layers": Format(of=of_diffusers, blocks=False),
}


@pytest.mark.parametrize(
    ("kind", "lora", "like"),
    [
        *(("i2v-a14b", each, each) for each in list(FORMATS)[:7]),
        *(("i2v-14b", each, each) for each in ("the same of all layers", "LightX2V", "musubi-tuner")),
        *(
            ("2.3", each, each)
            for each in ("diffusers", "ai-toolkit, diffusion-pipe, Lightricks", "the same of all layers")
        ),
        *(("i2v-a14b", each, "diffusers") for each in ("peft", "DiffSynth-Studio", "VideoX-Fun")),
        ("i2v-a14b", "DiffSynth-Studio with its prefix", "diffusers"),
        ("i2v-14b", "musubi-tuner of all layers", "the same of all layers"),
        ("2.3", "ComfyUI for LTX-2", "diffusers"),
        ("2.3", "musubi-tuner for LTX-2", "diffusers of all layers"),
    ],
)
def test_fused_weights_are_those_of_diffusers(
    folder_of: Callable[[str], Path], tmp_path: Path, kind: str, lora: str, like: str
) -> None:
    import diffusers

    folder = folder_of(kind)
    weights = load_file(next((folder / "transformer").glob("*.safetensors")))
    for name, file in ((lora, "ours"), (like, "theirs")):
        FORMATS[name].save(tmp_path / f"{file}.safetensors", weights)
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    for strength in STRENGTHS:
        pipeline.load_lora_weights(str(tmp_path / "theirs.safetensors"))
        pipeline.fuse_lora(components=["transformer"], lora_scale=strength)
        pipeline.unload_lora_weights()
    loras = [
        LoraFile(file=tmp_path / "ours.safetensors", component="transformer", strength=strength)
        for strength in STRENGTHS
    ]
    model = resolve(str(folder)).model_copy(update={"loras": loras})
    loader = ComponentLoader(
        model=model,
        layout=layout_of(model),
        role=Role(),
        dtype=torch.float32,
    )
    ours = loader.load("transformer", torch.device("cpu")).state_dict()
    num_changed = 0
    for name, theirs in pipeline.transformer.state_dict().items():
        torch.testing.assert_close(ours[name], theirs, atol=1e-6, rtol=0)
        num_changed += not torch.equal(ours[name], weights.get(name, ours[name]))
    assert num_changed >= 20
