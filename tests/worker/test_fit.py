"""Which models fit which GPUs: what docs/gpus.md says, by the published sizes and step times."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from svdq.cli.main import cli
from svdq.producer.text import duration
from svdq.worker.fit import NUM_VIDEOS, Cards, know, ways

ROOT = Path(__file__).parents[2]
FOUR_STEPS = str(ROOT / "deploy/models/wan2.2-4step.toml")
A14B, TI2V = "Wan-AI/Wan2.2-I2V-A14B-Diffusers", "Wan-AI/Wan2.2-TI2V-5B-Diffusers"
SVD = "stabilityai/stable-video-diffusion-img2vid-xt"
#: What the page says of each model: its name there, that of the model, and the shape.
MODELS = (
    ("Wan 2.2 A14B, 832x480, 4 steps", FOUR_STEPS, None),
    ("Wan 2.2 A14B, 832x480, 40 steps", A14B, None),
    ("Wan 2.2 A14B, 1280x720, 4 steps", FOUR_STEPS, "1280x720x81"),
    ("Wan 2.2 TI2V-5B, 1280x704, 50 steps", TI2V, None),
    ("SVD-XT, 1024x576, 25 steps", SVD, None),
)
GPUS = ("1x16", "1x24", "2x24", "1x48", "1x80", "7x24")


def row(gpus: str, title: str, name: str, shape: str | None) -> str:
    """Return the line about a model in the section about some GPUs: the first way that fits."""
    cards, known = Cards.parse(gpus), know(name)
    assert cards is not None
    step = cards.step_of(known.published)
    found = ways(known, known.video(shape), cards, NUM_VIDEOS, step.step_s if step else None)
    way = next((way for way in found if way.fits), None)
    if way is None:
        return f"| {title} | **no** | |"
    time = duration(way.time_s) if way.time_s is not None else "no published time"
    return f"| {title} | `{way.command}`{', in parts' * way.in_parts} | {time} |"


@pytest.mark.parametrize("gpus", GPUS)
def test_the_page_about_gpus_says_what_svdq_plan_says(home: Path, gpus: str) -> None:
    page = (ROOT / "docs/gpus.md").read_text(encoding="utf-8")
    section = page.partition(f"\n`--gpus {gpus}`")[2].partition("\n## ")[0]
    rows = [row(gpus, *model) for model in MODELS]
    assert all(each in section for each in rows), "\n" + "\n".join(rows)


def test_the_example_of_the_page_is_what_svdq_plan_prints(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/gpus.md").read_text(encoding="utf-8")
    command, output = page.partition("```console\n$ svdq ")[2].partition("```")[0].split("\n", 1)
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(cli, command.split(), catch_exceptions=False)
    assert [line.rstrip() for line in result.stdout.splitlines()] == output.splitlines()
