"""Videos with LoRAs of their own, in one queue, are those of workers that have these LoRAs in their model file."""

import random
import re
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from PIL import Image

from svdq.pipeline.media.image import prepare_photo
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.models.wan.family import WanParameters
from tests.conftest import Cli
from tests.pipeline.fakes import CPU
from tests.pipeline.models.wan_files import write_model_file
from tests.pipeline.models.weights.test_job_loras import choices, save_loras, with_set
from tests.pipeline.rendering import one_thread, render

SETS = ("", "high=style_high,low=style_low:0.7", "both:-0.5", "high=style_high:0.3;edges:2")


def frames(home: Path) -> dict[str, str]:
    """The digest of the pixels of each video, by the name of its photo; the files name their job, too."""
    folders = [path for path in (home / "storage" / "outputs").iterdir() if path.is_dir()]
    files = {folder.name.partition("-")[0]: sorted(folder.glob("*.png")) for folder in folders}
    return {
        name: sha256(b"".join(Image.open(png).tobytes() for png in pngs)).hexdigest() for name, pngs in files.items()
    }


@pytest.mark.long
def test_four_photos_with_four_sets_of_loras(svdq: Cli, home: Path, wide_wan, tmp_path: Path) -> None:
    model, loras = tmp_path / "model", tmp_path / "loras"
    model.mkdir()
    loras.mkdir()
    save_loras(loras, wide_wan)
    file = write_model_file(model, wide_wan, "scaled.safetensors", lora=True)
    order = random.Random(5).sample(range(4), 4)
    for number in order:
        Image.effect_noise((64, 64), 40 + number * 10).convert("RGB").save(tmp_path / f"p{number}.png")
    rows = [f'{tmp_path}/p{number}.png,"{SETS[number]}",{number},a dog,5,4,64x64,png\n' for number in order]
    (tmp_path / "list.csv").write_text(f"photo,lora,seed,prompt,frames,steps,size,format\n{''.join(rows)}")

    def by_worker(where: str, *words: object) -> tuple[dict[str, str], str]:
        """Render the list; return the frames' digests and the worker's log."""
        settings = {"SVDQ_MODEL": str(file), "SVDQ_STORAGE": str(home / where / "storage"), "SVDQ_LORAS": str(loras)}
        for command in (("batch", tmp_path / "list.csv", "--force"), ("worker", "--burst", *words)):
            done = svdq(*command, **settings)
            assert done.returncode == 0, done.stderr
        return frames(home / where), done.stdout + done.stderr

    three, _ = by_worker("three", "--ranks", 3)
    rounds, log = by_worker("rounds", "--ranks", 1, "--experts", "rounds")
    loads = re.findall(r"Loaded the (\w+) in", log)
    assert loads.count("transformer") == loads.count("transformer_2") == loads.count("encoders") < 4

    expected: dict[str, str] = {}
    for number, text in enumerate(SETS):
        own = resolve(str(with_set(file, choices(text.replace(";", " "), loras), loras)))
        alone = open_model(own, Role.of_rank(0), CPU, torch.float32)
        values = WanParameters(prompt="a dog", seed=number, frames=5, steps=4, width=64, height=64)
        photo = prepare_photo((tmp_path / f"p{number}.png").read_bytes(), 64, 64)
        with one_thread():
            made = render(alone, photo, alone.complete(values))
        expected[f"p{number}"] = sha256(made.tobytes()).hexdigest()
    assert len(set(expected.values())) == 4
    assert three == rounds == expected
