"""The fields of requests, whatever clients put into them."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from svdq.cli.serve.errors import ApiError
from svdq.cli.serve.fields import FIELDS, VideoRequest, decode_data_url, read_request
from svdq.producer.submitting.options import SubmitOptions

NOW = datetime(2026, 11, 22, tzinfo=UTC)
NAMES = (*FIELDS, "input_reference", "extra_params", "extra_params[fps]", "formats[]", "input_reference[image_url]")
#: Values that are allowed somewhere, or close to it.
WORDS = (
    "-1",
    "1e999",
    "nan",
    "٣",
    "1" * 5000,
    "{}",
    "[1]",
    "../x",
    "{seed}",
    "{stem:>99999}",
    "{",
    "+1h",
    "9999-12-31",
)
SIZES = ("1024x576", "0x0", "99999x99999", "auto", "auto:1x1", "mp4 mp4", "png,gif", "wan", "high", "data:;base64,AAAA")
#: The parameters of a video that is made again; None for a new one.
BASES = (
    None,
    SubmitOptions(
        family="svd", frames=14, width=1024, height=576, fps=7, min_guidance_scale=1.0, max_guidance_scale=3.0
    ),
    SubmitOptions(family="wan", frames=81, prompt="A cup.", guidance_scale=5.0),
)
values = st.one_of(
    st.sampled_from((*WORDS, *SIZES, 10**400, float("inf"), "\ud800", "\0")),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    st.lists(st.sampled_from(("mp4", "gif", 1, None)), max_size=3),
    st.dictionaries(st.sampled_from(("image_url", "fps", "x", "formats")), st.text(max_size=5), max_size=2),
)


@settings(max_examples=500)
@given(st.lists(st.tuples(st.sampled_from(NAMES) | st.text(max_size=10), values), max_size=4), st.sampled_from(BASES))
@example([("size", "auto")], BASES[1])
def test_any_fields_are_a_request_or_a_clear_error(fields: list[tuple[str, Any]], base: SubmitOptions | None) -> None:
    found = read(fields, base)
    if isinstance(found, ApiError):
        error = json.loads(found.response().body)["error"]
        assert (found.status, error["message"][-1], bool(error["code"])) == (400, ".", True)
    else:
        found.spec.check()


def read(fields: list[tuple[str, Any]], base: SubmitOptions | None = None) -> VideoRequest | ApiError:
    try:
        request = read_request(fields, NOW, base=base)
        if request.photo_url:
            decode_data_url(request.photo_url)
    except ApiError as error:
        return error
    return request


@pytest.mark.parametrize(
    "fields",
    [
        [("formats", "mp4"), ("formats", "gif")],
        [("formats[]", "mp4"), ("formats[]", "gif")],
        [("format", "mp4 gif")],
        [("extra_params[formats][]", "mp4"), ("extra_params[formats][]", "gif")],
        [("extra_params", '{"formats": ["mp4", "gif"]}')],
        [("extra_params", {"formats": ["mp4", "gif"]})],
    ],
)
def test_spellings_of_a_list(fields: list[tuple[str, Any]]) -> None:
    [options] = read_request(fields, NOW).spec.options
    assert options.formats == ("mp4", "gif")


@pytest.mark.parametrize("fields", [[("fps", "7"), ("fps", "8")], [("fps", 7), ("extra_params", {"fps": 8})]])
def test_a_field_that_is_given_twice(fields: list[tuple[str, Any]]) -> None:
    with pytest.raises(ApiError, match="fps is given twice"):
        read_request(fields, NOW)


def test_a_remix_keeps_the_pace_and_the_guidance_of_its_video() -> None:
    base = SubmitOptions(family="svd", frames=14, fps=24, min_guidance_scale=2.0, max_guidance_scale=3.0)
    [options] = read_request([("seconds", "2"), ("guidance_scale", 1.5)], NOW, base=base).spec.options
    assert (options.frames, options.fps) == (48, 24)
    assert (options.min_guidance_scale, options.max_guidance_scale) == (1.5, 1.5)
    base = SubmitOptions(family="wan", fps=24)
    [options] = read_request([("seconds", "2")], NOW, base=base).spec.options
    assert (options.frames, options.fps) == (49, 24)
