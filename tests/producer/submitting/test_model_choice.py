"""Which family of models a submission is for, and what does not apply to it."""

import json
import re
import shutil
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import redis
from PIL import Image

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.families import published_model
from svdq.pipeline.models.known_model import KnownModel
from svdq.pipeline.models.wan.family import MODELS
from svdq.producer import keys
from svdq.producer.job import Job
from svdq.producer.settings import Settings
from svdq.producer.settings_loader import load_settings
from svdq.producer.status.job_view import job_status
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.model_choice import configured_model, expect
from svdq.producer.submitting.new_job import make_job
from svdq.producer.submitting.submission import submit
from tests.conftest import Cli
from tests.ranks import rank, save

PHOTO = {"image": f"inputs/{'0' * 64}.jpg", "name": "photo"}
SVD = replace(published_model("svd"), name="/models/svd", is_configured=True)
WAN = replace(published_model("wan"), name="/models/wan", is_configured=True)
LOOP = Draft(loop=True)


def job_of(model: KnownModel | None = None, **options) -> Job:
    return make_job(Draft(**options), model=model, **PHOTO)


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
    options: dict[str, object], model: KnownModel | None, family: str
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
def test_parameters_of_another_family_are_refused(
    options: dict[str, object], model: KnownModel | None, says: str
) -> None:
    with pytest.raises(InputError, match=says):
        job_of(model, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"frames": 18}, "--frames 18 is not allowed: it must be 1 more than a multiple of 4, .* being 17 and 21"),
        ({"frames": 1024}, "the nearest being 1021[.]"),
        ({"width": 840, "height": 480}, "--size 840x480 .* multiples of 16 .* 832x480"),
        ({"width": 100}, "--width 100 .* multiples of 16"),
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


def test_prompts_make_other_jobs() -> None:
    ids = {
        job_of(**options).digest(seed_was_drawn=True)
        for options in ({}, {"family": "wan"}, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "b", "flow_shift": 5.0})
    }
    assert len(ids) == 5


def test_templates_have_the_fields_of_the_family() -> None:
    spec = JobSpec(drafts=(Draft(prompt="A cat: jumps"),), name="{stem}-{prompt:.10}")
    spec.check()
    with pytest.raises(InputError, match=r"\{motion_bucket_id\}, which such videos do not have"):
        replace(spec, name="{motion_bucket_id}").check()
    with pytest.raises(InputError, match=r"\{steps\}, which is left to the model"):
        replace(spec, name="{steps}").check()


def test_the_parameters_of_a_video_bring_their_family() -> None:
    like_svd = Draft(frames=3).with_defaults_from(job_of(seed=1).model_dump(mode="json"))
    assert like_svd.family == "svd"
    like_wan = Draft(seed=3).with_defaults_from(job_of(seed=1, prompt="a cat").model_dump(mode="json"))
    assert (like_wan.family, like_wan.prompt, like_wan.seed) == ("wan", "a cat", 3)


def test_the_family_of_a_model_folder(tmp_path: Path) -> None:
    index = tmp_path / "model_index.json"
    for pipeline, family in (("WanImageToVideoPipeline", "wan"), ("StableVideoDiffusionPipeline", "svd")):
        index.write_text(json.dumps({"_class_name": pipeline}))
        found = configured_model(load_settings(model=str(tmp_path)))
        assert found is not None
        assert (found.name, found.family.name) == (str(tmp_path), family)
    for name in ("stabilityai/stable-video-diffusion-img2vid", "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers"):
        assert configured_model(load_settings(model=name)) is not None, "known although it is not here"
    for text in ('{"_class_name": "FluxPipeline"}', "{}", "no JSON"):
        index.write_text(text)
        assert configured_model(load_settings(model=str(tmp_path))) is None
    for name in ("preview", "simulated:step_ms=1", "nobody/has-this", "a/b..c", "a/b--", f"a/{'b' * 200}"):
        assert configured_model(load_settings(model=name)) is None


def running(connection: redis.Redis, model: str, family: str = "", group: str = "g", **others: object) -> None:
    save(connection, rank(0, group, num_ranks=1, model=model, family=family, **others))


def family_of(settings: Settings) -> str | None:
    model = expect(settings).model
    return model and model.family.name


def test_the_models_of_workers_decide_if_they_agree(connection: redis.Redis, settings: Settings, photo: Path) -> None:
    assert family_of(settings) is None
    running(connection, "preview")
    assert family_of(settings) is None
    running(connection, "/models/on-their-host", "wan", "h")
    assert family_of(settings) == "wan"
    assert family_of(settings.model_copy(update={"model": "stabilityai/stable-video-diffusion-img2vid-xt"})) == "svd"
    for options, family in (({}, "wan"), ({"motion_bucket_id": 5}, "svd"), ({"family": "svd"}, "svd")):
        [submission] = submit(settings, [photo], Draft(seed=1, **options))
        assert job_status(settings, submission.id).parameters.get("family", "svd") == family
    running(connection, "stabilityai/stable-video-diffusion-img2vid-xt", group="i")
    assert family_of(settings) is None


