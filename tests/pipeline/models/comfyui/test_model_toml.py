"""Files where ComfyUI has them, and what is said of those that are missing."""

import tomllib
from pathlib import Path

import pytest

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.comfyui.model_toml import about_bytes
from svdq.pipeline.models.comfyui.workflow import read_workflow
from svdq.pipeline.models.comfyui_folders import find_folders
from tests.pipeline.models.comfyui.workflows import TEMPLATES, read, two_experts, written


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_the_template_of_wan_2_2_with_its_loras_switched_on_is_a_model_file() -> None:
    workflow = read_workflow(TEMPLATES / "video_wan2_2_14B_i2v.json")
    subgraph = next(each for each in workflow["nodes"] if each["id"] == 129)
    subgraph["widgets_values"][-1] = True
    made, models = written(read(workflow)), "ComfyUI/models"
    experts = {"high": "transformer", "low": "transformer_2"}
    loras = {name: f"{models}/loras/wan2.2_i2v_lightx2v_4steps_lora_v1_{name}_noise.safetensors" for name in experts}
    size = {"width": 640, "height": 640, "frames": 81, "fps": 16}
    assert made.notes == ()
    document = tomllib.loads(made.toml)
    assert document["defaults"].pop("negative_prompt").startswith("\u8272\u8c03")
    assert document == {
        "base": "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
        "weights": {
            **{
                component: f"{models}/diffusion_models/wan2.2_i2v_{name}_noise_14B_fp8_scaled.safetensors"
                for name, component in experts.items()
            },
            "text_encoder": f"{models}/text_encoders/umt5_xxl_fp8_e4m3fn_scaled.safetensors",
            "vae": f"{models}/vae/wan_2.1_vae.safetensors",
        },
        "lora": [{"file": loras[name], "component": component, "strength": 1.0} for name, component in experts.items()],
        "defaults": {"steps": 4, "guidance_scale": 1.0, "guidance_scale_2": 1.0} | size,
        "scheduler": {"class": "FlowMatchEulerDiscreteScheduler", "shift": 5.0, "sigmas": "simple", "switch_at": 2},
    }


def test_files_are_found_by_their_kind_also_in_subfolders(tmp_path: Path) -> None:
    models = tmp_path / "ComfyUI" / "models"
    unet = touch(models / "unet" / "wan" / "high.safetensors")
    lora = touch(models / "loras" / "style.safetensors")
    moved = touch(models / "loras" / "new place" / "moved.safetensors")
    for given in (tmp_path / "ComfyUI", models):
        found = find_folders(given, tmp_path / "w.json")
        assert found.candidates("transformer", "wan\\high.safetensors") == [unet]
        assert found.candidates("lora", "style.safetensors") == [lora]
        assert found.candidates("lora", "old/moved.safetensors") == [moved]
        assert found.candidates("lora", "../unet/wan/high.safetensors") == []
    # Without a folder, the one around the workflow.
    around = find_folders(None, touch(tmp_path / "ComfyUI" / "user" / "workflows" / "w.json"))
    assert around.models == models


def test_of_files_of_one_name_the_longest_tail_counts(tmp_path: Path) -> None:
    api = two_experts()
    for name in ("high", "low"):
        api[f"unet_{name}"]["inputs"]["unet_name"] = f"Wan2.2\\{name}\\x.safetensors"
    models = tmp_path / "models"
    high, low = (touch(models / "unet" / "wan" / name / "x.safetensors") for name in ("High", "Low"))
    made = written(read(api), find_folders(models, tmp_path / "w.json"))
    weights = tomllib.loads(made.toml)["weights"]
    assert (weights["transformer"], weights["transformer_2"]) == (str(high), str(low))
    # Without a folder that says which, none is chosen, none is to be fetched, and both are named.
    for name in ("high", "low"):
        api[f"unet_{name}"]["inputs"]["unet_name"] = "x.safetensors"
    api["unet_low"]["inputs"]["unet_name"] = "y.safetensors"
    made = written(read(api), find_folders(models, tmp_path / "w.json"))
    assert not Path(tomllib.loads(made.toml)["weights"]["transformer"]).exists()
    assert any(str(high) in note and str(low) in note for note in made.notes)
    assert "x.safetensors" not in [each.path.name for each in made.missing]


