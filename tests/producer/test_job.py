import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from svdq.pipeline.models.wan.family import WanParameters
from svdq.producer.job import Job, parse_job
from tests.queued import SvdJob, WanJob

sides = st.integers(1, 64).map(lambda n: n * 64)
guidance = st.tuples(st.floats(0, 100), st.floats(0, 100)).map(sorted)
names = st.text(st.characters(categories=("L", "N", "P", "S"), exclude_characters="/\\"), min_size=1, max_size=50)
folders = st.lists(names.map(lambda name: f"x{name}"), max_size=3).map("/".join)

PLAIN = SvdJob(image=f"inputs/{'0' * 64}.jpg", name="photo", seed=1)

WAN = WanJob(image=PLAIN.image, name="photo", seed=1, prompt="A cat.")


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    low, high = draw(guidance)
    return SvdJob(
        image=f"inputs/{draw(st.text('0123456789abcdef', min_size=64, max_size=64))}.jpg",
        name="x" + draw(names),
        frames=draw(st.none() | st.integers(1, 1024)),
        steps=draw(st.integers(1, 1000)),
        width=draw(sides),
        height=draw(sides),
        fps=draw(st.integers(1, 120)),
        motion_bucket_id=draw(st.integers(0, 1023)),
        noise_aug_strength=draw(st.floats(0, 10)),
        min_guidance_scale=low,
        max_guidance_scale=high,
        decode_chunk_size=draw(st.none() | st.integers(1, 1024)),
        seed=draw(st.integers(0, 2**63 - 1)),
        formats=tuple(draw(st.lists(st.sampled_from(["mp4", "gif", "webp", "png"]), min_size=1, max_size=4))),
        fit=draw(st.sampled_from(["crop", "pad", "stretch"])),
        folder=draw(folders),
        boomerang=draw(st.booleans()),
    )


texts = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=50)


@st.composite
def wan_jobs(draw: st.DrawFn) -> WanJob:
    side, scale = st.none() | st.integers(1, 256).map(lambda n: n * 16), st.none() | st.floats(0, 100)
    loops = draw(st.booleans())
    return WanJob(
        image=PLAIN.image,
        loop=loops,
        last_image=None if loops else draw(st.none() | st.just(f"inputs/{'1' * 64}.png")),
        name="x" + draw(names),
        frames=draw(st.none() | st.integers(1, 255).map(lambda n: 4 * n + 1)),
        steps=draw(st.none() | st.integers(1, 1000)),
        width=draw(side),
        height=draw(side),
        fps=draw(st.none() | st.integers(1, 120)),
        prompt=draw(texts),
        negative_prompt=draw(st.none() | texts),
        guidance_scale=draw(scale),
        guidance_scale_2=draw(scale),
        flow_shift=draw(st.none() | st.floats(0.01, 100)),
        seed=draw(st.integers(0, 2**63 - 1)),
    )


@given(jobs())
def test_json_round_trip(job: Job) -> None:
    assert SvdJob.model_validate_json(job.model_dump_json()) == job
    again = SvdJob.model_validate(job.model_dump(mode="json"))
    assert again == job
    assert again.digest(seed_was_drawn=True) == job.digest(seed_was_drawn=True)


@given(jobs(), st.integers(0, 2**32))
def test_digest(job: Job, seed: int) -> None:
    other = job.model_copy(update={"seed": seed, "name": "other"})
    assert other.digest(seed_was_drawn=True) == job.digest(seed_was_drawn=True)
    assert (other.digest(seed_was_drawn=False) == job.digest(seed_was_drawn=False)) == (seed == job.seed)
    assert job.digest(seed_was_drawn=True, nonce="1") != job.digest(seed_was_drawn=True)


@given(wan_jobs())
def test_json_round_trip_of_wan(job: WanJob) -> None:
    assert parse_job(json.loads(job.model_dump_json())) == job
    assert parse_job(job.model_dump(mode="json")).parameters == job.parameters
    left_out = {name for name in ("loop", "last_image", "loras", "step_cache", "upscale") if not getattr(job, name)}
    assert job.parameters.model_dump().keys() == WanParameters.model_fields.keys() - left_out


def test_a_job_without_a_family_is_of_svd() -> None:
    document = PLAIN.model_dump(mode="json")
    assert "family" not in document
    assert parse_job(document) == parse_job(document | {"family": "svd"}) == PLAIN