def test_videos_are_for_a_family_that_workers_have(connection: redis.Redis, settings: Settings, photo: Path) -> None:
    running(connection, "/models/ltx", "ltx", "g")
    running(connection, "/models/wan", "wan", "h")
    for options, family in (({}, "wan"), ({"prompt": "It rains."}, "wan"), ({"stages": 2}, "ltx")):
        [submission] = submit(settings, [photo], Draft(seed=1, **options))
        assert job_status(settings, submission.id).parameters["family"] == family


def test_a_prompt_is_for_a_family_with_prompts_that_workers_have(
    svdq: Cli, connection: redis.Redis, settings: Settings, photo: Path, tmp_path: Path
) -> None:
    running(connection, "/models/svd", "svd", "g")
    running(connection, "/models/ltx", "ltx", "h")
    [by_python] = submit(settings, [photo], Draft(seed=1, prompt="It rains."))
    assert job_status(settings, by_python.id).parameters["family"] == "ltx"
    (tmp_path / "list.csv").write_text(f"photo,prompt\n{photo},It rains.\n")
    (tmp_path / "inbox").mkdir()
    shutil.copy(photo, inbox := tmp_path / "inbox" / "cup.jpg")
    inbox.with_suffix(".txt").write_text("It rains.")
    for words in (
        ("submit", photo, "--prompt", "It snows."),
        ("submit", photo, "--then", "It rains."),
        ("submit", photo, "--guidance-scale", "2"),
        ("submit", inbox),
        ("batch", tmp_path / "list.csv"),
        ("watch", inbox.parent, "--once", "--stable-for", "10ms", "--prompt", "It rains."),
    ):
        made = svdq(*words, "--json")
        assert made.returncode == 0, made.stderr
        [job_id, *_] = re.findall(r"\b[0-9a-f]{20}\b", made.stdout)
        assert job_status(settings, job_id).parameters["family"] == "ltx", words
    [plain] = submit(settings, [photo], Draft(seed=1))
    assert job_status(settings, plain.id).parameters.get("family", "svd") == "svd"


def test_prompts_beside_the_photos_decide_where_nothing_else_does(
    connection: redis.Redis, settings: Settings, photo: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "plain.png"
    Image.new("RGB", (8, 8)).save(plain)
    photo.with_suffix(".txt").write_text("A wave breaks.")
    found = submit(settings, [plain, photo], Draft(seed=1))
    jobs = [job_status(settings, each.id) for each in found]
    assert [(job.parameters.get("family"), job.prompt) for job in jobs] == [("wan", ""), ("wan", "A wave breaks.")]
    [plain_again] = submit(settings, [plain], Draft(seed=1))
    assert "family" not in job_status(settings, plain_again.id).parameters


def test_a_last_frame_is_refused_where_the_configured_model_takes_none(settings: Settings, photo: Path) -> None:
    def refuse(model: str, options: Draft = LOOP, **others: object) -> str:
        with pytest.raises(InputError, match="; ") as caught:
            submit(settings.model_copy(update={"model": model}), photo, options, **others)
        return str(caught.value)

    assert refuse("Wan-AI/Wan2.2-TI2V-5B-Diffusers") == (
        "loop does not apply to the configured model Wan-AI/Wan2.2-TI2V-5B-Diffusers, which takes no last frame; leave "
        "it out, or use a model that takes one, such as Wan-AI/Wan2.2-I2V-A14B-Diffusers (boomerang works with all)."
    )
    says = refuse("Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", Draft(), last_image=photo)
    assert says.startswith("last_image does not apply to the configured model Wan-AI/Wan2.1-I2V-14B-480P-Diffusers")
    assert "configured model stabilityai/" in refuse("stabilityai/stable-video-diffusion-img2vid-xt")
    for name in ("Wan2.2-I2V-A14B-Diffusers", "Wan2.1-FLF2V-14B-720P-diffusers"):
        submit(settings.model_copy(update={"model": f"Wan-AI/{name}"}), photo, LOOP)
    svd = settings.model_copy(update={"model": "stabilityai/stable-video-diffusion-img2vid-xt"})
    submit(svd, photo, replace(LOOP, family="wan"))


def test_a_last_frame_is_refused_where_no_worker_takes_one(
    connection: redis.Redis, settings: Settings, photo: Path
) -> None:
    submit(settings, photo, LOOP)  # no worker is known
    ti2v = MODELS["Wan-AI/Wan2.2-TI2V-5B-Diffusers"]
    for family, facts in (("svd", SVD.facts), ("wan", ti2v.facts)):
        running(connection, f"/models/{family}", family, facts=dict(facts))
        with pytest.raises(InputError, match=f"loop .* the workers' model /models/{family}, which takes no"):
            submit(settings, photo, LOOP)
    submit(settings, photo, LOOP, at=datetime.now() + timedelta(hours=1))  # there may be others by then
    now, _ = connection.time()
    connection.zadd(keys.STARTING, {"h:1 wan /models/wan": now + 9})  # still there, though it runs by now
    with pytest.raises(InputError, match="takes no last frame"):
        submit(settings, photo, LOOP)
    connection.zadd(keys.STARTING, {"h:2 wan /models/other": now + 9})
    submit(settings, photo, replace(LOOP, seed=2))
    connection.delete(keys.STARTING)
    running(connection, "/models/other", "wan", "h")
    submit(settings, photo, replace(LOOP, seed=3))
