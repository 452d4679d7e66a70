"""Real processes in a chain with tiny Wan: the same bits for any number of ranks, equal to diffusers'."""

import numpy as np
import pytest
from gpu_checks import compare
from PIL import Image

from svdq.pipeline.models.wan.family import FAMILY, WanParameters
from tests.pipeline.rendering import diffusers_frames

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
    return [diffusers_frames(tiny_wan, image, video) for video in videos]


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, 7])
def test_frames_are_those_of_diffusers_for_any_number_of_ranks(tiny_wan, image, videos, reference, num_ranks):
    ours = compare.render(str(tiny_wan), image, videos, num_ranks=num_ranks)
    for frames, expected in zip(ours, reference, strict=True):
        assert frames.std() > 20
        np.testing.assert_array_equal(frames, expected)


@pytest.mark.long
@pytest.mark.parametrize(("variant", "num_ranks"), [("i2v-a14b", 7), ("flf2v-14b", 3)])
def test_a_last_image_has_the_bits_of_diffusers_on_several_ranks(folder_of, image, variant, num_ranks):
    folder = folder_of(variant)
    last_photo = image.transpose(Image.Transpose.ROTATE_180)
    facts = FAMILY.read_facts(folder, "tiny")
    videos = [FAMILY.complete(USUAL.model_copy(update=each), facts) for each in ({"last_image": "b"}, {"loop": True})]
    ours = compare.render(str(folder), image, videos, num_ranks=num_ranks, last_photo=last_photo)
    for frames, video, last_image in zip(ours, videos, (last_photo, image), strict=True):
        expected = diffusers_frames(folder, image, video, last_image=last_image)
        assert frames.std() > 20
        np.testing.assert_array_equal(frames, expected)


HIGH, LOW = frozenset({"transformer"}), frozenset({"transformer_2"})


@pytest.mark.long
@pytest.mark.parametrize("components", [(HIGH, None, LOW), (HIGH, HIGH, LOW, LOW, LOW)], ids=len)
def test_frames_are_those_of_diffusers_on_ranks_bound_to_experts(tiny_wan, image, videos, reference, components):
    ours = compare.render(str(tiny_wan), image, videos, num_ranks=len(components), components=components)
    for frames, expected in zip(ours, reference, strict=True):
        np.testing.assert_array_equal(frames, expected)


@pytest.mark.slow
def test_the_command_compares_each_family(folder_of, capsys):
    folder = folder_of("ti2v-5b")
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rounds", "--ranks", "1", "--videos", "3"], "3 videos on 1 rank in rounds (cpu): 0"),
        (["--bound", "--ranks", "2", "--videos", "1"], "1 videos on 2 bound ranks (cpu): 0"),
        (["--rounds", "--ranks", "2"], "--rounds needs a model with two experts that both have steps"),
    ],
)
def test_the_command_works_in_rounds_and_with_bound_ranks(tiny_wan, capsys, options, said):
    shape = ["--size", "64x64", "--frames", "5", "--steps", "4", "--guidance-scale", "1"]
    code = compare.main(["--model", str(tiny_wan), *options, *shape])
    printed = capsys.readouterr()
    assert (code, said in printed.out + printed.err) == (0 if "(cpu): 0" in said else 2, True)
