"""Real processes in a chain with tiny Wan: the same bits for any number of ranks, equal to diffusers'."""

import numpy as np
import pytest
from gpu_checks import compare
from gpu_checks.tiny import write_tiny_wan
from PIL import Image

from svdq.pipeline.models.wan.family import FAMILY, WanParameters

USUAL = WanParameters(prompt="A dog runs.", seed=1, steps=7, frames=5, width=64, height=64)
#: In flight at once: other step counts and lengths, guidance off, and different for the two experts.
VIDEOS = [
    USUAL,
    USUAL.model_copy(update={"seed": 2, "steps": 2, "guidance_scale": 1.0}),
    USUAL.model_copy(update={"seed": 3, "steps": 5, "frames": 9, "guidance_scale": 6.0, "guidance_scale_2": 2.0}),
    USUAL.model_copy(update={"seed": 4, "prompt": "A cat.", "flow_shift": 2.0, "negative_prompt": ""}),
]


@pytest.fixture(scope="module")
def videos(tiny_wan):
    return [FAMILY.complete(video, FAMILY.read_facts(tiny_wan, "tiny")) for video in VIDEOS]


@pytest.fixture(scope="module")
def reference(tiny_wan, image, videos):
    return [compare.render_with_diffusers(str(tiny_wan), image, video) for video in videos]


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 7])
def test_frames_are_those_of_diffusers_for_any_number_of_ranks(tiny_wan, image, videos, reference, num_ranks):
    ours = compare.render(str(tiny_wan), image, videos, num_ranks=num_ranks)
    for frames, expected in zip(ours, reference, strict=True):
        assert frames.std() > 20
        np.testing.assert_array_equal(frames, expected)


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 3, 7])
@pytest.mark.parametrize("variant", ["i2v-a14b", "flf2v-14b"])
def test_a_last_image_has_the_bits_of_diffusers_for_any_number_of_ranks(tmp_path, image, variant, num_ranks):
    write_tiny_wan(tmp_path, variant)
    last_photo = image.transpose(Image.Transpose.ROTATE_180)
    facts = FAMILY.read_facts(tmp_path, "tiny")
    videos = [FAMILY.complete(USUAL.model_copy(update=each), facts) for each in ({"last_image": "b"}, {"loop": True})]
    ours = compare.render(str(tmp_path), image, videos, num_ranks=num_ranks, last_photo=last_photo)
    for frames, video, last_image in zip(ours, videos, (last_photo, image), strict=True):
        expected = compare.render_with_diffusers(str(tmp_path), image, video, last_image=last_image)
        assert frames.std() > 20
        np.testing.assert_array_equal(frames, expected)


HIGH, LOW = frozenset({"transformer"}), frozenset({"transformer_2"})


@pytest.mark.long
@pytest.mark.parametrize("components", [(HIGH, LOW), (HIGH, None, LOW), (HIGH, HIGH, LOW, LOW, LOW)], ids=len)
def test_frames_are_those_of_diffusers_on_ranks_bound_to_experts(tiny_wan, image, videos, reference, components):
    ours = compare.render(str(tiny_wan), image, videos, num_ranks=len(components), components=components)
    for frames, expected in zip(ours, reference, strict=True):
        np.testing.assert_array_equal(frames, expected)


@pytest.mark.slow
def test_the_command_compares_each_family(tmp_path, capsys):
    folder = tmp_path / "ti2v"
    write_tiny_wan(folder, "ti2v-5b")
    video = "--size 64x64 --frames 5 --steps 2 --prompt dog --guidance-scale 3"
    arguments = ["--ranks", "1", "--videos", "1", *video.split()]
    assert compare.main([*arguments, "--model", str(folder)]) == 0
    assert "largest pixel difference over 1 videos on 1 ranks (cpu): 0" in capsys.readouterr().out
    for more, words in (
        (["--bound"], "--bound needs a model with two experts"),
        (["--family", "svd"], "makes videos of Wan; leave --family svd out"),
        (["--motion-bucket-id", "3"], "Wan has no motion_bucket_id"),
        (["--guidance-scale-2", "3"], "has one transformer, so it has no guidance_scale_2"),
        (["--size", "80x80"], "The width of 80 pixels is no multiple of 32"),
        (["--size", "100x64"], "(width: Input should be a multiple of 16)"),
        (["--size", "64"], "(height: Input should be a valid integer"),
    ):
        assert compare.main([*arguments, "--model", str(folder), *more]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1


@pytest.mark.slow
def test_the_command_works_in_rounds(tiny_wan, capsys):
    shape = ["--size", "64x64", "--frames", "5", "--steps", "4", "--videos", "3", "--guidance-scale", "1"]
    assert compare.main(["--model", str(tiny_wan), "--rounds", "--ranks", "1", *shape]) == 0
    assert "largest pixel difference over 3 videos on 1 rank in rounds (cpu): 0" in capsys.readouterr().out
    assert compare.main(["--model", str(tiny_wan), "--rounds", "--ranks", "2", *shape]) == 2
    assert "--rounds needs a model with two experts that both have steps" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_binds_ranks_to_experts(tiny_wan, capsys):
    shape = ["--size", "64x64", "--frames", "5", "--steps", "4", "--videos", "1", "--guidance-scale", "1"]
    assert compare.main(["--model", str(tiny_wan), "--bound", "--ranks", "2", *shape]) == 0
    assert "largest pixel difference over 1 videos on 2 bound ranks (cpu): 0" in capsys.readouterr().out
