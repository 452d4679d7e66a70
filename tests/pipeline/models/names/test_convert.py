"""`svdq model convert`: a copy in half precision that loads as the original does in that dtype."""

import json
import os
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from svdq.cli.main import run
from svdq.pipeline.errors import InputError
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.names.convert import convert
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.video_model import Role
from tests.full_disk import files_of_at_most

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("family", "dtype"), [("svd", torch.bfloat16), ("svd", torch.float16), ("wan", torch.bfloat16)]
)
def test_a_copy_loads_like_the_original_in_its_dtype(
    tiny_model: Path, tiny_wan: Path, tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    source = tiny_model if family == "svd" else tiny_wan
    total = convert(resolve(str(source)), tmp_path / "half", dtype, shard_bytes=20_000)
    assert total < sum(file.stat().st_size for file in source.rglob("*.safetensors")) / 1.5
    denoiser = tmp_path / "half" / ("unet" if family == "svd" else "transformer_2")
    stored = [load_file(file) for file in sorted(denoiser.glob("*.safetensors"))]
    assert len(stored) > 1, "in shards, with an index"
    dtypes = {name: tensor.dtype for shard in stored for name, tensor in shard.items()}
    if family == "svd":
        assert {*dtypes.values()} == {dtype}
    else:  # diffusers keeps some in float32
        assert dtypes["blocks.0.scale_shift_table"] == torch.float32
        assert dtypes["blocks.0.attn1.to_q.weight"] == dtype
    copy, original = (open_model(resolve(str(name)), Role.of_rank(0), CPU, dtype) for name in (denoiser.parent, source))
    for component, module in getattr(original, "pipeline").components.items():  # noqa: B009
        if isinstance(module, torch.nn.Module):
            expected, found = module.state_dict(), getattr(copy, "pipeline").components[component].state_dict()  # noqa: B009
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected), component


def test_a_copy_of_ltx_has_all_components_and_its_vocoder_in_float32(tiny_ltx: Path, tmp_path: Path) -> None:
    convert(resolve(str(tiny_ltx)), tmp_path / "half", torch.bfloat16)
    opened = open_model(resolve(str(tmp_path / "half")), Role.of_rank(0), CPU, torch.bfloat16)
    pipeline = getattr(opened, "pipeline")  # noqa: B009
    assert next(pipeline.transformer.parameters()).dtype == torch.bfloat16
    assert next(pipeline.vocoder.parameters()).dtype == torch.float32
    for component in ("transformer", "connectors", "text_encoder", "latent_upsampler", "vocoder"):
        files = {
            name: sum(file.stat().st_size for file in (folder / component).glob("*.safetensors"))
            for name, folder in (("copy", tmp_path / "half"), ("original", tiny_ltx))
        }
        assert (files["copy"] < files["original"]) == (component in ("transformer", "connectors", "text_encoder"))


