"""`svdq model import`: what it prints and writes."""

import json
import tomllib
from pathlib import Path

import pytest

from tests.conftest import Cli
from tests.pipeline.models.comfyui.workflows import two_experts


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