@pytest.mark.parametrize(
    "change",
    [
        {"family": "wan"},  # with SVD's fields
        {"family": "sora"},
        {"family": None},
        {"family": ["svd"]},
        {"prompt": "x"},
        {"frames": "3"},
        {"seed": None},
    ],
)
def test_documents_that_are_no_jobs(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"family|validation error"):
        parse_job(PLAIN.model_dump(mode="json") | change)
    for document in (None, [], "svd", {}):
        with pytest.raises(ValueError, match=r"family|validation error"):
            parse_job(document)


def test_the_ids_of_earlier_submissions_stay() -> None:
    assert PLAIN.digest(seed_was_drawn=True) == "fd5f1e62bcf7518910c2"
    assert PLAIN.digest(seed_was_drawn=False) == "1b1a316ec2e579cc5edd"
    assert WAN.digest(seed_was_drawn=True) == "17c76692c1c15f4ced45"
    assert WAN.digest(seed_was_drawn=False) == "6b3c2ac062b5c532c80a"


def test_a_last_frame_makes_another_job_only_where_it_is_asked_for() -> None:
    last_image = f"inputs/{'1' * 64}.png"
    ids = [
        WanJob(**WAN.model_dump() | fields).digest(seed_was_drawn=True)
        for fields in ({}, {"loop": True}, {"last_image": last_image}, {"last_image": WAN.image}, {"loop": False})
    ]
    assert ids[-1] == ids[0]
    assert len(set(ids)) == 4
    assert not {"loop", "last_image"} & WAN.model_dump(mode="json").keys()
    for fields in ({"last_image": "../secret"}, {"loop": True, "boomerang": True}):
        with pytest.raises(ValueError, match=r"inputs/<sha256>|exclude each other"):
            WanJob(**WAN.model_dump() | fields)


def test_boomerang_and_interpolation_make_other_jobs_only_where_asked_for() -> None:
    def id_of(**fields: Any) -> str:
        return SvdJob(**PLAIN.model_dump() | fields).digest(seed_was_drawn=False)

    assert id_of(boomerang=False, interpolate=None) == "1b1a316ec2e579cc5edd"
    assert len({id_of(), id_of(boomerang=True), id_of(interpolate=24), id_of(interpolate=24, boomerang=True)}) == 4
    assert not {"boomerang", "interpolate"} & PLAIN.model_dump(mode="json").keys()


def test_upscaling_makes_another_job_only_where_it_is_asked_for() -> None:
    def job_of(upscale: str) -> SvdJob:
        return SvdJob(**PLAIN.model_dump() | {"width": 832, "height": 448, "upscale": upscale})

    texts = ("", "2", "2.0", "1.5", "1920x1080", "1920X1080")
    assert len({job_of(text).digest(seed_was_drawn=False) for text in texts}) == 4
    assert PLAIN.model_copy(update={"upscale": ""}).digest(seed_was_drawn=False) == "1b1a316ec2e579cc5edd"
    assert "upscale" not in job_of("").model_dump(mode="json").keys() | job_of("").parameters.model_dump().keys()
    assert job_of("2.0").parameters.upscale == "2"
    sizes = [job_of(text).shown_size for text in ("", "2", "1.5", "1.333", "1920x1080")]
    assert sizes == [(832, 448), (1664, 896), (1248, 672), (1110, 598), (1920, 1080)]


@pytest.mark.parametrize("upscale", ["0", "0.5", "9", "-2", "2x", "1e1", "x", "1921x1080", "8192x4320", "8x8", "5", 2])
def test_upscaling_has_limits(upscale: object) -> None:
    with pytest.raises(ValidationError):
        SvdJob(**PLAIN.model_dump() | {"width": 832, "height": 448, "upscale": upscale})


@pytest.mark.parametrize("interpolate", [1, 2, 7, 121, "24", True])
def test_interpolation_adds_frames(interpolate: object) -> None:
    with pytest.raises(ValidationError):
        SvdJob(**PLAIN.model_dump() | {"interpolate": interpolate, "fps": 7})


def test_files_are_in_the_folder() -> None:
    assert PLAIN.output_stem("1f") == "outputs/photo-1f"
    assert PLAIN.model_copy(update={"folder": "a/b c"}).output_stem("1f") == "outputs/a/b c/photo-1f"


@pytest.mark.parametrize(
    "folder",
    ["/a", "a/", "a//b", ".", "..", "a/../b", "../a", ".a", "a\\b", "a\nb", " ", "a/ /b", "é" * 128, "a/" * 501],
)
def test_a_folder_stays_inside(folder: str) -> None:
    with pytest.raises(ValidationError):
        SvdJob(image=PLAIN.image, name="photo", seed=1, folder=folder)
