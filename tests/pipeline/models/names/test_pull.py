"""Presets against a hub with the names of their files: what is fetched, and what is not because it is here."""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from svdq.cli.main import run
from svdq.pipeline.errors import InputError
from svdq.pipeline.models.model_file import CONFIGS, find_file
from svdq.pipeline.models.model_name import PRESETS
from svdq.pipeline.models.names.model_names import resolve, what_it_was
from svdq.pipeline.models.names.pull import downloads_of
from svdq.pipeline.models.names.sized_model import sized_model
from svdq.pipeline.models.published_files import published_sizes
from svdq.worker.cards import Cards
from svdq.worker.choice import best_preset
from svdq.worker.fit import to_fetch
from tests.hub import Hub, running
from tests.hub import know as know_hub

A14B, SVD = "Wan-AI/Wan2.2-I2V-A14B-Diffusers", "stabilityai/stable-video-diffusion-img2vid-xt"
LTX = "Lightricks/LTX-2.5-Diffusers"
FOUR_STEPS = PRESETS["wan2.2-4step"]
#: The folders of ComfyUI that have the files of `wan2.2-4step`.
IN_COMFYUI = {
    "wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors": "ComfyUI/models/diffusion_models",
    "wan2.2_i2v_low_noise_14B_fp8_scaled.safetensors": "ComfyUI/models/diffusion_models/wan",
    "umt5_xxl_fp8_e4m3fn_scaled.safetensors": "ComfyUI/models/clip",
    "wan_2.1_vae.safetensors": "ComfyUI/models/vae",
    "wan2.2_i2v_lightx2v_4steps_lora_v1_high_noise.safetensors": "ComfyUI/models/loras",
    "wan2.2_i2v_lightx2v_4steps_lora_v1_low_noise.safetensors": "shared/loras",
}
#: Bytes of the weights in the published folders.
FOLDERS: Mapping[str, Mapping[str, int]] = {
    A14B: {
        "transformer/diffusion_pytorch_model.safetensors": 57_155_604_736,
        "transformer_2/diffusion_pytorch_model.safetensors": 57_155_604_736,
        "text_encoder/model.safetensors": 11_361_820_672,
        "vae/diffusion_pytorch_model.safetensors": 507_570_124,
        "assets/video.mp4": 1_000_000_000,
    },
    SVD: {
        f"{component}{variant}.safetensors": num_bytes * (1 if variant else 2)
        for component, num_bytes in {
            "unet/diffusion_pytorch_model": 3_049_246_164,
            "vae/diffusion_pytorch_model": 195_485_694,
            "image_encoder/model": 1_264_153_600,
        }.items()
        for variant in ("", ".fp16")
    },
    LTX: {"transformer/diffusion_pytorch_model.safetensors": 37_975_718_400, "tokenizer/tokenizer.json": 33_000_000},
}
SVD_INDEX = {"_class_name": "StableVideoDiffusionPipeline", "unet": ["diffusers", "UNetSpatioTemporalConditionModel"]}
SVD_INDEX |= {"vae": ["diffusers", "AutoencoderKLTemporalDecoder"], "image_encoder": ["transformers", "CLIP"]}
LTX_INDEX = {"_class_name": "LTX2Pipeline", "transformer": ["diffusers", "LTX2VideoTransformer3DModel"]}


def write_weights(path: Path, num_bytes: int) -> None:
    """Write a sparse safetensors file of a size, of one weight; ComfyUI's of a text encoder has a tokenizer, too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rest = num_bytes - 8 - 400 - 8
    tensors: dict[str, object] = {"__metadata__": {"name": path.name}}
    tensors["blocks.0.weight"] = {"dtype": "F8_E4M3", "shape": [rest], "data_offsets": [8, 8 + rest]}
    first = "spiece_model" if path.name.startswith("umt5") else "scaled_fp8"
    tensors[first] = {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}
    header = json.dumps(tensors).encode().ljust(400)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(num_bytes)


def write_hub(folder: Path, size_of: Callable[[int], int]) -> dict[str, Path]:
    """Write the repositories of the presets with files of the real names; return their folders."""
    for name, num_bytes in published_sizes().items():
        repository, _, file = name.partition(":")
        write_weights(folder / repository / file, size_of(num_bytes))
    shutil.copytree(CONFIGS / A14B, folder / A14B)
    for base, files in FOLDERS.items():
        for file, num_bytes in files.items():
            write_weights(folder / base / file, size_of(num_bytes))
    (folder / A14B / "tokenizer" / "tokenizer.json").write_text("{}")
    for base, index in ((SVD, SVD_INDEX), (LTX, LTX_INDEX)):
        (folder / base / "model_index.json").write_text(json.dumps(index))
    return {f"{each.parent.name}/{each.name}": each for each in folder.glob("*/*")}


@pytest.fixture
def comfyui(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without files, in which ComfyUI may be."""
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    return tmp_path / "me"


