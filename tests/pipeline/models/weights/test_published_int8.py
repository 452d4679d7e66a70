"""Stand-ins of published int8 ConvRot files, with the real names, shapes and dtypes, in files without their bytes."""

import ctypes
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from svdq.cli.main import run
from svdq.pipeline.models.model_file import CONFIGS
from svdq.pipeline.models.weights.formats import empty_component, shapes_of
from svdq.pipeline.models.weights.model_folder import read_json
from tests.pipeline.models.ltx.test_files import original as original_ltx_name
from tests.pipeline.models.wan_files import original_name

pytestmark = pytest.mark.slow

A14B = CONFIGS / "Wan-AI/Wan2.2-I2V-A14B-Diffusers"
#: The transformer of LTX-2.3 where it differs from the defaults of diffusers' class.
LTX: Mapping[str, Any] = {
    "gated_attn": True, "cross_attn_mod": True, "audio_gated_attn": True, "audio_cross_attn_mod": True,
    "rope_type": "split", "use_prompt_embeddings": False, "perturbed_attn": True,
}  # fmt: skip
NOTE = json.dumps({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}).encode()
LAYER = "blocks.0.self_attn.q"
#: Tensors of a file: the dtype, the shape, and the contents of those that are not left empty.
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


@pytest.fixture(autouse=True)
def mapped_allocations() -> Iterator[None]:
    """Let glibc map large allocations, as by default: with a heap of more than all memory no process can fork."""
    mmap_threshold, libc = -3, ctypes.CDLL(None)
    libc.mallopt(mmap_threshold, 1 << 20)
    yield
    libc.mallopt(mmap_threshold, (1 << 31) - 1)  # for less than the Makefile's, which is no int


