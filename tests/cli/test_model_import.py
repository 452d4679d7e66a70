"""`svdq model import`: what it prints and writes."""

import json
import shlex
import tomllib
from pathlib import Path

import pytest

from tests.conftest import Cli
from tests.pipeline.models.comfyui.workflows import TEMPLATES, node, two_experts


@pytest.fixture
def workflow(tmp_path: Path) -> Path:
    path = tmp_path / "two.json"
    path.write_text(json.dumps(two_experts()))
    return path


def test_it_writes_a_model_file_and_prints_the_submission(svdq: Cli, workflow: Path, tmp_path: Path) -> None:
    (tmp_path / "models" / "vae").mkdir(parents=True)
    done = svdq("model", "import", str(workflow), "--models", str(tmp_path), "--output", str(tmp_path / "mine.toml"))
    assert done.returncode == 0
    assert (
        f"SVDQ_MODEL={tmp_path}/mine.toml svdq submit cat.png --prompt 'The cat jumps.' --size 832x480 --seed 7\n"
        in done.stdout
    )
    assert "Missing files:\n" in done.stdout
    assert "Not carried over" not in done.stdout
    document = tomllib.loads((tmp_path / "mine.toml").read_text())
    assert document["base"] == "Wan-AI/Wan2.2-I2V-A14B-Diffusers"
    assert document["defaults"] == {
        "steps": 4,
        "guidance_scale": 1.0,
        "guidance_scale_2": 1.0,
        "width": 832,
        "height": 480,
        "frames": 81,
        "fps": 16,
        "negative_prompt": "blurry",
    }
    as_json = json.loads(svdq("model", "import", str(workflow), "--output", str(tmp_path / "b.toml"), "--json").stdout)
    assert as_json["submit"][:2] == ["submit", "cat.png"]
    assert (len(as_json["missing"]), as_json["notes"]) == (6, [])


def test_every_printed_command_is_what_a_shell_reads(svdq: Cli, tmp_path: Path) -> None:
    """With spaces in the paths, a photo whose name begins with dashes, and an upscaler that is a pickle."""
    graph = two_experts()
    graph["photo"]["inputs"]["image"] = "--my cat.png"
    graph["loader"] = node("UpscaleModelLoader", model_name="4x-UltraSharp.pth")
    graph["upscaled"] = node("ImageUpscaleWithModel", upscale_model=["loader", 0], image=["decode", 0])
    graph["rife"] = node("RIFE VFI", frames=["upscaled", 0], multiplier=2)
    graph["save"]["inputs"] |= {"images": ["rife", 0], "fps": 32}
    folder, pickle = tmp_path / "my models", tmp_path / "my models" / "models" / "upscale_models" / "4x-UltraSharp.pth"
    (folder / "models" / "vae").mkdir(parents=True)
    pickle.parent.mkdir()
    pickle.write_bytes(b"a pickle")
    (folder / "a flow.json").write_text(json.dumps(graph))
    target = folder / "mine.toml"
    printed = svdq("model", "import", folder / "a flow.json", "--models", folder, "--output", target).stdout
    commands = [shlex.split(line) for line in printed.splitlines() if " svdq " in line or line.startswith("  svdq ")]
    options = [
        "--prompt",
        "The cat jumps.",
        "--size",
        "832x480",
        "--seed",
        "7",
        "--upscale",
        "4",
        "--interpolate",
        "32",
    ]
    weights = str(folder / "4x-UltraSharp.safetensors")
    assert commands == [
        [f"SVDQ_MODEL={target}", "svdq", "submit", *options, "--", "--my cat.png"],
        ["svdq", "model", "convert", str(pickle), weights],
        [f"SVDQ_MODEL={target}", f"SVDQ_UPSCALER={weights}", "svdq", "worker"],
    ]


def test_what_is_to_be_fetched_is_said_also_when_files_are_missing(svdq: Cli, tmp_path: Path) -> None:
    for name, is_needed in (("video_ltx2_3_i2v", True), ("video_wan2_2_14B_i2v", False)):
        target = tmp_path / f"{name}.toml"
        printed = svdq("model", "import", TEMPLATES / f"{name}.json", "--output", target).stdout
        assert "Missing files:" in printed
        assert (f"  svdq model pull {target}\n" in printed) == is_needed, printed


def test_it_replaces_no_file_and_refuses_with_exit_code_2(svdq: Cli, workflow: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("mine")
    for options, sentence in (
        (("--output", str(tmp_path / "mine.toml")), "exists; give another file as --output, or --force to replace it"),
        (("--output", str(tmp_path / "mine.txt")), "cannot be the name of a model file"),
        (("--output", str(tmp_path / "preview.toml")), "cannot be the name of a model file"),
        (("--output", str(tmp_path / "none" / "a.toml")), "cannot be written"),
        (("--models", str(tmp_path / "none")), "There is no folder"),
    ):
        done = svdq("model", "import", str(workflow), *options)
        assert (done.returncode, sentence in done.stderr) == (2, True)
    for part, inputs, sentence in (
        ("lora_high", {"strength_model": 11.0}, "value that svdq does not take (lora.0.strength: "),
        ("i2v", {"width": 99_999}, "The default width of the model file"),
        ("high", {"cfg": 200.0}, "The default guidance_scale of the model file"),
    ):
        changed = two_experts()
        changed[part]["inputs"] |= inputs
        workflow.write_text(json.dumps(changed))
        done = svdq("model", "import", str(workflow), "--output", str(tmp_path / "new.toml"))
        assert (done.returncode, sentence in done.stderr) == (2, True), done.stderr
        assert not (tmp_path / "new.toml").exists()
    workflow.write_text(json.dumps(two_experts()))
    assert (tmp_path / "mine.toml").read_text() == "mine"
    assert svdq("model", "import", str(workflow), "--output", str(tmp_path / "mine.toml"), "--force").returncode == 0


def test_the_command_can_be_typed_with_any_name(svdq: Cli, tmp_path: Path) -> None:
    changed = two_experts()
    changed["photo"]["inputs"]["image"] = "-my cat.png"
    (tmp_path / "my workflow.json").write_text(json.dumps(changed))
    target = tmp_path / "my model.toml"
    done = svdq("model", "import", str(tmp_path / "my workflow.json"), "--output", str(target))
    assert (
        f"  SVDQ_MODEL='{target}' svdq submit --prompt 'The cat jumps.' --size 832x480 --seed 7 -- '-my cat.png'\n"
        in (done.stdout)
    )
