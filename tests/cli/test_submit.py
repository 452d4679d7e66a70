"""`svdq submit` as a user runs it."""

import json
import subprocess
from pathlib import Path

import pytest
import redis
from PIL import ExifTags, Image
from rq.job import JobStatus

from svdq.producer.queue import SvdqQueue, fetch, read_job, statuses
from svdq.producer.settings import Settings
from svdq.producer.status.job_view import view
from svdq.producer.storage.storage import Storage
from svdq.producer.verdicts import record_verdict
from tests.conftest import Cli
from tests.finished import add_video
from tests.queued import finish, write_files
from tests.ranks import rank, save


@pytest.fixture
def bad_files(tmp_path: Path, photo: Path) -> Path:
    folder = tmp_path / "bad"
    folder.mkdir()
    whole = photo.read_bytes()
    (folder / "text.jpg").write_text("hello")
    (folder / "truncated.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.jpg").write_bytes(b"")
    # A header is all that is read of it.
    (folder / "bomb.ppm").write_bytes(b"P6 60000 60000 255\n" + bytes(100))
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        ["{bad}/missing.jpg"],
        ["{bad}/text.jpg"],
        ["{bad}/truncated.jpg"],
        ["{bad}/bomb.ppm"],
        ["{photo}", "{bad}/text.jpg"],
        ["{bad}/*.tiff"],
        ["{photo}", "--name", "{{colour}}"],
        ["{photo}", "--output", "/tmp"],
        ["{photo}", "--at", "yesterday"],
        ["{photo}", "--sweep", "fps"],
        ["{photo}", "--variations", "0"],
        ["{photo}", "--frames", "0"],
        ["{photo}", "--size", "1000x500"],
        ["{photo}", "--interpolate", "7"],
        ["{photo}", "--interpolate", "16", "--fps", "24"],
        ["{photo}", "--upscale", "x"],
        ["{photo}", "--upscale", "8"],
        ["{photo}", "--format", "avi"],
        ["{photo}", "--noise-aug-strength", "nan"],
        ["{photo}", "--like", "{photo}"],
        ["{photo}", "--redis-url", "what://u:secret@h"],
        ["{photo}", "--nonsense"],
        [],
    ],
    ids=lambda arguments: " ".join(arguments) or "nothing",
)
def test_bad_input_is_one_sentence(svdq: Cli, home: Path, bad_files: Path, photo: Path, arguments: list[str]) -> None:
    done = svdq("submit", *(word.format(bad=bad_files, photo=photo) for word in arguments))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert "secret" not in done.stderr
    assert not home.exists(), "nothing is enqueued or written, no server started"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--family", "wan", "--format", "mp4"], "--format wav needs sound, which videos of Wan lack"),
        (["--format", "gif"], "--format wav needs sound, which videos of Stable Video Diffusion lack"),
        (["--family", "ltx", "--format", "png", "--no-sound"], "--format wav needs --sound"),
        (["--family", "ltx", "--format", "mp4", "--boomerang"], "--format wav and --boomerang exclude each other"),
        (["--family", "ltx"], "--format wav is written beside a video and needs another format, such as mp4"),
    ],
)
def test_sound_that_no_video_has_is_not_written(svdq: Cli, photo: Path, arguments: list[str], reason: str) -> None:
    done = svdq("submit", photo, "--format", "wav", *arguments)
    assert (done.returncode, done.stderr) == (2, f"Error: {reason}; change one of them.\n")


def test_json(svdq: Cli, connection: redis.Redis, photo: Path) -> None:
    done = svdq(
        *("submit", photo, photo, "--json", "--format", "gif", "--format", "mp4", "--seed", 7, "--priority", "low"),
        *("--family", "svd"),
    )
    assert done.stderr == ""
    first, second = map(json.loads, done.stdout.splitlines())
    assert first == second
    assert list(first) == ["id", "photo", "image", "seed", "status", "name"]
    assert (first["seed"], first["status"], first["photo"]) == (7, "queued", str(photo))
    assert first["image"].startswith("inputs/")
    assert SvdqQueue("svdq-low", connection=connection).get_job_ids() == [first["id"]]
    status = json.loads(svdq("status", first["id"], "--json").stdout)
    assert (status["seed"], status["formats"], status["status"]) == (7, ["gif", "mp4"], "queued")
    assert status["photo"] == str(photo)


