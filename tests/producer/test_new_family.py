"""A new family is a folder and its registration: every front, command and rank knows it without a change elsewhere."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from svdq.pipeline.media.sound import Sound
from tests.cli.serve.servers import TOKEN, TYPE, Server, multipart
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow

TOY = Path(__file__).parent / "toy"


#: A workflow of ComfyUI's editor, whose nodes are the family's own but for loaders.
WORKFLOW: dict[str, Any] = {
    "nodes": [
        {"id": 1, "type": "LoadImage", "widgets_values": ["cat.png", "image"]},
        {"id": 2, "type": "UNETLoader", "widgets_values": ["other.safetensors", "default"]},
        {"id": 3, "type": "ToyPhoto", "widgets_values": [64, 64, 9, 2], "inputs": [{"name": "picture", "link": 1}]},
        {
            "id": 4,
            "type": "ToySampler",
            "widgets_values": [5, "fixed", 6],
            "inputs": [{"name": "model", "link": 2}, {"name": "positive", "link": 3}],
        },
    ],
    "links": [[1, 1, 0, 3, 0, "IMAGE"], [2, 2, 0, 4, 0, "MODEL"], [3, 3, 0, 4, 1, "CONDITIONING"]],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the untrained model, and beside it `mine.toml`, imported from a workflow that names a file.

    `import.json` has what the import has printed.
    """
    folder = tmp_path_factory.mktemp("toy")

    def run(*words: str | Path) -> bytes:
        command = [sys.executable, "-m", "svdq.cli", "model", *words]
        return subprocess.run(
            command, env=os.environ | {"PYTHONPATH": str(TOY)}, check=True, capture_output=True
        ).stdout

    run("tiny", "--family", "toy", tiny := folder / "tiny")
    (folder / "models" / "unet").mkdir(parents=True)
    shutil.copy(tiny / "fine" / "model.safetensors", folder / "models" / "unet" / "other.safetensors")
    (folder / "workflow.json").write_text(json.dumps(WORKFLOW))
    made = folder / "mine.toml"
    printed = run("import", folder / "workflow.json", "--models", folder, "--output", made, "--json")
    (folder / "import.json").write_bytes(printed)
    made.write_text(made.read_text().replace("toys/toy", str(tiny)))
    return tiny


@pytest.fixture
def environment(home: Path, model: Path) -> dict[str, str]:
    """The user's, with the family registered and its model configured."""
    return os.environ | {"PYTHONPATH": str(TOY), "SVDQ_MODEL": str(model), "SVDQ_SERVE_TOKEN": TOKEN}


