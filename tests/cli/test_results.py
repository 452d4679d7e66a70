"""`svdq fetch` and `prune`, with real files and a real Redis."""

import errno
import hashlib
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import redis
from rq.job import JobStatus

from svdq.pipeline.errors import UnavailableError
from svdq.producer.queue import RENDER, SvdqQueue
from svdq.producer.results.fetch import fetch_all
from svdq.producer.results.finished_videos import find_results
from svdq.producer.results.prune import find_removals, remove_all
from svdq.producer.settings import Settings
from svdq.producer.storage.storage import MARKER, Storage
from svdq.producer.verdicts import record_verdict
from tests.conftest import Cli
from tests.finished import add_video
from tests.queued import JOB, SvdJob, enqueue, finish
from tests.terminal import terminal

DAY_S = 24 * 60 * 60


@pytest.fixture
def root(settings: Settings) -> Path:
    return Path(settings.storage)


def under(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in under(folder)}


def image_of(photo: bytes) -> str:
    return f"inputs/{hashlib.sha256(photo).hexdigest()}.jpg"


def age(days: float, *paths: Path) -> None:
    """Have files been written so long ago."""
    at = time.time() - days * DAY_S
    for path in paths:
        for file in [path, *path.rglob("*")]:
            os.utime(file, (at, at))


def add(connection: redis.Redis, job_id: str, image: str, status: JobStatus | None = None) -> None:
    job = enqueue(connection, JOB.model_copy(update={"image": image}), job_id)
    if status is JobStatus.FINISHED:
        finish(job)
    elif status is not None:
        SvdqQueue(job.origin, connection=connection).remove(job)
        job.set_status(status)


# fetch