def test_again_and_force(svdq: Cli, connection: redis.Redis, photo: Path) -> None:
    first = svdq("submit", photo)
    job_id = first.stdout.split()[0]
    assert f"svdq wait {job_id}" in first.stdout
    again = svdq("submit", photo)
    assert again.stdout.split()[0] == job_id
    assert "--force" in again.stdout
    assert svdq("submit", photo, "--force").stdout.split()[0] != job_id
    assert SvdqQueue("svdq-default", connection=connection).count == 2


def test_like(svdq: Cli, connection: redis.Redis, photo: Path, tmp_path: Path) -> None:
    (job_id,) = (json.loads(svdq("submit", photo, "--json", "--frames", 9, "--fps", 5).stdout)["id"],)
    made = json.loads(svdq("status", job_id, "--json").stdout)
    fields = ("frames", "steps", "width", "height", "fps", "seed", "formats", "fit", "image", "name")
    sidecar = tmp_path / "video.json"
    sidecar.write_text(json.dumps({"svdq": "0", "job": {name: made[name] for name in fields}}))
    like = json.loads(svdq("submit", photo, "--json", "--like", sidecar, "--fps", 6).stdout)
    assert like["seed"] == made["seed"]
    status = json.loads(svdq("status", like["id"], "--json").stdout)
    assert (status["frames"], status["fps"]) == (9, 6)
    swept = svdq("submit", photo, "--json", "--like", sidecar, "--sweep", "fps=4,6").stdout.splitlines()
    assert [json.loads(line)["seed"] for line in swept] == [made["seed"]] * 2
    assert json.loads(swept[1])["id"] == like["id"]


def test_like_brings_the_last_frame_along(svdq: Cli, connection: redis.Redis, photo: Path, settings: Settings) -> None:
    other = photo.with_name("other.png")
    Image.new("RGB", (64, 64), "red").save(other)
    made = json.loads(svdq("submit", photo, "--last", other, "--json").stdout)
    recorded = view(connection, made["id"]).parameters
    sidecar = photo.with_name("video.json")
    sidecar.write_text(json.dumps({"svdq": "0", "job": recorded}))
    like = json.loads(svdq("submit", other, "--like", sidecar, "--json").stdout)
    assert view(connection, like["id"]).parameters["last_image"] == recorded["last_image"]
    looped = json.loads(svdq("submit", other, "--like", sidecar, "--loop", "--json").stdout)
    assert "last_image" not in view(connection, looped["id"]).parameters
    (Path(settings.storage) / recorded["last_image"]).unlink()
    done = svdq("submit", photo, "--like", sidecar)
    assert (done.returncode, "was removed from the storage; give --last." in done.stderr) == (2, True)


def test_size_auto_and_the_warning_about_a_crop(svdq: Cli, connection: redis.Redis, tmp_path: Path) -> None:
    for number, size in enumerate([(300, 400), (300, 400), (320, 180)]):
        image = Image.effect_noise(size, 60 + number)
        image.save(tmp_path / f"{number}.png")
    many = svdq("submit", tmp_path, "--family", "svd")
    assert (many.returncode, many.stderr.strip()) == (
        0,
        "Photos that lose much: 2, such as 0: crop removes 58% of the photo's height; --size auto or --fit pad "
        "keeps more.",
    )
    portrait = str(tmp_path / "0.png")
    one = svdq("submit", portrait, "--force", "--json", "--family", "svd")
    assert json.loads(one.stdout)["warning"] == "crop removes 58% of the photo's height"
    warning, _older = one.stderr.splitlines()
    assert warning == "0: crop removes 58% of the photo's height; --size auto or --fit pad keeps more."
    auto = svdq("submit", portrait, "--size", "auto", "--json", "--family", "svd")
    assert "crop" not in auto.stderr
    job = read_job(fetch(connection, json.loads(auto.stdout)["id"]))
    assert job is not None
    assert (job.width, job.height) == (640, 896)
    assert json.loads(svdq("submit", portrait, "--size", "640x896", "--json").stdout)["id"] == job_id_of(auto)
    (tmp_path / "list.csv").write_text("photo,size\n0.png,auto\n")
    assert json.loads(svdq("batch", tmp_path / "list.csv", "--json").stdout)["id"] == job_id_of(auto)
    (tmp_path / "svdq.toml").write_text('size = "auto"\n')
    (tmp_path / "list.csv").unlink()
    watched = svdq("watch", tmp_path, "--once", "--stable-for", "0.1s", "--json")
    events = [json.loads(line) for line in watched.stdout.splitlines()]
    assert job_id_of(auto) in [event.get("id") for event in events]