def write_sparse(path: Path, tensors: Tensors) -> None:
    """Write a safetensors file of its full length, whose empty tensors take no disk."""
    header, place = {}, 0
    for name, (dtype, shape, _) in tensors.items():
        num_bytes = math.prod(shape) * {"U8": 1, "I8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + num_bytes]}
        place += num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (_, _, contents) in tensors.items():
            if contents:
                file.seek(8 + len(text) + header[name]["data_offsets"][0])
                file.write(contents)
        file.truncate(8 + len(text) + place)


def quantized(kind: Any, config: Mapping[str, Any], rename: Callable[[str], str], prefix: str = "") -> Tensors:
    """Return the tensors of a transformer as int8 ConvRot files have them: the matrices of its blocks, and all else."""
    tensors: Tensors = {}
    for name, shape in shapes_of(empty_component(kind, config)).items():
        original = f"{prefix}{rename(name)}"
        if "blocks." in name and name.endswith(".weight") and len(shape) == 2 and shape[1] % 256 == 0:
            tensors[original] = ("I8", tuple(shape), b"")
            tensors[f"{original}_scale"] = ("F32", (shape[0], 1), np.full(shape[0], 0.001, np.float32).tobytes())
            tensors[f"{original.removesuffix('.weight')}.comfy_quant"] = ("U8", (len(NOTE),), NOTE)
        else:
            tensors[original] = ("BF16", tuple(shape), b"")
    return tensors


def with_config(source: Path, folder: Path, components: Mapping[str, Mapping[str, Any]]) -> Path:
    """Copy a model with other configs of some components, whose own weights are left out."""
    shutil.copytree(source, folder)
    for component, config in components.items():
        for file in (folder / component).glob("*.safetensors"):
            file.unlink()
        (folder / component / "config.json").write_text(json.dumps(config))
    return folder


def write_model_file(folder: Path, base: Path, **files: str) -> str:
    lines = "\n".join(f'{component} = "{file}"' for component, file in files.items())
    (folder / "mine.toml").write_text(f'base = "{base}"\n[weights]\n{lines}\n')
    return str(folder / "mine.toml")


def planned(model: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """The ways to run a model on GPUs that have room for everything as it is stored."""
    capsys.readouterr()
    assert run(["plan", "--model", model, "--gpus", "1x24", "--json"]) == 0
    ways: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["ways"]
    return ways


def test_wan_2_2_is_checked_and_planned(tiny_wan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from diffusers import WanTransformer3DModel

    config = read_json(A14B, "transformer/config.json", "")
    tensors = quantized(WanTransformer3DModel, config, original_name)
    assert (len([name for name in tensors if name.endswith("comfy_quant")]), len(tensors)) == (400, 1895)
    names = {
        "transformer": "wan2.2_i2v_high_noise_14B_int8_convrot.safetensors",
        "transformer_2": "wan2.2_i2v_low_noise_14B_int8_convrot.safetensors",
    }
    for name in names.values():
        write_sparse(tmp_path / name, tensors)
    assert (tmp_path / name).stat().st_size == pytest.approx(14.5e9, rel=0.02)
    base = with_config(tiny_wan, tmp_path / "base", dict.fromkeys(names, config))
    model = write_model_file(tmp_path, base, **names)
    assert run(["model", "check", model]) == 0
    # Both experts in rounds, as files store them: one at a time, and the step of 832x480.
    rounds = next(way for way in planned(model, capsys) if way["command"] == "svdq worker --experts rounds")
    assert rounds["fits"]
    assert rounds["need_bytes"] == pytest.approx(14.5e9 + 4.5e9, rel=0.1)


def test_ltx_2_3_is_checked_and_planned(tiny_ltx: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from diffusers import LTX2VideoTransformer3DModel

    name = "ltx-2.3-22b-distilled-transformer-int8-convrot.safetensors"
    tensors = quantized(LTX2VideoTransformer3DModel, LTX, original_ltx_name, "model.diffusion_model.")
    write_sparse(tmp_path / name, tensors)
    assert (tmp_path / name).stat().st_size == pytest.approx(19.1e9, rel=0.02)
    config = {"_class_name": "LTX2VideoTransformer3DModel", **LTX}
    model = write_model_file(
        tmp_path, with_config(tiny_ltx, tmp_path / "base", {"transformer": config}), transformer=name
    )
    assert run(["model", "check", model]) == 0
    rounds = next(way for way in planned(model, capsys) if way["command"] == "svdq worker --experts rounds")
    assert rounds["fits"]
    assert rounds["need_bytes"] == pytest.approx(19.1e9 + 2.2e9, rel=0.05)


def without(*ends: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {
        name: each for name, each in tensors.items() if name not in {f"{LAYER}{end}" for end in ends}
    }


def changed(end: str, dtype: str, shape: tuple[int, ...], contents: bytes = b"") -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {f"{LAYER}{end}": (dtype, shape, contents)}


def marked(mark: bytes | Mapping[str, Any]) -> Callable[[Tensors], Tensors]:
    note = mark if isinstance(mark, bytes) else json.dumps(mark).encode()
    return changed(".comfy_quant", "U8", (len(note),), note)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (without(".comfy_quant"), "without a mark of its format"),
        (without(".weight_scale"), "and has no weight_scale"),
        (without(".weight", ".weight_scale", ".comfy_quant"), "lacks"),
        (marked(b"{"), "that is no JSON"),
        (marked({"format": "asym_w4a8_int8"}), "in ComfyUI's format 'asym_w4a8_int8'"),
        (marked({"format": "mxfp8"}), "has its weight as I8 in place of F8_E4M3"),
        (marked({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 100}), "in groups of 100"),
        (changed(".weight_scale", "F32", (2560, 1)), "scales of shape [2560, 1] for 5120 rows"),
        (changed(".weight_scale", "F32", (5120, 1)), "with a scale of 0"),
        (changed(".weight", "I8", (5120, 2560)), "13,107,200 numbers in place of 26,214,400"),
        (changed(".weight", "BF16", (5120, 5120)), "has its weight as BF16 in place of I8"),
        (changed(".pre_quant_scale", "F32", (5120,)), "does not know how it changes"),
    ],
)  # fmt: skip
def test_damaged_files_are_refused_in_a_sentence(
    tiny_wan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Tensors], Tensors], says: str
) -> None:
    """With one block of the published width."""
    from diffusers import WanTransformer3DModel

    config = read_json(A14B, "transformer/config.json", "") | {"num_layers": 1}
    tensors = quantized(WanTransformer3DModel, config, original_name)
    write_sparse(tmp_path / "int8.safetensors", damage(tensors))
    model = write_model_file(
        tmp_path, with_config(tiny_wan, tmp_path / "base", {"transformer": config}), transformer="int8.safetensors"
    )
    capsys.readouterr()  # the libraries' warnings
    assert run(["model", "check", model]) == 2
    sentence = capsys.readouterr().err
    assert says in sentence
    assert sentence.startswith("Error: ")
    assert sentence.count("\n") == 1


@pytest.mark.parametrize("num_bytes", [100, 10_000, 10**8])
def test_a_file_that_is_cut_is_refused_in_a_sentence(
    tiny_wan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], num_bytes: int
) -> None:
    tensors: Tensors = {f"layer.{number}.weight": ("I8", (1024, 1024), b"") for number in range(200)}
    write_sparse(tmp_path / "int8.safetensors", tensors)
    os.truncate(tmp_path / "int8.safetensors", num_bytes)
    assert run(["model", "check", write_model_file(tmp_path, tiny_wan, transformer="int8.safetensors")]) == 2
    sentence = capsys.readouterr().err
    assert "int8.safetensors" in sentence
    assert sentence.count("\n") == 1