def test_nothing_is_left_of_a_copy_that_fails(tiny_model: Path, tmp_path: Path) -> None:
    target = tmp_path / "copies" / "half"

    def fail(_file: str, _bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(resolve(str(tiny_model)), target, torch.float16, on_file=fail)
    assert list((tmp_path / "copies").iterdir()) == []


def test_nothing_is_left_of_a_copy_on_a_full_disk(tiny_model: Path, tmp_path: Path) -> None:
    """As with a quota, which the free space does not show."""
    target = tmp_path / "copies" / "half"
    with files_of_at_most(1_000_000), pytest.raises(InputError, match=r"written to .*/half \(.*File too"):
        convert(resolve(str(tiny_model)), target, torch.float16)
    assert list((tmp_path / "copies").iterdir()) == []


def test_a_file_larger_than_memory_is_read_weight_by_weight(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last weight fills no disk here, and is not written: the copy ends before."""
    folder = shutil.copytree(tiny_model, tmp_path / "large")
    file = folder / "unet" / "diffusion_pytorch_model.safetensors"
    weights, data = load_file(tiny_model / "unet" / file.name), file.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    header, end = json.loads(data[8:length]), len(data) - length
    num_bytes = psutil.virtual_memory().total + psutil.swap_memory().total + 2**30
    header["large"] = {"dtype": "F32", "shape": [num_bytes // 4], "data_offsets": [end, end + num_bytes // 4 * 4]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[length:])
    os.truncate(file, file.stat().st_size + num_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4 * num_bytes))
    written: dict[str, torch.Tensor] = {}

    def stop_at_large(name: str, num_bytes: int) -> None:
        if num_bytes > 10**9:
            (parts,) = (tmp_path / "copies").rglob("unet")
            for part in parts.glob("*.safetensors"):
                written.update(load_file(part))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(
            resolve(str(folder)), tmp_path / "copies" / "half", torch.float16, on_file=stop_at_large, shard_bytes=99_999
        )
    assert written
    assert all(torch.equal(weight, weights[name].half()) for name, weight in written.items())


def test_a_folder_that_exists_is_left_alone(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="exists; name a folder"):
        convert(resolve(str(tiny_model)), tmp_path, torch.float16)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_model_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_model, folder)
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(InputError, match="cut off"):
        convert(resolve(str(folder)), tmp_path / "half", torch.float16)


def test_weights_in_fp8_are_refused_since_their_scales_would_be_lost(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "fp8")
    file = folder / "unet" / "diffusion_pytorch_model.safetensors"
    weights = {name: weight.to(torch.float8_e4m3fn) for name, weight in load_file(file).items()}
    save_file(weights | {"conv_in.scale_weight": torch.ones(1)}, file)
    with pytest.raises(InputError, match=r"^The unet of .* is stored in fp8, half of what a copy takes; use it as"):
        convert(resolve(str(folder)), tmp_path / "copy", torch.float16)


def test_a_model_file_is_refused_since_a_copy_would_lack_its_loras(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(f'base = "{tiny_model}"\n[defaults]\nsteps = 4\n')
    with pytest.raises(InputError, match=rf"'mine' is a model file; convert its base {tiny_model}, and name the copy"):
        convert(resolve(str(tmp_path / "mine.toml")), tmp_path / "copy", torch.float16)
    assert not (tmp_path / "copy").exists()


def test_the_command(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "half"
    assert run(["model", "convert", str(tiny_model), str(target), "--dtype", "fp16"]) == 0
    out, err = capsys.readouterr()
    assert f"SVDQ_MODEL={target}" in out
    assert "unet/diffusion_pytorch_model.safetensors" in err
    assert all(".safetensors  " in line for line in err.splitlines()), "libraries' advice is not shown"
    index = json.loads((target / "model_index.json").read_text(encoding="utf-8"))
    assert index["_class_name"] == "StableVideoDiffusionPipeline"
    assert run(["model", "convert", str(tmp_path / "absent"), str(tmp_path / "copy")]) == 2


class Opener:
    """What a pickle with code in it holds."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self.path), "w")


def test_a_pickle_becomes_safetensors_and_runs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weight = torch.rand(4, 6)
    source, target = tmp_path / "x2.pth", tmp_path / "new" / "x2.safetensors"
    torch.save({"params": {}, "params_ema": {"a": weight, "b": weight.T, "c": weight[0]}, "epoch": 3}, source)
    assert run(["model", "convert", str(source), str(target)]) == 0
    assert f"SVDQ_UPSCALER={target}" in capsys.readouterr().out
    found = load_file(target)
    assert found.keys() == {"a", "b", "c"}
    assert torch.equal(found["a"], weight)
    assert torch.equal(found["b"], weight.T)

    marker = tmp_path / "code has run"
    torch.save({"params": {"a": weight}, "more": Opener(marker)}, source)
    for wrong, words in (
        (target, "exists; name a file"),
        (tmp_path / "other.safetensors", "cannot be read as weights alone"),
        (tmp_path / "folder", "are written as safetensors; name a file such as x2.safetensors."),
    ):
        assert run(["model", "convert", str(source), str(wrong)]) == 2
        said = capsys.readouterr().err
        assert words in said
        assert said.count("\n") == 1
    assert not marker.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "x2.pth"]


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({1: torch.zeros(2)}, "a weight named 1, which is no text"),
        ({"a": torch.empty(10**5, 10**6, device="meta")}, "The weight 'a' of "),
        ({"a": torch.zeros(2, 2).to_sparse()}, "is no plain tensor"),
        ({"a": torch.zeros(1).expand(10**6, 10**5)}, "would take 400.0 GB, and the file has "),
        ({f"{number}": torch.zeros(1).expand(10**8) for number in range(100)}, "would take 40.0 GB"),
        ({"a": torch.zeros(2, dtype=torch.complex128)}, "cannot be safetensors (torch.complex128)"),
        ({"\ud800": torch.zeros(2)}, "surrogates not allowed"),
    ],
)
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")  # torch 2.15 says it at each
def test_weights_that_cannot_be_written_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], weights: dict[object, torch.Tensor], words: str
) -> None:
    source = tmp_path / "x2.pth"
    torch.save({"params": weights}, source)
    assert run(["model", "convert", str(source), str(tmp_path / "x2.safetensors")]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["x2.pth"]


def test_a_compressed_pickle_is_refused_before_it_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"a": torch.zeros(10**6)}, tmp_path / "plain.pth")
    source = tmp_path / "x2.pth"
    with zipfile.ZipFile(tmp_path / "plain.pth") as plain, zipfile.ZipFile(source, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    assert run(["model", "convert", str(source), str(tmp_path / "x2.safetensors")]) == 2
    assert "is compressed" in capsys.readouterr().err
