"""A new family, and with it a new parameter, is known to every front without a change elsewhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FORM = """
import json
from datetime import UTC, datetime
from svdq.cli.serve.form import fields, read_spec
[field] = [field for field in fields("toy", {}) if field.name == "sparkle"]
spec = read_spec({"family": "toy", "sparkle": "5"}, datetime.now(UTC))
print(json.dumps([field.label, field.kind, field.low, field.high, spec.options[0].given()]))
"""


@pytest.mark.slow
def test_a_family_passes_submit_worker_page_and_sidecar(home: Path, photo: Path, tmp_path: Path) -> None:
    toy = Path(__file__).parent / "toy"
    environment = os.environ | {"PYTHONPATH": str(toy)}

    def run(*arguments: object, code: int = 0) -> str:
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    assert "--sparkle 10 is not allowed" in run("-m", "svdq.cli", "submit", photo, "--sparkle", 10, code=2)
    options = ("--sparkle", 3, "--seed", 7, "--fit", "pad")
    submitted = json.loads(run("-m", "svdq.cli", "submit", photo, *options, "--json"))
    listed = tmp_path / "list.csv"
    listed.write_text(f"photo,family,sparkle,seed\n{photo},toy,4,7\n")
    run("-m", "svdq.cli", "batch", listed)
    run("-m", "svdq.cli", "worker", "--burst", "--ranks", 1, "--device", "cpu")
    sidecars = [json.loads(path.read_bytes()) for path in (home / "storage" / "outputs").glob("*.json")]
    assert sorted((each["job"]["family"], each["job"]["sparkle"]) for each in sidecars) == [("toy", 3), ("toy", 4)]
    assert submitted["id"] in {each["job_id"] for each in sidecars}
    assert json.loads(run("-c", FORM)) == ["Sparkle", "number", "0", "9", {"family": "toy", "sparkle": 5}]
