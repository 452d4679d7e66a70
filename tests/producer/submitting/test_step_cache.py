"""`step_cache` in jobs: a threshold, or a speedup of a model that is known; and sentences where nothing is skipped."""

from datetime import datetime
from pathlib import Path

import pytest

from svdq.cli.serve import form
from svdq.cli.serve.fields import flatten, read_request
from svdq.pipeline.errors import InputError
from svdq.pipeline.models.known_model import Expected, KnownModel
from svdq.pipeline.models.names.model_names import known_model
from svdq.producer.job import Job
from svdq.producer.submitting.draft import Draft, read_draft, sweep
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.parameters import as_flag
from svdq.producer.submitting.photos import Photo

A14B = known_model("Wan-AI/Wan2.2-I2V-A14B-Diffusers")
PHOTO = Photo(path=Path("cup.jpg"), sha256="0" * 64, extension="jpg", num_bytes=1, name="cup", size=(832, 480))


def jobs(text: str | None, model: KnownModel | None = A14B, **given: object) -> list[Job]:
    asked = {"family": "wan", "seed": 1} | given | ({} if text is None else {"step_cache": text})
    spec = JobSpec(drafts=(read_draft(asked, as_flag),), expected=Expected(model=model))
    spec.check()
    return [entry.job for entry in spec.entries(PHOTO, 1)]


def test_a_threshold_is_kept_and_0_is_the_job_of_before() -> None:
    [plain], [off], [on] = jobs(None), jobs("0"), jobs("0.06")
    assert on.step_cache == 0.06
    assert off == plain
    assert off.digest(seed_was_drawn=False) == plain.digest(seed_was_drawn=False)
    assert on.digest(seed_was_drawn=False) != plain.digest(seed_was_drawn=False)


@pytest.mark.parametrize(("text", "threshold"), [("1.5x", 0.03), ("1.74x", 0.07), ("1.2X", 0.02)])
def test_a_speedup_becomes_the_smallest_threshold_that_reaches_it(text: str, threshold: float) -> None:
    [job] = jobs(text)
    assert job.step_cache == threshold


def test_a_sweep_has_thresholds_and_speedups() -> None:
    options = sweep(Draft(family="wan"), ["step_cache=0,0.06,1.5x"])
    spec = JobSpec(drafts=options, expected=Expected(model=A14B))
    assert [entry.job.step_cache for entry in spec.entries(PHOTO, 1)] == [0.0, 0.06, 0.03]


def test_the_curve_of_a_model_file_counts(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    flat = "[step_cache]\nhigh = [1.0]\nlow = [1.0]\n"
    path.write_text(f'base = "Wan-AI/Wan2.2-I2V-A14B-Diffusers"\n{flat}')
    [job] = jobs("1.74x", known_model(str(path)))
    assert job.step_cache == 0.01


@pytest.mark.parametrize(
    ("text", "given", "words"),
    [
        ("much", {}, "'much' is not allowed: it must be a number, such as 0.5, or a speedup, such as 1.5x."),
        ("-1", {}, "--step-cache -1.0 is not allowed: it must be greater than or equal to 0"),
        ("2", {}, "--step-cache 2.0 is not allowed: it must be less than or equal to 1"),
        ("4x", {}, "4x is more than there is: at least 18 of 40 steps are computed"),
        ("0.06", {"steps": 2}, "skips none of 2 steps of Wan 2.2 I2V-A14B"),
        ("0.06", {"family": "svd"}, "--step-cache does not apply to Stable Video Diffusion"),
    ],
)
def test_what_cannot_be_is_a_sentence(text: str, given: dict[str, object], words: str) -> None:
    with pytest.raises(InputError) as raised:
        jobs(text, **({"model": None} if "family" in given else {}), **given)
    assert words in str(raised.value)


def test_a_speedup_needs_a_known_model_and_a_threshold_does_not() -> None:
    unknown = known_model("someone/Wan2.2-of-mine")
    with pytest.raises(InputError, match=r"--step-cache 1.5x needs the model, which is not known here; give a thresh"):
        jobs("1.5x", unknown)
    [job] = jobs("0.06", unknown)
    assert job.step_cache == 0.06


def test_a_request_may_have_it_among_its_extra_parameters() -> None:
    for value, expected in ((0.06, 0.06), ("1.5x", 0.03)):
        fields = [("prompt", "A wave."), ("seed", 1), ("extra_params", {"step_cache": value})]
        spec = read_request(flatten(fields)[0], datetime.now().astimezone(), Expected(model=A14B))
        [entry] = spec.entries(PHOTO, 1)
        assert entry.job.step_cache == expected


def test_the_form_has_a_text_field_for_it() -> None:
    [field] = [each for each in form.fields("wan", {}) if each.name == "step_cache"]
    assert (field.kind, field.label, field.high) == ("text", "Skip steps", "")
    spec = form.read_spec({"family": "wan", "step_cache": "1.5x"}, datetime.now().astimezone(), Expected(model=A14B))
    [entry] = spec.entries(PHOTO, 1)
    assert entry.job.step_cache == 0.03


def test_it_is_taken_from_the_parameters_of_another_video() -> None:
    [job] = jobs("0.06")
    assert Draft(family="wan").with_defaults_from(job.model_dump(mode="json")).step_cache == 0.06
