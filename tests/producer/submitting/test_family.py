"""Which family of models a submission is for, and what does not apply to it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from svdq.pipeline.errors import InputError
from svdq.producer.job import JOBS, Job
from svdq.producer.submitting.family import ConfiguredModel
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.options import SubmitOptions, make_job

PHOTO = {"image": f"inputs/{'0' * 64}.jpg", "name": "photo"}
SVD = ConfiguredModel(name="/models/svd", family="svd")
WAN = ConfiguredModel(name="/models/wan", family="wan")


def job_of(model: ConfiguredModel | None = None, **options) -> Job:
    return make_job(SubmitOptions(**options), model=model, **PHOTO)


@pytest.mark.parametrize(
    ("options", "model", "family"),
    [
        ({}, None, "svd"),
        ({}, SVD, "svd"),
        ({}, WAN, "wan"),
        ({"frames": 17}, WAN, "wan"),
        ({"family": "wan"}, None, "wan"),
        ({"family": "wan"}, SVD, "wan"),
        ({"family": "svd"}, WAN, "svd"),
        ({"prompt": ""}, None, "wan"),
        ({"flow_shift": 5.0}, None, "wan"),
        ({"guidance_scale_2": 3.0}, WAN, "wan"),
        ({"motion_bucket_id": 5}, None, "svd"),
        ({"prompt": "x", "family": "wan"}, SVD, "wan"),
    ],
)
def test_parameters_and_the_model_decide_the_family(
    options: dict[str, object], model: ConfiguredModel | None, family: str
) -> None:
    assert job_of(model, **options).family == family


@pytest.mark.parametrize(
    ("options", "model", "says"),
    [
        ({"prompt": "x", "fps": 7, "max_guidance_scale": 2.0}, None, "--max-guidance-scale .*Stable.*--prompt .*Wan"),
        ({"prompt": "x", "family": "svd"}, None, r"--prompt does not apply to Stable Video Diffusion \(--family svd\)"),
        ({"noise_aug_strength": 0.1, "family": "wan"}, SVD, "--noise-aug-strength does not apply to Wan"),
        ({"prompt": "x"}, SVD, "--prompt does not apply to the configured model /models/svd.* --family wan"),
        ({"motion_bucket_id": 5}, WAN, "--motion-bucket-id does not apply to .*/models/wan, which is Wan"),
        ({"family": ["wan"]}, None, "--family .*wan.* is not allowed"),
        ({"family": "sora"}, None, "--family sora is not allowed: it must be one of svd, wan"),
    ],
)
def test_what_does_not_apply_is_refused(options: dict[str, object], model: ConfiguredModel | None, says: str) -> None:
    with pytest.raises(InputError, match=says):
        job_of(model, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"frames": 18},
            "--frames 18 is not allowed: it must be 1 more than a multiple of 4, .* being 17 and 21",
        ),
        ({"frames": 1024}, "the nearest being 1021[.]"),
        ({"width": 840, "height": 480}, "--size 840x480 .* multiples of 16 .* 832x480"),
        ({"width": 100}, "--size 100xdefault .* multiples of 16"),
        ({"steps": 0}, "--steps 0"),
        ({"prompt": "x" * 5001}, "--prompt x+… .* at most 5,000 characters, and has 5,001"),
        ({"prompt": "a\x1bb"}, "--prompt .* without control characters"),
        ({"negative_prompt": "a\x00"}, "--negative-prompt .* without control characters"),
        ({"prompt": "\udcff"}, "--prompt .* valid text"),
        ({"flow_shift": 0.0}, "--flow-shift 0.0"),
        ({"guidance_scale": float("nan")}, "--guidance-scale nan"),
        ({"guidance_scale_2": 101.0}, "--guidance-scale-2 101.0"),
    ],
)
def test_values_of_wan(options: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        job_of(family="wan", **options)


@pytest.mark.parametrize("size", [(832, 480), (1280, 720), (16, 4096)])
def test_sizes_of_wan(size: tuple[int, int]) -> None:
    job = job_of(family="wan", width=size[0], height=size[1], frames=81)
    assert (job.width, job.height, job.frames) == (*size, 81)
    with pytest.raises(InputError, match="multiples of 64"):
        job_of(width=832, height=480)


def test_interpolation_of_what_is_left_to_the_model() -> None:
    assert job_of(family="wan", interpolate=20).interpolate == 20
    with pytest.raises(InputError, match="--interpolate 20 is not more than --fps 24"):
        job_of(family="wan", interpolate=20, fps=24)


def test_prompts_make_other_jobs() -> None:
    ids = {
        job_of(**options).digest(seed_was_drawn=True)
        for options in ({}, {"family": "wan"}, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "b", "flow_shift": 5.0})
    }
    assert len(ids) == 5


def test_templates_have_the_fields_of_the_family() -> None:
    spec = JobSpec(options=(SubmitOptions(prompt="A cat: jumps"),), name="{stem}-{prompt:.10}")
    spec.check()
    with pytest.raises(InputError, match=r"\{motion_bucket_id\}, which such videos do not have"):
        replace(spec, name="{motion_bucket_id}").check()
    with pytest.raises(InputError, match=r"\{steps\}, which is left to the model"):
        replace(spec, name="{steps}").check()


def test_the_parameters_of_a_video_bring_their_family() -> None:
    like_svd = SubmitOptions(frames=3).with_defaults_from(job_of(seed=1).model_dump(mode="json"))
    assert like_svd.family == "svd"
    like_wan = SubmitOptions(seed=3).with_defaults_from(job_of(seed=1, prompt="a cat").model_dump(mode="json"))
    assert (like_wan.family, like_wan.prompt, like_wan.seed) == ("wan", "a cat", 3)


def test_the_family_of_a_model_folder(tmp_path: Path) -> None:
    index = tmp_path / "model_index.json"
    for pipeline, family in (("WanImageToVideoPipeline", "wan"), ("StableVideoDiffusionPipeline", "svd")):
        index.write_text(json.dumps({"_class_name": pipeline}))
        found = ConfiguredModel.of(str(tmp_path))
        assert found is not None
        assert (found.name, found.family) == (str(tmp_path), family)
    for text in ('{"_class_name": "FluxPipeline"}', "{}", "no JSON"):
        index.write_text(text)
        assert ConfiguredModel.of(str(tmp_path)) is None
    for name in ("preview", "simulated:step_ms=1", "/nowhere", "nobody/has-this", "a/b..c", "a/b--", f"a/{'b' * 200}"):
        assert ConfiguredModel.of(name) is None


def test_every_family_has_its_class_of_jobs() -> None:
    for family, cls in JOBS.items():
        assert cls.model_fields["family"].default == family
        assert len(cls.title) > 2
