"""Photos with prompts beside them, from the command line to the videos; on the processor."""

import json
import signal
from pathlib import Path

import pytest
from PIL import Image

from svdq.producer.results.finished_videos import read_provenance

pytestmark = pytest.mark.slow

SHAPE = ("--frames", 5, "--size", "64x32", "--steps", 3, "--seed", 1)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for name, prompt in {"a": "A wave\r\nbreaks.", "b": "", "c": None}.items():
        Image.effect_noise((90, 70), 60).convert("RGB").save(folder / f"{name}.jpg")
        if prompt is not None:
            (folder / f"{name}.txt").write_bytes(prompt.encode("utf-8-sig"))
    return folder


def documents(site, *arguments: object) -> dict[str, dict]:
    """Submit photos; return the ends of their jobs by name."""
    done = site.run("svdq", *arguments, "--json", "--wait")
    assert done.returncode == 0, done
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    return {end["name"]: end for end in ends if end["status"] == "finished"}


@pytest.mark.long
def test_prompts_reach_the_model_and_what_it_writes(site, photos: Path, tiny_wan: Path) -> None:
    group = site.start(1, model=str(tiny_wan))
    found = documents(site, "submit", photos, *SHAPE, "--flow-shift", 3, "--guidance-scale", 2)
    (photos / "list.csv").write_text(
        "photo,prompt,frames,size,steps,seed,flow_shift,guidance_scale\n"
        "c.jpg,A wave breaks.,5,64x32,3,1,3,2\nb.jpg,A tree.,5,64x32,3,1,3,2\n"
    )
    listed = documents(site, "batch", photos / "list.csv")
    prompts = {}
    for end in (*found.values(), *listed.values()):
        (output,) = end["outputs"]
        document = read_provenance(Path(output)).as_json()
        assert document["job"]["family"] == "wan"
        assert document["job"]["negative_prompt"]  # the model's own
        prompts[end["id"]] = document["job"]["prompt"]
        shown = site.run("svdq", "status", end["id"]).stdout
        assert (f'"{prompts[end["id"]]}"' in shown) == bool(prompts[end["id"]])
    assert sorted(prompts.values()) == ["", "", "A tree.", "A wave breaks.", "A wave breaks."]
    # The prompt decides the pixels.
    b, other_b = (Path(end["b"]["outputs"][0]).read_bytes() for end in (found, listed))
    assert b != other_b

    refused = site.run("svdq", "submit", photos / "a.jpg", "--family", "svd", "--wait")
    assert refused.returncode == 1
    sentence = refused.stdout + refused.stderr
    assert "makes videos of Wan, and this one is for Stable Video Diffusion: " in sentence
    assert "--family wan" in sentence
    group.send_signal(signal.SIGINT)
    assert group.end() == 0
