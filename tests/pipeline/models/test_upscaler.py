"""Upscaled frames: the bits of spandrel's model, tiles where memory runs out, other factors, files that are none."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from svdq.pipeline.errors import InputError, SampleError
from svdq.pipeline.models.upscaler import Upscaler
from svdq.pipeline.models.upscaler_file import find_upscaler
from tests.upscaling import by_spandrel, torchvision, write_upscaler

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with torchvision(tmp_path_factory.mktemp("torchvision")):
        return write_upscaler(tmp_path_factory.mktemp("upscaler") / "tiny x2.safetensors")


@pytest.fixture
def frames() -> np.ndarray:
    """Three frames of 144x112 with edges and noise."""
    rng = np.random.default_rng(0)
    small = rng.integers(0, 256, (3, 14, 18, 3), np.uint8)
    return np.stack([np.asarray(Image.fromarray(each).resize((144, 112))) for each in small])


class LittleMemory:
    """Lets a model see images of a limited number of pixels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
        import spandrel

        self.sizes: list[tuple[int, ...]] = []
        call = spandrel.ImageModelDescriptor.__call__

        def limited(model, image: torch.Tensor) -> torch.Tensor:
            self.sizes.append(tuple(image.shape[2:]))
            if image.shape[2] * image.shape[3] > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
            return call(model, image)

        monkeypatch.setattr(spandrel.ImageModelDescriptor, "__call__", limited)


def upscaled(upscaler: Upscaler, frames: np.ndarray, size: tuple[int, int]) -> tuple[np.ndarray, dict]:
    found = upscaler.upscale(torch.from_numpy(frames), size)
    assert found is not None
    return found[0].numpy(), found[1]


def test_frames_are_those_of_the_model(file: Path, frames: np.ndarray) -> None:
    expected = by_spandrel(file, frames)
    assert expected.std() > 5
    found, record = upscaled(Upscaler(file, CPU), frames, (288, 224))
    np.testing.assert_array_equal(found, expected)
    assert record == {"model": "tiny x2", "digest": record["digest"]}
    assert len(record["digest"]) == 16


def test_frames_without_memory_are_upscaled_in_tiles(
    file: Path, frames: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    upscaler = Upscaler(file, CPU)
    memory = LittleMemory(monkeypatch, most=112 * 112)
    found, record = upscaled(upscaler, frames, (288, 224))
    assert record["tile"] == 72
    assert memory.sizes[:2] == [(112, 144), (104, 104)]
    np.testing.assert_allclose(found.astype(int), by_spandrel_without_limit(monkeypatch, file, frames), atol=1)
    memory = LittleMemory(monkeypatch, most=112 * 112)
    assert upscaled(upscaler, frames[:1], (288, 224))[1]["tile"] == 72
    assert memory.sizes[0] == (104, 104), "what ran out of memory is not tried again"


def by_spandrel_without_limit(monkeypatch: pytest.MonkeyPatch, file: Path, frames: np.ndarray) -> np.ndarray:
    monkeypatch.undo()
    return by_spandrel(file, frames).astype(int)


def test_tiles_end_with_the_smallest(file: Path, frames: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    LittleMemory(monkeypatch, most=100)
    with pytest.raises(torch.OutOfMemoryError):
        Upscaler(file, CPU).upscale(torch.from_numpy(frames), (288, 224))


@pytest.mark.parametrize(
    ("size", "box"),
    [((216, 168), (0, 0, 288, 224)), ((432, 336), (0, 0, 288, 224)), ((200, 200), (32, 0, 256, 224))],
)
def test_another_factor_is_reached_by_a_last_resize(
    file: Path, frames: np.ndarray, size: tuple[int, int], box: tuple[int, int, int, int]
) -> None:
    found, _ = upscaled(Upscaler(file, CPU), frames, size)
    for frame, image in zip(found, map(Image.fromarray, by_spandrel(file, frames)), strict=True):
        np.testing.assert_array_equal(frame, np.asarray(image.resize(size, Image.Resampling.LANCZOS, box=box)))


def test_a_canceled_video_is_left(file: Path, frames: np.ndarray) -> None:
    answers = iter([False, True])
    assert Upscaler(file, CPU).upscale(torch.from_numpy(frames), (288, 224), lambda: next(answers)) is None
    assert next(answers, None) is None


def test_nan_is_said(file: Path, frames: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    import spandrel

    monkeypatch.setattr(spandrel.ImageModelDescriptor, "__call__", lambda _, image: image * float("nan"))
    with pytest.raises(SampleError, match="The upscaler tiny x2 gives NaN or infinity"):
        Upscaler(file, CPU).upscale(torch.from_numpy(frames), (288, 224))


def test_a_file_that_is_no_upscaler_is_refused(tmp_path: Path, file: Path) -> None:
    save_file({"conv.weight": torch.zeros(3, 3)}, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match=r"is no upscaler that spandrel knows; set SVDQ_UPSCALER to another"):
        Upscaler(tmp_path / "other.safetensors", CPU)
    (tmp_path / "broken.safetensors").write_bytes(b"no")
    with pytest.raises(InputError, match=r"The upscaler .*broken.safetensors cannot be loaded"):
        Upscaler(tmp_path / "broken.safetensors", CPU)


def test_names_are_looked_up_in_the_folder_of_comfyui(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    folder, beside = tmp_path / "ComfyUI/models/upscale_models", tmp_path / "else/upscale_models"
    for each in (folder / "a.safetensors", folder / "b.pth", folder / "x4/c.1.safetensors", beside / "d.safetensors"):
        each.parent.mkdir(parents=True, exist_ok=True)
        each.touch()
    assert find_upscaler("a") == find_upscaler("a.safetensors") == folder / "a.safetensors"
    assert find_upscaler("ComfyUI/models/upscale_models/a") == folder / "a.safetensors"
    assert find_upscaler("x4/c.1") == folder / "x4/c.1.safetensors"
    assert find_upscaler("d", beside.parent / "loras") == beside / "d.safetensors"
    with pytest.raises(InputError, match=r"may run code .* `svdq model convert .*b\.pth .*b\.safetensors`"):
        find_upscaler("b")
    with pytest.raises(InputError, match=r"There is no upscaler 'd', neither as a file nor in .*upscale_models"):
        find_upscaler("d")


@pytest.mark.parametrize("error", ["ImportError('No module named torchvision')", "RuntimeError('no operator nms')"])
def test_what_is_not_installed_is_named(file: Path, tmp_path: Path, monkeypatch, error: str) -> None:
    """Also a torchvision that was built for another torch."""
    (tmp_path / "spandrel.py").write_text(f"raise {error}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "spandrel")
    with pytest.raises(
        InputError, match=r"Upscaling needs spandrel, and a torchvision .*n.*; to install them, run `pip"
    ):
        Upscaler(file, CPU)