def test_fetch(svdq: Cli, storage: Storage, root: Path, tmp_path: Path) -> None:
    one = add_video(storage, 1, name="ü & x", formats=("mp4", "png"))
    two = add_video(storage, 2, folder="holiday/day 1", formats=("gif",))
    age(0.01, root / "outputs")
    rendered = {name: int((root / "outputs" / name).stat().st_mtime) for name in under(root / "outputs")}
    target = tmp_path / "deep/videos"
    done = svdq("fetch", two, one, "-o", target, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["paths"] == [str(target / f"holiday/day 1/photo-{two}.gif")]
    assert second["paths"] == [str(target / f"ü & x-{one}.mp4"), str(target / f"ü & x-{one}")]
    assert contents(target) == contents(root / "outputs")
    assert first["copied"] > 0
    assert {name: int((target / name).stat().st_mtime) for name in under(target)} == rendered

    # What is there is not copied again; what is missing is, and what is edited or rendered anew, under another name.
    before = {name: (target / name).stat().st_mtime_ns for name in under(target)}
    assert svdq("fetch", "--all", "-o", target).stdout.count("exists already") == 2
    assert {name: (target / name).stat().st_mtime_ns for name in under(target)} == before
    gif = target / f"holiday/day 1/photo-{two}.gif"
    edited = gif.read_bytes()[:-1] + b"x"
    gif.write_bytes(edited)
    (target / f"ü & x-{one}/frame_0002.png").unlink()
    assert "exists already" not in svdq("fetch", "--since", "1h", "-o", target).stdout
    expected = contents(root / "outputs")
    stem = f"holiday/day 1/photo-{two}"
    second = {f"{stem}-2{end}": expected[f"{stem}{end}"] for end in (".gif", ".json")}
    assert contents(target) == expected | {f"{stem}.gif": edited} | second
    add_video(storage, 2, folder="holiday/day 1", formats=("gif",), level=99)
    assert svdq("fetch", "--all", "-o", target).stdout.count("exists already") == 1
    anew = contents(root / "outputs")
    third = {f"{stem}-3{end}": anew[f"{stem}{end}"] for end in (".gif", ".json")}
    assert contents(target) == expected | {f"{stem}.gif": edited} | second | third
    assert svdq("fetch", "--all", "-o", target).stdout.count("exists already") == 2
    assert [path.name for path in target.iterdir() if path.name.startswith(".")] == []


def test_fetch_names_files_by_a_template(svdq: Cli, storage: Storage, tmp_path: Path) -> None:
    at = datetime(2027, 1, 31, 12, tzinfo=UTC)
    first = add_video(storage, 1, name="cup", source="trip/day 1/cup.jpg", folder="x", finished_at=at)
    add_video(storage, 2, name="cup", source="trip/day 1/cup.png", finished_at=at, formats=("png", "gif"))
    add_video(storage, 3, name="aux", finished_at=at)
    videos = tmp_path / "videos"
    (videos / "day 1").mkdir(parents=True)
    (videos / "day 1/cup-2.mp4").write_bytes(b"of somebody else")
    (videos / "2027-01").mkdir()

    def fetch(template: str) -> list[str]:
        done = svdq("fetch", "--all", "--json", "--output", f"{videos}/{template}")
        assert done.returncode == 0, done.stderr
        return sorted(path for line in done.stdout.splitlines() for path in json.loads(line)["paths"])

    template = "{folder}/{photo}"
    before = contents(videos)
    paths = fetch(template)
    found = contents(videos)
    assert {name: found[name] for name in before} == before
    assert len(paths) == 4
    assert sorted(path.relative_to(videos).as_posix() for path in videos.rglob("*.json")) in (
        ["_aux.json", "day 1/cup-2.json", "day 1/cup.json"],
        ["_aux.json", "day 1/cup-3.json", "day 1/cup.json"],
    )
    assert fetch(template) == paths
    assert contents(videos) == found
    (videos / "_aux.json").unlink()  # as of a fetch that was killed before it
    assert fetch(template) == paths
    assert contents(videos) == found
    assert svdq("inspect", f"{videos}/day 1/cup.json", "--json").returncode == 0

    assert any(path.endswith(f"2027-01/x/cup-{first}.mp4") for path in fetch("{date:%Y-%m}/"))
    done = svdq("fetch", "--all", "--output", f"{videos}/{{n}}")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "has the field {n}, which such videos do not have" in done.stderr


def test_a_quoted_home_is_the_home(svdq: Cli, storage: Storage, tmp_path: Path) -> None:
    add_video(storage, 1)
    (tmp_path / "me").mkdir()
    for output, page in (("~/Videos/{photo}", "~/page.html"), ("~/all", "~/other.html")):
        assert svdq("fetch", "--all", "-o", output, HOME=str(tmp_path / "me")).returncode == 0
        assert svdq("gallery", "-o", page, HOME=str(tmp_path / "me")).returncode == 0
    names = [name.partition(".")[2] for name in under(tmp_path / "me")]
    assert sorted(names) == ["html", "html", "json", "json", "mp4", "mp4"]
    assert not os.path.lexists("~")
    assert svdq("fetch", "--all", "-o", "~nobody-here/x").returncode == 2


def test_many_videos_are_fetched_with_totals(svdq: Cli, storage: Storage, tmp_path: Path) -> None:
    for number in range(20):
        add_video(storage, number, formats=("gif",))
    done = svdq("fetch", "--all", "-o", tmp_path / "videos")
    assert done.stdout.startswith(f"Copied to {tmp_path / 'videos'}: 20 videos (")
    assert len(svdq("fetch", "--all", "-o", tmp_path / "videos", "-v").stdout.splitlines()) == 21


def test_ids_of_any_program_may_be_shortened(svdq: Cli, storage: Storage, tmp_path: Path) -> None:
    uuid = "9713bc6c-4790-4e82-b933-a2f4f66af588"  # as RQ makes them
    ids = [add_video(storage, 1, name="a-cup"), add_video(storage, 2, name="a-cup", job_id=uuid)]
    for job_id in ids:
        assert svdq("fetch", job_id[:6], "--output", tmp_path / "videos").stdout.startswith(job_id)


def test_a_video_that_is_removed_meanwhile_leaves_no_part(storage: Storage, tmp_path: Path) -> None:
    ids = [add_video(storage, number) for number in (1, 2)]
    results = [result for job_id in ids for result in find_results(storage, job_ids=frozenset([job_id]))]
    fetched = fetch_all(storage, results, str(tmp_path / "videos"))
    assert next(fetched).job_id == ids[0]
    storage.remove(results[1].outputs[0])
    with pytest.raises(UnavailableError, match="cannot be used"):
        next(fetched)
    assert not [name for name in os.listdir(tmp_path / "videos") if ids[1] in name or name.startswith(".")]


def test_a_fetch_with_sound_that_was_killed_before_the_json_goes_on(storage: Storage, tmp_path: Path) -> None:
    stem = f"outputs/photo-{add_video(storage, 1)}"
    sidecar = json.loads(storage.read(f"{stem}.json"))
    storage.write_text(f"{stem}.json", json.dumps(sidecar | {"outputs": [f"{stem}.mp4", f"{stem}.wav"]}))
    storage.write_bytes(f"{stem}.wav", b"RIFF")
    for _ in range(2):
        [fetched] = fetch_all(storage, list(find_results(storage)), f"{tmp_path}/videos/{{photo}}")
        assert [path.name for path in fetched.paths] == ["photo.mp4", "photo.wav"]
        (tmp_path / "videos/photo.json").unlink()


def test_a_fetch_by_the_day_of_the_photo(storage: Storage, tmp_path: Path) -> None:
    for number, taken in enumerate(["2024-05-31T23:30:00+09:00", "2024-06-01T08:00:00", ""]):
        key = f"outputs/photo-{add_video(storage, number)}.json"
        storage.write_text(key, json.dumps(json.loads(storage.read(key)) | {"taken": taken}))
    list(fetch_all(storage, list(find_results(storage)), f"{tmp_path}/{{taken:%Y-%m}}/{{photo}}"))
    found = [name for name in under(tmp_path) if name.endswith("/photo.mp4")]
    assert found == ["2024-05/photo.mp4", "2024-06/photo.mp4", "undated/photo.mp4"]


@pytest.mark.parametrize("template", ["", "/{photo}"])
@pytest.mark.parametrize("kind", ["mp4", "gif", "webp", "png", "wav", "json", "link"])
def test_a_fetch_replaces_nothing(storage: Storage, tmp_path: Path, kind: str, template: str) -> None:
    job_id = add_video(storage, 1, formats=("mp4", "gif", "webp", "png"))
    key = f"outputs/photo-{job_id}"
    sidecar = json.loads(storage.read(f"{key}.json"))
    storage.write_bytes(f"{key}.wav", b"RIFF")
    storage.write_text(f"{key}.json", json.dumps(sidecar | {"outputs": [*sidecar["outputs"], f"{key}.wav"]}))
    stem = tmp_path / "videos" / ("photo" if template else f"photo-{job_id}")
    theirs = Path(f"{stem}/frame_0001.png" if kind == "png" else f"{stem}.{kind}")
    if kind == "link":
        theirs = Path(f"{stem}.mp4")
    theirs.parent.mkdir(parents=True)
    theirs.symlink_to(tmp_path / "nowhere") if kind == "link" else theirs.write_bytes(b"mine")
    for _ in range(2):
        [fetched] = fetch_all(storage, list(find_results(storage)), f"{tmp_path}/videos{template}")
        assert fetched.paths[0].name == f"{stem.name}-2.mp4"
        assert theirs.is_symlink() if kind == "link" else theirs.read_bytes() == b"mine"
        assert not os.path.lexists(tmp_path / "nowhere")
    assert under(tmp_path / "videos").count(f"{stem.name}.mp4") == (kind == "mp4")
    found = contents(tmp_path / "videos")
    for end in (".mp4", ".gif", ".webp", ".wav", ".json", "/frame_0001.png", "/frame_0002.png"):
        assert found[f"{stem.name}-2{end}"] == storage.read(f"{key}{end}")


def test_fetches_at_the_same_time_mix_no_files(storage: Storage, tmp_path: Path) -> None:
    """All videos have one name, and their files come in several formats."""
    kinds = (("mp4",), ("gif",), ("mp4", "png"), ("png",), ("gif", "mp4"))
    for number in range(15):
        add_video(storage, number, formats=kinds[number % len(kinds)], level=number)
    results = list(find_results(storage))
    output = f"{tmp_path}/videos/{{photo}}"
    with ThreadPoolExecutor(8) as pool:
        fetched = list(pool.map(lambda result: list(fetch_all(storage, [result], output)), results * 2))
    assert sorted(each.paths for [each] in fetched[:15]) == sorted(each.paths for [each] in fetched[15:])
    found = contents(tmp_path / "videos")
    for result in results:
        stems = [name[:-5] for name, data in found.items() if data == result.data]
        assert len(stems) == 1
        own = result.sidecar.key.removesuffix(".json")
        for entry in result.files:
            assert found[f"{stems[0]}{entry.key.removeprefix(own)}"] == storage.read(entry.key)
    assert len(found) == sum(len(result.files) + 1 for result in results)


def test_a_share_that_keeps_no_times_is_fetched_to(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, times: tuple[float, float]) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    add_video(storage, 1)
    monkeypatch.setattr(os, "utime", refuse)
    [fetched] = fetch_all(storage, list(find_results(storage)), str(tmp_path / "videos"))
    assert all(path.exists() for path in fetched.paths)


def test_fetch_tells_why_there_is_no_video(
    svdq: Cli, connection: redis.Redis, storage: Storage, tmp_path: Path
) -> None:
    image = f"inputs/{'0' * 64}.jpg"
    nothing = svdq("fetch", "--all", "-o", tmp_path / "videos")
    assert (nothing.returncode, (tmp_path / "videos").exists()) == (0, False)
    done_id = add_video(storage, 9)
    add(connection, f"{1:020x}", image)
    add(connection, f"{2:020x}", image, JobStatus.FINISHED)
    add(connection, f"{4:020x}", image, JobStatus.CANCELED)
    expected = {
        1: "it is queued; wait for it",
        2: "its files are not in the storage",
        3: "There is no job",
        4: "it is canceled; `svdq retry",
    }
    for number, words in expected.items():
        done = svdq("fetch", done_id, f"{number:020x}", "-o", tmp_path / "videos")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert words in done.stderr
    assert not (tmp_path / "videos").exists(), "nothing is fetched when one of them cannot be"


def test_fetch_wants_to_know_what_and_where_to(svdq: Cli, storage: Storage, tmp_path: Path) -> None:
    job_id = add_video(storage, 1)
    assert svdq("fetch", "-o", tmp_path / "videos").returncode == 2
    assert svdq("fetch", job_id, "--all", "-o", tmp_path / "videos").returncode == 2
    assert svdq("fetch", job_id).returncode == 2
    (tmp_path / "file").touch()
    done = svdq("fetch", job_id, "-o", tmp_path / "file/videos")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


#: What is wrong with a sidecar, and what makes it so.
BROKEN: dict[str, Callable[[dict], bytes]] = {
    "Invalid JSON": lambda document: b"",
    "svdq: Field required": lambda document: b"{}",
    "names no files": lambda document: json.dumps(document | {"outputs": []}).encode(),
    "names files of other videos": lambda document: json.dumps(document | {"outputs": ["/x/../a.mp4"]}).encode(),
    "not named after its job": lambda document: json.dumps(document | {"job_id": "x"}).encode(),
    "finished_at": lambda document: json.dumps(document | {"finished_at": "0001-01-01T00:00:00"}).encode(),
    "seconds.encode": lambda document: json.dumps(document | {"seconds": {"encode": "long"}}).encode(),
}


@pytest.mark.parametrize("reason", BROKEN)
def test_a_malformed_sidecar_is_reported_and_hinders_nothing(
    svdq: Cli, connection: redis.Redis, storage: Storage, root: Path, tmp_path: Path, reason: str
) -> None:
    bad, good = add_video(storage, 1), add_video(storage, 2)
    document = json.loads(storage.read(f"outputs/photo-{bad}.json"))
    storage.write_bytes(f"outputs/photo-{bad}.json", BROKEN[reason](document))
    commands = {
        "fetch": ["--all", "-o", tmp_path / "videos"],
        "gallery": [],
        "report": [],
        "prune": ["--older-than", "30d", "--dry-run"],
    }
    age(40, root)
    for command, arguments in commands.items():
        if command in ("gallery", "report"):
            storage.write_bytes("outputs/now", b"")
            for path in (root / "outputs").iterdir():
                os.utime(path)
        done = svdq(command, *arguments)
        assert done.returncode == 0, done.stderr
        assert f"outputs/photo-{bad}.json' does not say how a video was made (" in done.stderr
        assert reason.strip() in done.stderr
        assert done.stderr.count("\n") == 1
        assert "1 finished" in done.stdout or "1 video" in done.stdout or good in done.stdout, command
        age(40, root)
    assert under(tmp_path / "videos") == [f"photo-{good}.json", f"photo-{good}.mp4"]
    done = svdq("inspect", root / f"outputs/photo-{bad}.json")
    assert (done.returncode, done.stdout) in ((0, done.stdout), (2, ""))
    assert "Traceback" not in done.stderr


def test_jobs_that_were_enqueued_through_rq_are_found(
    svdq: Cli, connection: redis.Redis, storage: Storage, root: Path, tmp_path: Path
) -> None:
    """As docs/rq.md has it: the id is a UUID, and the result is kept for as long as RQ does."""
    job_id, forgotten = "6d9fbd0a-8f0a-4a6e-8b1b-0f5f1b0c9a11", "0b6d1c9e-52b2-4a62-9a38-6d9f0e1e7c22"
    queue = SvdqQueue("svdq-default", connection=connection)
    job = queue.enqueue(
        RENDER,
        kwargs={"job": SvdJob(image=image_of(b"1"), name="photo", seed=1).model_dump(mode="json")},
        job_id=job_id,
    )
    queue.remove(job)
    job.ended_at = datetime.now(UTC) - timedelta(minutes=20)
    job.save()
    job.set_status(JobStatus.FINISHED)
    queue.finished_job_registry.add(job, 500)
    for number, name in enumerate((job_id, forgotten)):
        add_video(storage, number, photo=str(number).encode(), job_id=name)
        storage.write_bytes(f"latents/{name}.safetensors", b"x")

    assert svdq("report").stdout.startswith("2 finished, 0 failed")
    assert json.loads(svdq("report", "--json").stdout)["jobs"][0]["id"] == job_id, "when it ended, Redis says"
    assert svdq("gallery").stdout == "gallery.html  2 videos, 0 failures\n"
    done = svdq("fetch", job_id, "-o", tmp_path / "videos")
    assert (done.returncode, done.stderr) == (0, "")
    assert under(tmp_path / "videos") == [f"photo-{job_id}.json", f"photo-{job_id}.mp4"]
    age(40, root)
    record_verdict(connection, [job_id], "keep")
    assert "Removed 1 video (3 files" in svdq("prune", "--older-than", "30d", "--yes").stdout
    assert under(root / "latents") == [f"{job_id}.safetensors"]
    record_verdict(connection, [job_id], None)
    assert "Removed 1 video, 1 photo (4 files" in svdq("prune", "--older-than", "30d", "--yes").stdout
    assert under(root / "outputs") + under(root / "latents") == []


# prune


def test_prune(svdq: Cli, connection: redis.Redis, settings: Settings, storage: Storage, root: Path) -> None:
    old = add_video(storage, 1, formats=("mp4", "png"), photo=b"of the old one alone")
    add_video(storage, 2, folder="holiday", photo=b"of an old and a new one")
    new = add_video(storage, 3, photo=b"of an old and a new one")
    again = add_video(storage, 4, photo=b"rendered again")
    failed = storage.put_input(b"of a failed job", "jpg")
    waiting = storage.put_input(b"of a job that waits", "jpg")
    orphan = storage.put_input(b"of nobody", "jpg")
    submitted_again = storage.put_input(b"submitted again just now", "jpg")
    image = image_of(b"rendered again")
    add(connection, old, image, JobStatus.FINISHED)
    add(connection, again, image)
    add(connection, f"{5:020x}", failed, JobStatus.FAILED)
    add(connection, f"{6:020x}", waiting)
    # Half done: one that waits to go on, and one that nobody knows.
    for number in (6, 7):
        (settings.home / f"checkpoints/{number:020x}").mkdir(parents=True)
        (settings.home / f"checkpoints/{number:020x}/3.safetensors").write_bytes(b"x" * 1000)
        storage.write_bytes(f"checkpoints/{number:020x}/3.safetensors", b"x" * 1000)
    upscaled = add_video(storage, 8, photo=b"upscaled later")
    later = JOB.model_copy(update={"finishes": f"photo-{upscaled}", "upscale": "2"})
    enqueue(connection, later, f"{10:020x}")
    for number in (1, 3, 11):  # of an old video, a new one, and none
        storage.write_bytes(f"latents/{number:020x}.safetensors", b"x")
    storage.write_bytes("outputs/by hand.txt", b"not ours")
    age(40, root, settings.home / "checkpoints")
    age(10, *(root / "outputs").glob(f"*{new}*"))
    assert storage.has_input(submitted_again)
    before = under(settings.home)

    done = svdq("prune", "--older-than", "30d")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "--yes" in done.stderr
    shown = svdq("prune", "--older-than", "30d", "--dry-run")
    assert shown.returncode == 0
    assert "Would remove 2 videos, 2 photos, 3 checkpoints (" in shown.stdout
    assert shown.stdout.count("\n") == 8
    assert under(settings.home) == before

    done = svdq("prune", "--older-than", "30d", "--yes")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == shown.stdout.splitlines()[-1].replace("Would remove", "Removed") + "\n"
    gone = set(before) - set(under(settings.home))
    assert {path for path in gone if "redis" not in path} == {
        *(f"storage/outputs/photo-{old}{end}" for end in (".json", ".mp4", "/frame_0001.png", "/frame_0002.png")),
        *(f"storage/outputs/holiday/photo-{2:020x}{end}" for end in (".json", ".mp4")),
        *(f"storage/latents/{number:020x}.safetensors" for number in (1, 11)),
        f"storage/{orphan}",
        f"storage/{image_of(b'of the old one alone')}",
        f"checkpoints/{7:020x}/3.safetensors",
        f"storage/checkpoints/{7:020x}/3.safetensors",
    }
    # What is forgotten with its files can be submitted again; the others are as they were.
    assert not connection.exists(f"rq:job:{old}")
    assert connection.zscore("rq:finished:svdq-default", old) is None
    assert connection.llen("rq:queue:svdq-default") == 3
    assert svdq("prune", "--older-than", "30d", "--yes").stdout == "There is nothing to remove.\n"


def test_prune_removes_only_what_svdq_has_made(
    svdq: Cli, connection: redis.Redis, settings: Settings, storage: Storage, root: Path, tmp_path: Path
) -> None:
    """`--output clip-$(date +%Y%m%d%H%M%S%6N)/` looks like the id of a job, and so do other things."""
    folder = "clip-20270131220000123456"
    old = add_video(storage, 1, folder=folder, formats=("png",), photo=b"old")
    waiting = add_video(storage, 2, folder=folder, photo=b"waiting")
    add(connection, waiting, image_of(b"waiting"))
    theirs = [
        f"outputs/{folder}/notes.txt",
        f"outputs/{folder}/photo-{old}/notes.txt",
        f"outputs/{folder}.mp4",
        f"outputs/photo-{9:020x}.mp4",
        "inputs/holiday.jpg",
        f"inputs/{'0' * 63}.jpg",
        "checkpoints/my model/100.safetensors",
        "latents/mine.safetensors",
        "latents/old/notes.txt",
        f"checkpoints/{'a' * 20}/weights.bin",
        "checkpoints/.git/config",
    ]
    for key in theirs:
        storage.write_bytes(key, b"mine")
    for job_id in (f"{7:020x}", "a-job-of-rq"):
        storage.write_bytes(f"checkpoints/{job_id}/100.safetensors", b"x")
    storage.write_bytes("checkpoints/a-job-of-rq/.svdq-storage", b"")
    (settings.home / "checkpoints/mine").mkdir(parents=True)
    (settings.home / "checkpoints/mine/1.safetensors").touch()
    age(40, root, settings.home / "checkpoints")

    assert svdq("fetch", "--all", "-o", tmp_path / "videos").stdout.count("\n") == 2
    done = svdq("prune", "--older-than", "30d", "--yes")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Removed 1 video, 1 photo, 2 checkpoints (")
    left = [f"outputs/{folder}/photo-{waiting}.{end}" for end in ("json", "mp4")]
    assert under(root) == sorted([*theirs, *left, image_of(b"waiting"), ".svdq-storage"])
    assert under(settings.home / "checkpoints") == ["mine/1.safetensors"]


@pytest.mark.usefixtures("connection")
def test_prune_refuses_a_folder_that_svdq_has_never_written_to(svdq: Cli, storage: Storage, root: Path) -> None:
    add_video(storage, 1)
    (root / MARKER).unlink()
    age(40, root)
    before = under(root)
    done = svdq("prune", "--older-than", "30d", "--yes")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert MARKER in done.stderr
    assert under(root) == before
    Storage(str(root)).write_text("outputs/new.txt", "")  # whoever goes on to use it has it marked
    assert "Removed 1 video" in svdq("prune", "--older-than", "30d", "--yes").stdout


def test_prune_refuses_another_redis_than_that_of_the_storage(
    svdq: Cli, connection: redis.Redis, storage: Storage, root: Path, photo: Path
) -> None:
    assert svdq("submit", photo).returncode == 0
    kept = add_video(storage, 1)
    record_verdict(connection, [kept], "keep")
    age(40, root)
    assert svdq("prune", "--older-than", "30d", "--yes").stdout == "There is nothing to remove.\n"
    connection.flushdb()
    before = under(root)
    for flag in ("--yes", "--dry-run"):
        done = svdq("prune", "--older-than", "30d", flag)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert "another Redis" in done.stderr
    assert svdq("submit", photo).returncode == 0  # names no other one
    assert svdq("prune", "--older-than", "30d", "--yes").returncode == 2
    assert under(root) == before
    marker = root / MARKER
    marker.write_text(marker.read_text().partition("redis: ")[0])
    assert "Removed 1 video" in svdq("prune", "--older-than", "30d", "--yes").stdout


def test_prune_asks_on_a_terminal(home: Path, storage: Storage, root: Path) -> None:
    add_video(storage, 1)
    age(3, root)
    for answer, is_left in ((b"n\n", True), (b"y\n", False)):
        with terminal("prune", "--older-than", "1d") as screen:
            os.write(screen.ours, answer)
            code = screen.end()
        assert "Remove 1 video, 1 photo (3 files, " in screen.text
        assert (code, (root / "outputs").exists() and bool(under(root / "outputs"))) == (
            (130, True) if is_left else (0, False)
        )


def test_files_that_came_into_use_since_they_were_found_are_kept(
    connection: redis.Redis, storage: Storage, root: Path
) -> None:
    """The user takes a while to answer, and the world goes on."""
    queued_again, rendered_again = add_video(storage, 1, photo=b"1"), add_video(storage, 2, photo=b"2")
    add_video(storage, 3, photo=b"3")
    photo = storage.put_input(b"of nobody", "jpg")
    age(40, root)
    found = find_removals(connection, storage, Storage(str(root / "home")), timedelta(days=30), datetime.now(UTC))
    assert [removal.kind for removal in found] == ["video"] * 3 + ["photo"] * 4
    add(connection, queued_again, image_of(b"1"))
    storage.remove(f"outputs/photo-{queued_again}.json")  # as `svdq retry --force` does
    add_video(storage, 2, photo=b"2")
    assert storage.has_input(photo)
    removed = remove_all(connection, found)
    assert sorted(removal.job_id for removal in removed if removal.kind == "video") == [f"{3:020x}"]
    assert storage.exists(photo)
    assert storage.exists(image_of(b"1"))
    assert storage.exists(f"outputs/photo-{queued_again}.mp4")
    assert storage.exists(f"outputs/photo-{rendered_again}.json")
