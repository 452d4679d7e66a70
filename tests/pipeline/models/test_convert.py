"""`svdq model convert`: a copy in half precision that loads as the original does in that dtype."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from svdq.cli.main import run
from svdq.pipeline.errors import InputError
from svdq.pipeline.models.convert import convert
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.model_names import resolve
from svdq.pipeline.models.video_model import Role
from tests.full_disk import files_of_at_most

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_copy_loads_like_the_original_in_its_dtype(tiny_model: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    total = convert(resolve(str(tiny_model)), tmp_path / "half", dtype, shard_bytes=100_000)
    files = sorted(path.name for path in (tmp_path / "half" / "unet").iterdir())
    assert len(files) > 3, "in shards, with an index"
    assert {tensor.dtype for tensor in load_file(tmp_path / "half" / "unet" / files[1]).values()} == {dtype}
    assert total < sum(file.stat().st_size for file in tiny_model.rglob("*.safetensors")) / 1.9
    copy, original = (
        open_model(resolve(str(name)), Role.of_rank(0), CPU, dtype) for name in (tmp_path / "half", tiny_model)
    )
    for component in ("unet", "vae", "image_encoder"):
        expected = getattr(original, "pipeline").components[component].state_dict()  # noqa: B009
        found = getattr(copy, "pipeline").components[component].state_dict()  # noqa: B009
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected), component


def test_a_copy_of_wan_keeps_what_diffusers_keeps_in_float32(tiny_wan: Path, tmp_path: Path) -> None:
    convert(resolve(str(tiny_wan)), tmp_path / "half", torch.bfloat16)
    stored = load_file(tmp_path / "half" / "transformer_2" / "diffusion_pytorch_model.safetensors")
    kinds = {name: tensor.dtype for name, tensor in stored.items()}
    assert kinds["blocks.0.scale_shift_table"] == kinds["condition_embedder.time_embedder.linear_1.weight"]
    assert kinds["blocks.0.scale_shift_table"] == torch.float32
    assert kinds["blocks.0.attn1.to_q.weight"] == torch.bfloat16
    copy, original = (
        open_model(resolve(str(name)), Role.of_rank(0), CPU, torch.bfloat16) for name in (tmp_path / "half", tiny_wan)
    )
    for component in ("transformer", "transformer_2", "text_encoder", "vae"):
        expected = getattr(original, "pipeline").components[component].state_dict()  # noqa: B009
        found = getattr(copy, "pipeline").components[component].state_dict()  # noqa: B009
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected), component


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
    with (
        files_of_at_most(1_000_000),
        pytest.raises(InputError, match=r"written to .*/half \(.*File too"),
    ):
        convert(resolve(str(tiny_model)), target, torch.float16)
    assert list((tmp_path / "copies").iterdir()) == []


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