def test_what_is_not_read_is_said_and_not_to_be_fetched(tmp_path: Path) -> None:
    api = two_experts()
    api["clip"]["inputs"]["clip_name"] = "umt5_mxfp4.safetensors"
    api["unet_high"]["inputs"]["unet_name"] = "wan2.2_high_mxfp4.safetensors"
    api["lora_low"]["inputs"]["lora_name"] = "style.pt"
    api["photo"]["inputs"]["image"] = "cat.png [input]"
    made = written(read(api), find_folders(tmp_path, tmp_path / "w.json"))
    missing = [each.path.name for each in made.missing]
    assert missing == ["wan2.2_i2v_low_noise_14B_fp8_scaled.safetensors", "wan_2.1_vae.safetensors", "high.safetensors"]
    for name in ("umt5_mxfp4", "wan2.2_high_mxfp4", "style.pt"):
        assert any(name in note for note in made.notes)
    assert "text_encoder" not in tomllib.loads(made.toml)["weights"]
    assert made.submit[1] == "cat.png"


@pytest.mark.parametrize(
    "text", ["a: &a [1]\nb: *a\n", "a: " + "[" * 5000, "a: b\n" * 50_000], ids=["aliases", "deep", "long"]
)
def test_a_hostile_yaml_is_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "extra_model_paths.yaml").write_text(text)
    with pytest.raises(InputError, match=r"extra_model_paths.yaml cannot be read"):
        find_folders(tmp_path, tmp_path / "w.json")


def test_extra_model_paths_are_searched_too(tmp_path: Path) -> None:
    (tmp_path / "ComfyUI" / "models").mkdir(parents=True)
    (tmp_path / "ComfyUI" / "extra_model_paths.yaml").write_text(
        "mine:\n  base_path: ../disk\n  is_default: true\n  loras: |\n    a\n    b\n  vae: c/\n"
    )
    lora = touch(tmp_path / "disk" / "b" / "style.safetensors")
    vae = touch(tmp_path / "disk" / "c" / "wan.safetensors")
    found = find_folders(tmp_path / "ComfyUI", tmp_path / "w.json")
    for kind, file in (("lora", lora), ("vae", vae)):
        assert [each.resolve() for each in found.candidates(kind, file.name)] == [file]


def test_a_broken_yaml_and_a_folder_that_is_not_there_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="There is no folder"):
        find_folders(tmp_path / "none", tmp_path / "w.json")
    (tmp_path / "models").mkdir()
    (tmp_path / "extra_model_paths.yaml").write_text("a: [")
    with pytest.raises(InputError, match=r"extra_model_paths.yaml cannot be read"):
        find_folders(tmp_path, tmp_path / "w.json")


def test_missing_files_are_named_with_their_place_and_size(tmp_path: Path) -> None:
    models = tmp_path / "models"
    vae = touch(models / "vae" / "wan_2.1_vae.safetensors")
    photo = touch(tmp_path / "input" / "cat.png")
    made = written(read(two_experts()), find_folders(models, tmp_path / "w.json"))
    document = tomllib.loads(made.toml)
    assert document["weights"]["vae"] == str(vae)
    place = models / "diffusion_models" / "wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors"
    assert document["weights"]["transformer"] == str(place)
    assert f"{place} (about 14.3 GB)" in [str(each) for each in made.missing]
    assert [each.about for each in made.missing if each.path.parent.name == "loras"] == ["", ""]
    assert made.submit == ("submit", str(photo), "--prompt", "The cat jumps.", "--size", "832x480", "--seed", "7")


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [("a_fp8_scaled.safetensors", 1.0), ("a-Q4_K_M.gguf", 0.6), ("a_bf16.safetensors", 2.0), ("a.safetensors", 2.0)],
)
def test_sizes_are_estimated_by_the_name(name: str, gigabytes: float) -> None:
    assert about_bytes(name, 10**9) / 1e9 == pytest.approx(gigabytes)