def job_id_of(done: "subprocess.CompletedProcess[str]") -> str:
    return str(json.loads(done.stdout)["id"])


def test_a_canceled_or_failed_photo_is_queued_again(svdq: Cli, connection: redis.Redis, tmp_path: Path) -> None:
    for number in range(4):
        Image.effect_noise((64, 36), 60 + number).save(tmp_path / f"{number}.png")
    made = [json.loads(line)["id"] for line in svdq("submit", tmp_path, "--json").stdout.splitlines()]
    assert svdq("cancel", *made[:2]).returncode == 0
    fetch(connection, made[2]).set_status(JobStatus.FAILED)
    foreseen = svdq("submit", tmp_path, "--family", "svd", "--dry-run")
    assert foreseen.stdout.count("(would be queued again, ") == 3, foreseen.stdout
    again = svdq("submit", tmp_path, "--family", "svd")
    assert again.stderr == "3 queued again: 2 canceled, 1 failed before.\n"
    assert [("queued again" in line) for line in again.stdout.splitlines()] == [True, True, True, False]
    assert set(statuses(connection, made)) == {"queued"}


def test_a_finished_job_whose_files_are_gone_is_rendered_again(
    svdq: Cli, connection: redis.Redis, photo: Path, storage: Storage
) -> None:
    job_id = json.loads(svdq("submit", photo, "--json").stdout)["id"]
    write_files(storage, fetch(connection, job_id))
    (video,) = (storage.folder / "outputs").glob("*.mp4")
    finish(fetch(connection, job_id), {"outputs": [str(video)]})
    assert "exists already, finished" in svdq("submit", photo).stdout
    assert svdq("wait", job_id).returncode == 0
    video.unlink()  # a bad take
    waited = svdq("wait", job_id)
    assert (waited.returncode, waited.stderr.count(f"{str(video)!r} was removed")) == (1, 1)
    assert "its files are gone, so it is rendered again" in svdq("submit", photo).stdout
    assert SvdqQueue("svdq-default", connection=connection).get_job_ids() == [job_id]


def test_a_finished_video_stays_in_a_folder_that_was_renamed(
    svdq: Cli, connection: redis.Redis, photo: Path, storage: Storage
) -> None:
    job_id = json.loads(svdq("submit", photo, "--output", "trip", "--json").stdout)["id"]
    add_video(storage, 1, job_id=job_id, folder="trip")
    finish(fetch(connection, job_id), {"outputs": ["x.mp4"]})
    storage.folder.joinpath("outputs", "trip").rename(storage.folder / "outputs" / "journey")
    assert "exists already, finished" in svdq("submit", photo, "--output", "trip").stdout


def test_a_video_that_is_marked_to_keep_is_not_replaced(
    svdq: Cli, connection: redis.Redis, photo: Path, storage: Storage
) -> None:
    job_id = json.loads(svdq("submit", photo, "--json").stdout)["id"]
    finish(fetch(connection, job_id), {"outputs": ["x.mp4"], "model": "/models/old"})
    write_files(storage, fetch(connection, job_id))
    record_verdict(connection, [job_id], "keep")
    assert "exists already, finished" in svdq("submit", photo, SVDQ_MODEL="stabilityai/xt").stdout


def test_the_same_submission_draws_the_same_seed_when_redis_forgot_it(
    svdq: Cli, connection: redis.Redis, photo: Path
) -> None:
    def submitted(*options: object) -> list[dict[str, object]]:
        return [json.loads(line) for line in svdq("submit", photo, "--json", *options).stdout.splitlines()]

    first = submitted("--variations", 3)
    assert len({each["seed"] for each in first}) == 3
    connection.flushdb()
    assert submitted("--variations", 3) == first
    assert submitted("--force")[0]["seed"] not in {each["seed"] for each in first}


