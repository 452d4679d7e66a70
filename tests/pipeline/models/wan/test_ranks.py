"""Tiny Wan on several ranks: the same bits for any number of them, equal to diffusers'."""

import numpy as np
import pytest
from PIL import Image

from svdq.pipeline.models.wan.family import FAMILY, WanParameters
from tests.pipeline import ranks
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


@pytest.mark.parametrize("num_ranks", [2, 7])
def test_frames_are_those_of_diffusers_for_any_number_of_ranks(tiny_wan, image, videos, reference, num_ranks):
    ours = ranks.render(str(tiny_wan), image, videos, num_ranks=num_ranks)
    for frames, expected in zip(ours, reference, strict=True):
        assert frames.std() > 20
        np.testing.assert_array_equal(frames, expected)


@pytest.mark.parametrize(("variant", "num_ranks"), [("i2v-a14b", 7), ("flf2v-14b", 3)])
def test_a_last_image_has_the_bits_of_diffusers_on_several_ranks(folder_of, image, variant, num_ranks):
    folder = folder_of(variant)
    last_photo = image.transpose(Image.Transpose.ROTATE_180)
    facts = FAMILY.read_facts(folder, "tiny")
    videos = [FAMILY.complete(USUAL.model_copy(update=each), facts) for each in ({"last_image": "b"}, {"loop": True})]
    ours = ranks.render(str(folder), image, videos, num_ranks=num_ranks, last_photo=last_photo)
    for frames, video, last_image in zip(ours, videos, (last_photo, image), strict=True):
        expected = diffusers_frames(folder, image, video, last_image=last_image)
        assert frames.std() > 20
        np.testing.assert_array_equal(frames, expected)


HIGH, LOW = frozenset({"transformer"}), frozenset({"transformer_2"})


@pytest.mark.parametrize("components", [(HIGH, None, LOW), (HIGH, HIGH, LOW, LOW, LOW)], ids=len)
def test_frames_are_those_of_diffusers_on_ranks_bound_to_experts(tiny_wan, image, videos, reference, components):
    ours = ranks.render(str(tiny_wan), image, videos, num_ranks=len(components), components=components)
    for frames, expected in zip(ours, reference, strict=True):
        np.testing.assert_array_equal(frames, expected)
