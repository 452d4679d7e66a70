"""The defaults of Wan's models are their authors', and what a model cannot do is one sentence."""

import pytest

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.wan.family import (
    FAMILY,
    NEGATIVE_PROMPT,
    PUBLISHED,
    WanParameters,
    needs_last_photo,
    read_facts,
)
from svdq.pipeline.models.wan.tiny import VARIANTS

ONE = {"boundary_ratio": None}
PHOTO_ENCODER = ONE | {"has_image_encoder": True}
FLF2V = PHOTO_ENCODER | {"transformer": PUBLISHED["transformer"] | {"pos_embed_seq_len": 514}}
TI2V = ONE | {"expand_timesteps": True, "vae": PUBLISHED["vae"] | {"scale_factor_spatial": 16}}


def complete(facts, **values):
    return FAMILY.complete(WanParameters(seed=1, **values), PUBLISHED | facts)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, {"frames": 81, "fps": 16, "width": 832, "height": 480, "steps": 40, "flow_shift": 5.0}),
        ({}, {"guidance_scale": 3.5, "guidance_scale_2": 3.5}),
        (ONE, {"frames": 81, "fps": 16, "width": 832, "height": 480, "steps": 40, "flow_shift": 3.0}),
        (ONE, {"guidance_scale": 5.0, "guidance_scale_2": None}),
        (FLF2V, {"frames": 81, "fps": 16, "width": 1280, "height": 720, "steps": 50, "flow_shift": 16.0}),
        (TI2V, {"frames": 121, "fps": 24, "width": 1280, "height": 704, "steps": 50, "flow_shift": 5.0}),
        (TI2V, {"guidance_scale": 5.0, "guidance_scale_2": None}),
    ],
)
def test_the_authors_defaults(facts, expected):
    found = complete(facts).model_dump()
    assert {name: found[name] for name in expected} == expected
    assert found["negative_prompt"] == NEGATIVE_PROMPT
    assert found["prompt"] == ""


def test_what_is_given_stays():
    given = {
        "frames": 5, "steps": 4, "width": 320, "height": 192, "fps": 30, "prompt": "a", "negative_prompt": "",
        "guidance_scale": 1.0, "guidance_scale_2": 2.0, "flow_shift": 8.0,
    }  # fmt: skip
    completed = complete({}, **given)
    assert completed.model_dump().items() >= given.items()
    assert FAMILY.complete(completed, PUBLISHED) == completed


def test_the_second_scale_is_the_first_if_it_is_left_out():
    assert complete({}, guidance_scale=6.0).guidance_scale_2 == 6.0
    assert complete({}, guidance_scale_2=6.0).guidance_scale == 3.5


@pytest.mark.parametrize(
    ("scheduler", "size", "shift"),
    [
        # What diffusers' conversion writes, whatever the authors recommend.
        ({"_class_name": "UniPCMultistepScheduler", "flow_shift": 3.0}, (1280, 720), 5.0),
        ({"_class_name": "UniPCMultistepScheduler", "flow_shift": 3.0}, (480, 832), 3.0),
        ({"_class_name": "UniPCMultistepScheduler"}, (1280, 720), 5.0),
        # The model's own.
        ({"_class_name": "UniPCMultistepScheduler", "flow_shift": 8.0}, (1280, 720), 8.0),
        ({"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}, (1280, 720), 3.0),
    ],
)
def test_the_shift_of_the_models_own_scheduler(scheduler, size, shift):
    assert complete(ONE | {"scheduler": scheduler}, width=size[0], height=size[1]).flow_shift == shift


@pytest.mark.parametrize(
    ("facts", "values", "words"),
    [
        (ONE, {"guidance_scale_2": 3.0}, r"^Wan 2\.1 I2V-14B has one transformer, so it has no guidance_scale_2;"),
        (TI2V, {"width": 1280, "height": 720}, r"^The height of 720 pixels is no multiple of 32, as Wan 2\.2 TI2V-5B"),
        (
            TI2V,
            {"last_image": "b"},
            r"^Wan 2\.2 TI2V-5B takes no last frame; leave the last photo out, or use .*I2V-A14B\.$",
        ),
        (PHOTO_ENCODER, {"loop": True}, r"^Wan 2\.1 I2V-14B takes no last frame; leave loop out.*\(boomerang works"),
    ],
)
def test_what_a_model_cannot_do(facts, values, words):
    with pytest.raises(InputError, match=words):
        complete(facts, **values)


@pytest.mark.parametrize("facts", [{}, ONE, FLF2V])
def test_what_takes_a_last_frame(facts):
    assert complete(facts, last_image="b").has_last_photo
    assert complete(facts, loop=True).has_last_photo


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"loop": True, "last_image": "b"}, "loop and last_image exclude each other"),
        ({"loop": True, "frames": 1}, "frames 1 leaves no room for loop"),
        ({"last_image": "b", "frames": 1}, "frames 1 leaves no room for last_image"),
    ],
)
def test_one_last_frame_besides_the_first(values, words):
    with pytest.raises(ValueError, match=words):
        WanParameters(seed=1, **values)


def test_720p_works_with_the_models_that_compress_8_times():
    assert complete({}, width=1280, height=720).height == 720


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_facts_of_a_folder(folder_of, variant):
    facts = read_facts(folder_of(variant), "tiny")
    assert facts.keys() == PUBLISHED.keys()
    assert facts["boundary_ratio"] == (0.9 if variant == "i2v-a14b" else None)
    assert facts["has_image_encoder"] == (variant in ("i2v-14b", "flf2v-14b"))
    assert needs_last_photo(facts) == (variant == "flf2v-14b")
    assert facts["expand_timesteps"] == (variant == "ti2v-5b")
    assert facts["vae"]["scale_factor_spatial"] == (16 if variant == "ti2v-5b" else 8)