def test_what_continues_a_preview_is_replaced_with_it(
    svdq: Cli, connection: redis.Redis, photo: Path, storage: Storage
) -> None:
    chain = ("submit", photo, "--then", "", "--then", "", "--json")
    ids = [json.loads(line)["id"] for line in svdq(*chain).stdout.splitlines()]
    # The workers' model was changed after the first link.
    for job_id, model in zip(ids, ("preview", "stabilityai/xt", "stabilityai/xt"), strict=True):
        write_files(storage, fetch(connection, job_id))
        finish(fetch(connection, job_id), {"outputs": ["x.mp4"], "model": model})
    again = [json.loads(line) for line in svdq(*chain, SVDQ_MODEL="stabilityai/xt").stdout.splitlines()]
    assert [(made["id"], made["status"]) for made in again] == [(job_id, "queued") for job_id in ids]
    assert [fetch(connection, job_id).get_status().value for job_id in ids] == ["queued", "deferred", "deferred"]


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("~/nope.toml", "/nope.toml'; check the path"),
        ("nope.toml", "There is no model at 'nope.toml'"),
        ("/nope/svd-xt", "There is no model at '/nope/svd-xt'"),
        ("Wan-AI/Wan2.2-I2V-A14B", "give Wan-AI/Wan2.2-I2V-A14B-Diffusers."),
    ],
)
def test_a_model_that_is_not_there_is_no_guess(
    svdq: Cli, connection: redis.Redis, photo: Path, model: str, says: str
) -> None:
    done = svdq("submit", photo, SVDQ_MODEL=model)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert SvdqQueue("svdq-default", connection=connection).get_job_ids() == []


def test_a_preview_is_replaced_by_the_real_video(
    svdq: Cli, connection: redis.Redis, photo: Path, storage: Storage
) -> None:
    job_id = json.loads(svdq("submit", photo, "--json").stdout)["id"]
    write_files(storage, fetch(connection, job_id))
    finish(fetch(connection, job_id), {"outputs": ["x.mp4"], "model": "preview"})
    # Nobody has said which model is wanted, and no worker runs.
    assert json.loads(svdq("submit", photo, "--json").stdout)["status"] == "finished"
    again = svdq("submit", photo, SVDQ_MODEL="stabilityai/xt")
    assert again.stdout.startswith(job_id)
    assert "replaces the video that preview made" in again.stdout
    assert SvdqQueue("svdq-default", connection=connection).get_job_ids() == [job_id]

    finish(fetch(connection, job_id), {"outputs": ["x.mp4"], "model": "/models/xt"})  # the same one, from a folder
    assert "exists already, finished" in svdq("submit", photo, SVDQ_MODEL="stabilityai/xt/").stdout
    # What workers run is what would be made.
    save(connection, rank(0, num_ranks=1, model="other"))
    assert "replaces the video that /models/xt made" in svdq("submit", photo, SVDQ_MODEL="stabilityai/xt").stdout


def test_a_model_of_another_family_replaces_no_video(
    svdq: Cli, connection: redis.Redis, photo: Path, storage: Storage, tmp_path: Path
) -> None:
    job_id = json.loads(svdq("submit", photo, "--family", "wan", "--json").stdout)["id"]
    write_files(storage, fetch(connection, job_id))
    finish(fetch(connection, job_id), {"outputs": ["x.mp4"], "model": "/models/wan"})
    for pipeline, status in (("StableVideoDiffusionPipeline", "finished"), ("WanImageToVideoPipeline", "queued")):
        folder = tmp_path / pipeline
        folder.mkdir()
        (folder / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
        save(connection, rank(0, num_ranks=1, model=str(folder)))
        done = svdq("submit", photo, "--family", "wan", "--json")
        assert json.loads(done.stdout)["status"] == status


def test_the_place_of_a_photo_is_recorded_only_with_keep_location(
    svdq: Cli, connection: redis.Redis, tmp_path: Path
) -> None:
    exif, gps, path = Image.Exif(), ExifTags.GPS, tmp_path / "cup.jpg"
    exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.DateTimeOriginal] = "2024:05:06 23:08:09"
    exif.get_ifd(ExifTags.IFD.GPSInfo).update(
        {
            gps.GPSLatitudeRef: "N",
            gps.GPSLatitude: (48.0, 15.0, 0.0),
            gps.GPSLongitudeRef: "E",
            gps.GPSLongitude: (11.0, 30.0, 0.0),
        }
    )
    Image.effect_noise((64, 64), 60).save(path, exif=exif)
    recorded = []
    for options in ([], ["--keep-location", "--force"]):
        job_id = json.loads(svdq("submit", path, *options, "--json").stdout)["id"]
        rq_job = SvdqQueue("svdq-default", connection=connection).fetch_job(job_id)
        assert rq_job is not None
        recorded.append(rq_job.kwargs["notes"])
        assert view(connection, job_id).notes == {}
    assert [notes["taken"] for notes in recorded] == ["2024-05-06T23:08:09"] * 2
    assert [notes.get("location") for notes in recorded] == [None, "48.25000,11.50000"]