@pytest.fixture
def hub(tmp_path: Path, comfyui: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the presets' files in their real sizes, and an empty cache."""
    yield from serving(tmp_path, monkeypatch, lambda size: size)


@pytest.fixture
def small_hub(tmp_path: Path, comfyui: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The same with small files."""
    yield from serving(tmp_path, monkeypatch, lambda size: 1000 + size % 9)


def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size_of: Callable[[int], int]) -> Iterator[Hub]:
    folders = write_hub(tmp_path / "hub", size_of)
    with running(A14B, folders[A14B]) as hub:
        hub.others = folders
        know_hub(monkeypatch, tmp_path / "cache", hub.url)
        yield hub


def fill_comfyui(home: Path, size_of: Callable[[int], int] = lambda size: size) -> None:
    """Write what `wan2.2-4step` needs into ComfyUI's folders, one of them named by extra_model_paths.yaml."""
    sizes = {name.rpartition("/")[2]: size for name, size in published_sizes().items()}
    for file, folder in IN_COMFYUI.items():
        write_weights(home / folder / file, size_of(sizes[file]))
    text = f"mine:\n  base_path: {home}/shared\n  loras: loras\n"
    (home / "ComfyUI" / "extra_model_paths.yaml").write_text(text)


@pytest.mark.parametrize(
    ("gpus", "preset", "gigabytes"),
    [
        ("1x8", "wan2.2-4step-q4", 28.8),
        ("1x12", "wan2.2-4step-q4", 28.8),
        ("1x16", "wan2.2-4step-q4", 28.8),
        ("1x24", "wan2.2-4step", 38.0),
        ("1x48", "wan2.2-4step-bf16", 127.6),
        ("7x24", "wan2.2-4step", 38.0),
    ],
)
def test_the_preset_for_some_gpus_and_the_bytes_that_it_fetches(
    hub: Hub, gpus: str, preset: str, gigabytes: float
) -> None:
    cards = Cards.parse(gpus)
    assert cards is not None
    choice = best_preset(cards, 64 * 10**9)
    assert choice is not None
    assert choice.preset == preset
    found = downloads_of(Path(PRESETS[preset]), "fp16")
    assert sum(each.missing_bytes for each in found) == pytest.approx(gigabytes * 1e9, rel=0.005)
    assert to_fetch(choice.model).startswith(f"{gigabytes:.1f} GB to fetch"), "also before the hub is asked"


@pytest.mark.parametrize(
    ("preset", "gigabytes"),
    [("wan2.2-5b", 18.15), ("svd-xt", 4.51), ("svd-xt-calm", 4.51), ("ltx-2.5-distilled", 39.72)],
)
def test_the_other_presets_fetch_nothing_that_their_files_replace(hub: Hub, preset: str, gigabytes: float) -> None:
    found = downloads_of(Path(PRESETS[preset]), "fp16")
    assert sum(each.missing_bytes for each in found) == pytest.approx(gigabytes * 1e9, rel=0.005)


@pytest.mark.parametrize(("host_gb", "preset"), [(64, "wan2.2-4step-q4"), (16, "svd-xt")])
def test_a_small_card_gets_what_the_memory_of_the_host_has_room_for(home: Path, host_gb: int, preset: str) -> None:
    choice = best_preset(Cards(number=1, total_bytes=8 * 2**30), host_gb * 10**9)
    assert choice is not None
    assert (choice.preset, choice.shape) == (preset, {"svd-xt": "576x320x14"}.get(preset, "640x352x81"))
    assert best_preset(Cards(number=1, total_bytes=4 * 2**30), host_gb * 10**9) is None


@pytest.mark.parametrize(
    ("disk_gb", "preset"), [(200, "wan2.2-4step-bf16"), (60, "wan2.2-4step"), (10, "svd-xt"), (1, None)]
)
def test_the_disk_has_room_for_the_best_preset(hub: Hub, disk_gb: int, preset: str | None) -> None:
    choice = best_preset(Cards(number=1, total_bytes=48 * 2**30), 64 * 10**9, disk_gb * 10**9)
    assert (choice and choice.preset) == preset


def test_nothing_is_fetched_with_the_files_of_comfyui(
    hub: Hub, comfyui: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill_comfyui(comfyui)
    assert to_fetch(sized_model(FOUR_STEPS)) == ""
    assert run(["model", "pull", "wan2.2-4step"]) == 0
    assert "wan2.2-4step: all files are here; " in capsys.readouterr().out
    assert hub.given == []
    found = resolve(FOUR_STEPS)
    assert found.weights["vae"] == comfyui / "ComfyUI/models/vae/wan_2.1_vae.safetensors"
    assert found.loras[1].file.parent == comfyui / "shared/loras"


def test_files_of_comfyui_count_by_their_size_and_the_cache_comes_first(
    small_hub: Hub, comfyui: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill_comfyui(comfyui, lambda size: 1000 + size % 9)
    vae = comfyui / "ComfyUI/models/vae/wan_2.1_vae.safetensors"
    vae.write_bytes(b"half a file")
    (lora := comfyui / "shared/loras/wan2.2_i2v_lightx2v_4steps_lora_v1_low_noise.safetensors").unlink()
    assert run(["model", "pull", "wan2.2-4step"]) == 0
    assert "wan2.2-4step: 2 of 6 files to fetch, " in capsys.readouterr().out
    assert sorted(small_hub.given) == [f"split_files/loras/{lora.name}", f"split_files/vae/{vae.name}"]
    assert resolve(FOUR_STEPS).weights["vae"] != vae
    small_hub.given.clear()
    assert run(["model", "pull", "wan2.2-4step"]) == 0
    assert small_hub.given == []


def test_an_empty_machine_gets_the_files_and_no_configs(small_hub: Hub) -> None:
    with pytest.raises(InputError, match=r"is not on this machine; fetch it with `svdq model pull wan2\.2-4step`"):
        resolve(FOUR_STEPS)
    assert run(["model", "pull", "wan2.2-4step"]) == 0
    assert {Path(each).name for each in small_hub.given} == IN_COMFYUI.keys()
    model = resolve(FOUR_STEPS)
    assert (model.folder, len(model.weights), len(model.loras)) == (CONFIGS / A14B, 4, 2)
    small_hub.given.clear()
    model.weights["vae"].resolve().write_bytes(b"damaged")
    assert run(["model", "pull", "wan2.2-4step"]) == 0
    assert small_hub.given == ["split_files/vae/wan_2.1_vae.safetensors"]


def test_a_pull_that_was_interrupted_goes_on_with_what_is_whole(small_hub: Hub) -> None:
    vae = "split_files/vae/wan_2.1_vae.safetensors"
    small_hub.breaks, small_hub.after_break = {vae: 1}, 503
    assert run(["model", "pull", "wan2.2-4step"]) == 3
    whole = {*small_hub.given} - {vae}
    assert len(whole) >= 3
    small_hub.given.clear()
    small_hub.after_break = None
    assert run(["model", "pull", "wan2.2-4step"]) == 0
    assert not whole & {*small_hub.given}, "what is whole is not fetched again"
    assert resolve(FOUR_STEPS).weights.keys() == {"transformer", "transformer_2", "text_encoder", "vae"}


def test_where_the_files_of_the_former_preset_are_it_is_named(small_hub: Hub) -> None:
    assert what_it_was(FOUR_STEPS) == ""
    assert run(["model", "pull", "wan2.2-4step-bf16"]) == 0
    assert what_it_was(FOUR_STEPS)
    assert what_it_was("/models/wan2.2-4step.toml") == what_it_was(PRESETS["svd-xt"]) == ""
    former = r"What wan2\.2-4step was before is the preset wan2\.2-4step-bf16 now"
    with pytest.raises(InputError, match=former):
        resolve(FOUR_STEPS)
    resolve(PRESETS["wan2.2-4step-bf16"])


def test_a_model_file_whose_files_are_all_named_by_their_paths_needs_no_hub(
    comfyui: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill_comfyui(comfyui, lambda size: 1000 + size % 9)
    found = {path.name: path for path in comfyui.rglob("*.safetensors")}
    text = re.sub(r'"[^"]*/([^"/]*[.]safetensors)"', lambda each: f'"{found[each[1]]}"', Path(FOUR_STEPS).read_text())
    (tmp_path / "mine.toml").write_text(text)
    assert run(["model", "pull", str(tmp_path / "mine.toml")]) == 0
    assert "mine: all files are here; " in capsys.readouterr().out
    (comfyui / "ComfyUI/models/vae/wan_2.1_vae.safetensors").unlink()
    assert run(["model", "pull", str(tmp_path / "mine.toml")]) == 2


def test_a_name_that_any_model_may_have_is_not_looked_for_in_comfyui(comfyui: Path) -> None:
    write_weights(comfyui / "ComfyUI/models/diffusion_models/model.safetensors", 1000)
    with pytest.raises(InputError, match="is not on this machine"):
        find_file("someone/wan:model.safetensors", comfyui / "mine.toml", (".safetensors",))
