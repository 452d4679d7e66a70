from collections.abc import Sequence
from typing import Any, get_type_hints

import pytest

from svdq.pipeline.errors import InputError
from svdq.pipeline.video_parameters import LoraChoice
from svdq.producer.job import VIDEO_FIELDS
from svdq.producer.submitting.draft import Draft, read_draft, sweep
from svdq.producer.submitting.parameters import FIELD_OF, FIELDS, MAX_VIDEOS, as_flag


def test_every_parameter_of_a_job_can_be_read() -> None:
    assert set(VIDEO_FIELDS) == set(FIELDS) - {"size", "format", "lora"}
    given = dict.fromkeys((*VIDEO_FIELDS, "auto_size", "last_image"), 1)
    assert Draft(**given).given() == given


def test_lists_are_as_good_as_tuples() -> None:
    by_lists, by_tuples = Draft(formats=["gif"], loras=["a:0.5"]), Draft(formats=("gif",), loras=("a:0.5",))
    assert {by_lists: 1} == {by_tuples: 1}


def test_type_checkers_know_every_parameter() -> None:
    hints = get_type_hints(Draft)
    assert hints.keys() == {*VIDEO_FIELDS, "last_image", "auto_size"}
    given_otherwise = {"family": str, "negative_prompt": str, "formats": Sequence[str], "fit": str}
    given_otherwise |= {"loras": Sequence[LoraChoice | str], "step_cache": float | str}
    for name in VIDEO_FIELDS:
        assert hints[name] == given_otherwise.get(name, FIELD_OF[name].annotation) | None, name


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("frames", " 25 ", {"frames": 25}),
        ("noise_aug_strength", "1e-2", {"noise_aug_strength": 0.01}),
        ("size", "576x320", {"width": 576, "height": 320}),
        ("size", "auto", {"auto_size": True}),
        ("size", "AUTO:576x320", {"auto_size": True, "width": 576, "height": 320}),
        ("formats", "mp4, gif mp4", {"formats": ("mp4", "gif")}),
        ("fit", "pad", {"fit": "pad"}),
        ("interpolate", "24", {"interpolate": 24}),
        ("upscale", "2", {"upscale": "2"}),
        ("boomerang", "True", {"boomerang": True}),
        ("boomerang", "no", {"boomerang": False}),
    ],
)
def test_fields(name: str, text: str, values: dict[str, Any]) -> None:
    assert read_draft({name: text, "negative_prompt": None}).given() == values


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("frames", "2.5"),
        ("fps", ""),
        ("seed", "x"),
        ("size", "576"),
        ("size", "auto:"),
        ("size", "automatic"),
        ("boomerang", "maybe"),
    ],
)
def test_invalid_values(name: str, text: str) -> None:
    with pytest.raises(InputError, match=f"^--{name} .?{text}"):
        read_draft({name: text}, as_flag)


@pytest.mark.parametrize("name", ["frames", "size", "boomerang"])
def test_a_long_value_is_cut_in_the_error(name: str) -> None:
    with pytest.raises(InputError) as caught:
        read_draft({name: "9" * 5000})
    assert len(str(caught.value)) < 250


def test_a_sweep_has_all_combinations() -> None:
    swept = sweep(Draft(steps=4), ["motion-bucket-id=60,127", "size=64x64,128x64,64x64"])
    seen = [(options.steps, options.motion_bucket_id, options.width, options.height) for options in swept]
    assert seen == [(4, 60, 64, 64), (4, 60, 128, 64), (4, 127, 64, 64), (4, 127, 128, 64)]
    assert sweep(Draft(steps=4), []) == (Draft(steps=4),)


@pytest.mark.parametrize(
    ("sweeps", "says"),
    [
        (["fps"], "is not a sweep"),
        (["colour=1,2"], "is not a sweep; .* motion_bucket_id"),
        (["formats=mp4,gif"], "is not a sweep"),
        (["fps="], "--sweep fps"),
        (["fps=7,,8"], "--sweep fps"),
        (["fps=7", "fps=8"], "--fps"),
        (["width=64", "size=64x64"], "--width"),
        (["steps=3"], "--steps"),
        (["width=64", "size=auto,64x64"], "--width"),
        (["size=auto,64x64", "height=64"], "--height"),
    ],
)
def test_invalid_sweeps(sweeps: list[str], says: str) -> None:
    with pytest.raises(InputError, match=says):
        sweep(Draft(steps=4), sweeps)


def test_a_huge_sweep_is_cut() -> None:
    numbers = ",".join(map(str, range(1, 1000)))
    assert len(sweep(Draft(), [f"seed={numbers}", f"steps={numbers}", f"frames={numbers}"])) == MAX_VIDEOS + 1