@pytest.fixture
def svdq(environment: dict[str, str]) -> Callable[..., str]:
    """Run `svdq` with the toy family, and return what it prints."""

    def run(command: str, *arguments: object, code: int = 0) -> str:
        words = [sys.executable, "-m", "svdq.cli", *command.split(), *map(str, arguments)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
        assert done.returncode == code, done.stderr
        return done.stdout if "--json" in words else done.stdout + done.stderr

    return run


@pytest.fixture
def server(environment: dict[str, str], tmp_path: Path) -> Iterator[Server]:
    log = tmp_path / "serve.log"
    with log.open("w") as output:
        command = [sys.executable, "-m", "svdq.cli", "serve", "--port", "0"]
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        wait_until(lambda: "Serving" in log.read_text() or process.poll() is not None, log.read_text)
        found = re.search(r"http://[^/\s]+", log.read_text())
        assert found is not None, log.read_text()
        yield Server(process, found[0], log)
    finally:
        process.terminate()
        process.wait()


def test_a_family_passes_every_front_and_any_number_of_ranks(
    svdq: Callable[..., str], server: Server, model: Path, home: Path, photo: Path, tmp_path: Path
) -> None:
    outputs = home / "storage" / "outputs"

    def submitted(folder: str) -> str:
        video = "--sparkle 3 --seed 7 --format png --format wav --json --output"
        job_id: str = json.loads(svdq("submit", photo, *video.split(), folder))["id"]
        return job_id

    def sidecar(job_id: str) -> Any:
        [path] = outputs.rglob(f"*-{job_id}.json")
        return json.loads(path.read_bytes())

    def made(job_id: str) -> tuple[np.ndarray, np.ndarray]:
        [sound] = outputs.rglob(f"*-{job_id}.wav")
        frames = [Image.open(path).convert("RGB") for path in sorted(sound.with_suffix("").glob("*.png"))]
        return np.stack([np.asarray(frame) for frame in frames]), Sound.parse(sound.read_bytes()).pcm

    assert "--sparkle 10 is not allowed" in svdq("submit --sparkle 10", photo, code=2)
    by_flags = submitted("one")
    (tmp_path / "list.csv").write_text(f"photo,family,sparkle,seed\n{photo},toy,4,7\n")
    by_list = json.loads(svdq("batch --json", tmp_path / "list.csv"))["id"]
    page = server.get("/").body.decode()
    field = re.search(r'<input type="number" id="toy-sparkle"[^>]*>', page)
    assert field is not None
    # Shown first, by its own label, as the sound is not.
    first, _, more = page.partition('id="toy-sparkle"')
    assert ">Glitter</label>" in first
    assert 'id="toy-sound"' in more[more.index("<summary>More settings</summary>") :]
    assert 'min="0" max="9"' in field[0]
    form = multipart(photo.read_bytes(), photo.name, family="toy", sparkle=5)
    [upload] = server.ask("POST", "/page/photos", form, {**server.bearer, "Content-Type": TYPE}).json["jobs"]
    by_api = server.create(photo.read_bytes(), photo.name, sparkle=6, generate_audio="false").json["id"]
    assert server.get(f"/v1/videos/{by_api}").json["status"] == "queued"

    svdq("worker --burst --ranks 1 --device cpu")
    video = server.get(f"/v1/videos/{by_api}").json
    assert (video["status"], video["svdq"]["parameters"]["frames"]) == ("completed", 9)
    assert server.get(f"/v1/videos/{by_api}/content").body[4:8] == b"ftyp"
    jobs = [sidecar(each)["job"] for each in (by_flags, by_list, upload["id"], by_api)]
    assert [(each["family"], each["sparkle"]) for each in jobs] == [("toy", 3), ("toy", 4), ("toy", 5), ("toy", 6)]
    assert [each.get("sound", True) for each in jobs] == [True, True, True, False]
    frames, sound = made(by_flags)
    assert (frames.shape, np.ptp(frames) > 50) == ((9, 64, 64, 3), True)

    bound = submitted("bound")
    assert "fine (steps 3 to 4 of 4)" in svdq("worker --burst --ranks 3 --experts bound --device cpu")
    in_rounds = submitted("rounds")
    of_file = ("--model", model.with_name("mine.toml"))
    assert "Loaded the fine" in svdq("worker --burst --ranks 1 --experts rounds --device cpu", *of_file)
    assert sidecar(in_rounds)["model"]["weights"] == {"fine": "other.safetensors"}
    for job_id in (bound, in_rounds):
        assert [each["steps"] for each in sidecar(job_id)["stages"]][:1] == [2]  # the coarse expert's
        np.testing.assert_array_equal(made(job_id)[0], frames)
        np.testing.assert_array_equal(made(job_id)[1], sound)
    assert json.loads(svdq("report --json"))["finished"] == 6


def test_a_family_is_planned_and_checked_by_what_it_states(svdq: Callable[..., str], model: Path) -> None:
    ways = json.loads(svdq("plan --gpus 1x24 --videos 100 --step-ms 1000 --json"))["ways"]
    # Two steps of one pass, two of two, and an encode and a decode that cost as much as a pass.
    assert {way["time_s"] for way in ways if way["command"].endswith("--experts resident")} == {100 * (2 + 2 * 2 + 2)}
    assert "64x64, 9 frames, 6 steps" in svdq("plan --gpus 1x24 --model", model.with_name("mine.toml"))
    assert json.loads(model.with_name("import.json").read_bytes()) == {
        "model": str(model.with_name("mine.toml")),
        "notes": [],
        "missing": [],
        "submit": ["submit", "cat.png", "--size", "64x64", "--seed", "5"],
        "upscaler": None,
    }
    assert "a whole ToyPipeline" in svdq("doctor")
    assert "fine: all weights are in" in svdq("model check", model.with_name("mine.toml"))
