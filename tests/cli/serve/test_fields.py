"""The fields of requests, whatever clients put into them."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from svdq.cli.serve.api_errors import ApiError
from svdq.cli.serve.fields import EXTRAS, FIELDS, NO_OPS, PHOTOS, decode_data_url, flatten, read_request
from svdq.pipeline.models.known_model import Expected, KnownModel
from svdq.pipeline.models.wan.family import FAMILY, MODELS
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.job_spec import ANY_PHOTO, JobSpec

NOW = datetime(2026, 11, 22, tzinfo=UTC)
NAMES = (*FIELDS, *NO_OPS, *PHOTOS, *EXTRAS, "extra_params[fps]", "formats[]", "input_reference[image_url]")
#: Values that are allowed somewhere, or close to it.
WORDS = ("-1", "1e999", "nan", "٣", "1" * 5000, "{}", "[1]", "../x", "{seed}", "{stem:>99999}", "{", "9999-12-31")
SIZES = ("1024x576", "0x0", "99999x99999", "auto", "auto:1x1", "mp4 mp4", "png,gif", "wan", "high", "data:;base64,AAAA")
#: The parameters of a video that is made again; None for a new one.
BASES = (
    None,
    Draft(family="svd", frames=14, width=1024, height=576, fps=7, min_guidance_scale=1.0, max_guidance_scale=3.0),
    Draft(family="wan", frames=81, prompt="A cup.", guidance_scale=5.0),
)
values = st.one_of(
    st.sampled_from((*WORDS, *SIZES, 10**400, float("inf"), "\ud800", "\0")),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    st.lists(st.sampled_from(("mp4", "gif", 1, None)), max_size=3),
    st.dictionaries(st.sampled_from(("image_url", "fps", "x", "formats")), st.text(max_size=5), max_size=2),
)


@pytest.mark.slow
@settings(max_examples=500)
@given(st.lists(st.tuples(st.sampled_from(NAMES) | st.text(max_size=10), values), max_size=4), st.sampled_from(BASES))
@example([("size", "auto")], BASES[1])
def test_any_fields_are_a_request_or_a_clear_error(fields: list[tuple[str, Any]], base: Draft | None) -> None:
    found = read(fields, base)
    if isinstance(found, ApiError):
        error = json.loads(found.response().body)["error"]
        assert (found.status, error["message"][-1], bool(error["code"])) == (400, ".", True)
    else:
        found.check()


def read(fields: list[tuple[str, Any]], base: Draft | None = None) -> JobSpec | ApiError:
    try:
        plain, *photos = flatten(fields)
        for name, photo in zip(("input_reference", "last_reference"), photos, strict=True):
            if photo:
                decode_data_url(photo, name)
        return read_request(plain, NOW, base=base)
    except ApiError as error:
        return error


def options_of(fields: list[tuple[str, Any]]) -> Draft:
    found = read(fields)
    assert isinstance(found, JobSpec), found
    [options] = found.drafts
    return options


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
    assert options_of(fields).formats == ("mp4", "gif")


@pytest.mark.parametrize("fields", [[("upscale", "2")], [("extra_params", {"upscale": 2})]])
def test_upscaling(fields: list[tuple[str, Any]]) -> None:
    assert options_of(fields).upscale == "2"


def test_where_the_files_go_and_whether_they_have_the_place() -> None:
    found = read([("output", "{date}/{photo}"), ("extra_params", {"keep_location": True})])
    assert isinstance(found, JobSpec), found
    assert (found.folder, found.name, found.keep_location) == ("{date}", "{photo}", True)
    assert "keep_location" in str(read([("keep_location", "perhaps")]))


@pytest.mark.parametrize("fields", [[("fps", "7"), ("fps", "8")], [("fps", 7), ("extra_params", {"fps": 8})]])
def test_a_field_that_is_given_twice(fields: list[tuple[str, Any]]) -> None:
    assert "fps is given twice" in str(read(fields))


@pytest.mark.parametrize(
    "fields",
    [
        [("extra_body", '{"fps": 8}'), ("num_frames", "5")],
        [("extra_json", {"fps": 8, "num_frames": 5})],
        [("video_params", {"fps": 8, "num_frames": 5}), ("fps", 8)],
        [("extra_body[fps]", "8"), ("extra_body", {"extra_params": {"num_frames": 5, "video_params": None}})],
    ],
)
def test_objects_with_parameters_are_merged(fields: list[tuple[str, Any]]) -> None:
    options = options_of(fields)
    assert (options.fps, options.frames) == (8, 5)


URL = "data:image/png;base64,AAAA"


@pytest.mark.parametrize(
    "fields",
    [
        [("input_reference", URL)],
        [("input_reference", {"image_url": URL, "file_id": None})],
        [("input_reference[image_url]", URL), ("input_reference[file_id]", "")],
        [("image_reference", f'{{"image_url": "{URL}"}}')],
        [("image_reference", [{"image_url": URL}])],
        [("reference_url", URL)],
        [("extra_body", {"reference_url": URL}), ("input_reference", None)],
        [("reference_url", URL), ("input_reference", URL)],
    ],
)
def test_spellings_of_a_photo(fields: list[tuple[str, Any]]) -> None:
    assert flatten(fields) == ([], URL, "")


def test_the_photo_of_the_last_frame_beside_that_of_the_first() -> None:
    other = "data:image/png;base64,BBBB"
    for last in (
        ("last_reference", other),
        ("last_reference[image_url]", other),
        ("extra_body", {"last_reference": other}),
    ):
        assert flatten([("reference_url", URL), last]) == ([], URL, other)
    assert flatten([("input_reference", URL), ("last_reference", None)]) == ([], URL, "")
    assert flatten([("input_reference", URL), ("last_reference", URL)]) == ([], URL, URL)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ([("image_reference", {"image_url": "https://example.com/a.png"})], "image_reference"),
        ([("reference_url", "/etc/passwd")], "reference_url"),
        ([("input_reference", {"file_id": "file-1"})], "input_reference"),
        ([("input_reference", URL), ("reference_url", "data:image/png;base64,BBBB")], "input_reference"),
        ([("last_reference", "https://example.com/a.png")], "last_reference"),
        ([("last_reference", URL), ("last_reference", "data:image/png;base64,BBBB")], "last_reference"),
        ([("last_reference", "data:image/png;base64,@")], "last_reference"),
        ([("image_reference", "{")], "image_reference"),
        ([("extra_body", "fps")], "extra_body"),
    ],
)
def test_photos_that_cannot_be_had(fields: list[tuple[str, Any]], param: str) -> None:
    error = read(fields)
    assert isinstance(error, ApiError)
    assert error.param == param


def test_parameters_of_other_servers_with_their_defaults_are_ignored() -> None:
    nothing = [(name, value) for name, values in NO_OPS.items() for value in values[:1]]
    given = {"n": 1, "enable_teacache": False, "user": "me", "lora": None, "boundary_ratio": "null", "fps": "None"}
    assert options_of([*nothing, *given.items(), ("negative_prompt", None)]) == options_of([])


@pytest.mark.parametrize("name", NO_OPS)
def test_parameters_of_other_servers_with_other_values_are_refused(name: str) -> None:
    error = read([(name, 3)])
    assert isinstance(error, ApiError)
    assert (error.param, "not supported" in str(error)) == (name, True)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"guidance_scale": "2.5"}, {"max_guidance_scale": 2.5, "min_guidance_scale": None}),
        ({"guidance_scale": "0.5"}, {"max_guidance_scale": 0.5, "min_guidance_scale": 0.5}),
        ({"seconds": "4"}, {"frames": 28}),
        ({"seconds": "1.5", "fps": "10"}, {"frames": 15, "fps": 10}),
        ({"seconds": "4", "num_frames": "14"}, {"frames": 14}),
    ],
)
def test_guidance_and_seconds(given: dict[str, Any], found: dict[str, Any]) -> None:
    options = options_of(list(given.items()))
    assert {name: getattr(options, name) for name in found} == found


@pytest.mark.parametrize(
    ("given", "param", "says"),
    [
        ({"seconds": "1000"}, "seconds", "seconds 1000 is not allowed: it must be shorter; videos have 1,024 frames"),
        ({"seconds": "64", "family": "wan"}, "seconds", "seconds 64 is not allowed: it must be shorter"),
        ({"seconds": "1e308"}, "seconds", "must be shorter"),
        ({"seconds": "-4"}, "seconds", "seconds -4 is not allowed: it must be more than 0"),
        ({"seconds": "4", "fps": "100000"}, "fps", "fps 100000 is not allowed"),
    ],
)
def test_a_length_that_is_not_allowed_is_named_as_it_was_given(given: dict[str, Any], param: str, says: str) -> None:
    error = read(list(given.items()))
    assert isinstance(error, ApiError)
    assert (error.param, says in str(error)) == (param, True), error


def test_a_negative_prompt_that_is_null_leaves_it_to_the_model() -> None:
    assert options_of([("family", "wan"), ("negative_prompt", None)]).negative_prompt is None
    assert options_of([("family", "wan"), ("negative_prompt", "")]).negative_prompt == ""


@pytest.mark.parametrize(("asked", "size"), [("1280x720", (1280, 704)), ("720x1280", (704, 1280))])
def test_the_sizes_of_openai_become_the_nearest_that_can_be_rendered(asked: str, size: tuple[int, int]) -> None:
    found = read([("size", asked)])
    assert isinstance(found, JobSpec)
    [options] = found.drafts
    assert ((options.width, options.height), f"nearest to {asked}" in found.notice) == (size, True)
    kept = read([("size", asked), ("family", "wan")])
    assert isinstance(kept, JobSpec)
    assert (f"{kept.drafts[0].width}x{kept.drafts[0].height}", kept.notice) == (asked, "")


@pytest.mark.parametrize("scale", ["-1", "1e9"])
def test_an_error_names_what_was_sent(scale: str) -> None:
    error = read([("guidance_scale", scale)])
    assert isinstance(error, ApiError)
    assert (error.param, "max_guidance" in str(error), "min_guidance" in str(error)) == ("guidance_scale", False, False)


@pytest.mark.parametrize(
    ("options", "field"),
    [(Draft(loop=True), "loop"), (Draft(last_image=ANY_PHOTO), "last_reference")],
)
def test_a_last_frame_that_no_worker_takes_is_refused(options: Draft, field: str) -> None:
    model = KnownModel(name="ti2v", family=FAMILY, facts=MODELS["Wan-AI/Wan2.2-TI2V-5B-Diffusers"].facts)
    with pytest.raises(ApiError, match=f"^{field} does not apply to the workers' model ti2v,") as caught:
        read_request([], NOW, Expected(model=model), options)
    assert (caught.value.status, caught.value.param) == (400, field)


@pytest.mark.parametrize("family", ["svd", "wan"])
def test_prompts_have_no_control_characters(family: str) -> None:
    error = read([("family", family), ("prompt", "a\x1b[31m dog")])
    assert isinstance(error, ApiError)
    assert error.param == "prompt"
    assert isinstance(read([("family", family), ("prompt", "two\nlines")]), JobSpec)


def test_a_remix_keeps_the_pace_and_the_guidance_of_its_video() -> None:
    base = Draft(family="svd", frames=14, fps=24, min_guidance_scale=2.0, max_guidance_scale=3.0)
    [options] = read_request([("seconds", "2"), ("guidance_scale", 1.5)], NOW, base=base).drafts
    assert (options.frames, options.fps) == (48, 24)
    assert (options.min_guidance_scale, options.max_guidance_scale) == (1.5, 1.5)
    base = Draft(family="wan", fps=24)
    [options] = read_request([("seconds", "2")], NOW, base=base).drafts
    assert (options.frames, options.fps) == (49, 24)


@pytest.mark.parametrize("name", ["generate_audio", "generate_sound"])
def test_sound_is_asked_for_by_the_names_of_other_servers(name):
    for value, sound in ((True, True), ("false", False)):
        asked = options_of([("family", "ltx"), (name, value), ("seconds", "5")])
        assert (asked.sound, asked.frames, asked.fps) == (sound, 121, 24)
    assert options_of([(name, "true")]).family == "ltx"
    assert options_of([("family", "wan"), (name, "false")]).given().keys() == {"family"}
    refused = read([("family", "wan"), (name, "true")])
    assert str(refused).startswith(f"{name} does not apply to Wan (family wan), only to LTX-2")
