"""Videos with LoRAs of their own, in one queue, are those of workers that have these LoRAs in their model file."""

import random
import re
from hashlib import sha256
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import Cli
from tests.pipeline.models.wan_files import write_model_file
from tests.pipeline.models.weights.test_job_loras import choices, save_loras, with_set

SETS = ("", "high=style_high,low=style_low:0.7", "both:-0.5", "high=style_high:0.3;edges:2")


def frames(home: Path) -> dict[str, str]:
    """The digest of the pixels of each video, by the name of its photo; the files name their job, too."""
    folders = [path for path in (home / "storage" / "outputs").iterdir() if path.is_dir()]
    files = {folder.name.partition("-")[0]: sorted(folder.glob("*.png")) for folder in folders}
    return {
        name: sha256(b"".join(Image.open(png).tobytes() for png in pngs)).hexdigest() for name, pngs in files.items()
    }


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_twelve_photos_with_four_sets_of_loras(svdq: Cli, home: Path, wide_wan, tmp_path: Path) -> None:
    model, loras = tmp_path / "model", tmp_path / "loras"
    model.mkdir()
    loras.mkdir()
    save_loras(loras, wide_wan)
    file = write_model_file(model, wide_wan, "scaled.safetensors", lora=True)
    photos = []
    for number in range(12):
        photos.append((tmp_path / f"p{number}.png", number))
        Image.effect_noise((64, 64), 40 + number * 10).convert("RGB").save(photos[-1][0])
    random.Random(5).shuffle(photos)

    def render(where: str, model: Path, sets: dict[int, str], *words: object) -> tuple[dict[str, str], str]:
        """Render the photos numbered in `sets` with their LoRAs; return the frames' digests and the worker's log."""
        settings = {"SVDQ_MODEL": str(model), "SVDQ_STORAGE": str(home / where / "storage"), "SVDQ_LORAS": str(loras)}
        rows = [f'{photo},"{sets[n]}",{n},a dog,5,4,64x64,png\n' for photo, n in photos if n in sets]
        path = tmp_path / f"{where}.csv"
        path.write_text(f"photo,lora,seed,prompt,frames,steps,size,format\n{''.join(rows)}")
        for command in (("batch", path, "--force"), ("worker", "--burst", *words)):
            done = svdq(*command, **settings)
            assert done.returncode == 0, done.stderr
        return frames(home / where), done.stdout + done.stderr

    sets = {number: SETS[number % 4] for number in range(12)}
    seven, _ = render("seven", file, sets, "--ranks", 7)
    rounds, log = render("rounds", file, sets, "--ranks", 1, "--experts", "rounds")
    loads = re.findall(r"Loaded the (\w+) in", log)
    assert loads.count("transformer") == loads.count("transformer_2") == loads.count("encoders") < 12

    expected: dict[str, str] = {}
    for place, text in enumerate(SETS):
        own = with_set(file, choices(text.replace(";", " "), loras), loras)
        expected |= render(f"set-{place}", own, dict.fromkeys(range(place, 12, 4), ""), "--ranks", 1)[0]
    assert len(set(expected.values())) == 12
    assert seven == rounds == expected
