"""The page's own views, without a browser: the form, the list of results, actions, zips and the live stream."""

import base64
import gzip
import http.client
import io
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from PIL import ExifTags, Image

from svdq.cli.serve.page import STATIC
from svdq.pipeline.models.families import published_model
from svdq.pipeline.models.wan.family import MODELS
from svdq.producer import keys
from svdq.producer.pauses import is_freed, pause, resume
from svdq.producer.queue import fetch, read_arguments, read_job
from svdq.producer.records import LOCATION_NOTE
from svdq.producer.status.job_view import view
from svdq.producer.status.ranks import IntakeStatus
from svdq.producer.storage.storage import Storage
from tests.cli.serve.ended import finish
from tests.cli.serve.servers import TYPE, Answer, Serve, Server, multipart
from tests.queued import JOB, SvdJob, enqueue, fail
from tests.ranks import rank, save
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


def job(number: int) -> SvdJob:
    return JOB.model_copy(update={"name": f"photo {number}", "seed": number})


def act(server: Server, action: str, *ids: str) -> dict[str, str]:
    answer = server.ask("POST", "/page/actions", {"action": action, "ids": list(ids)})
    assert answer.status == 200, answer.body
    return answer.json["problems"]


def upload(server: Server, photo: Path, **fields: str) -> Answer:
    body = multipart(photo.read_bytes(), photo.name, **fields)
    return server.ask("POST", "/page/photos", body, {**server.bearer, "Content-Type": TYPE})


def test_the_form_has_every_parameter_of_the_job(server: Server) -> None:
    html = server.get("/").body.decode()
    for name in ("width", "steps", "seed", "decode_chunk_size", "max_guidance_scale"):
        assert re.search(rf'name="{name}"', html)
    assert 'data-checks="formats" data-default="mp4"' in html
    assert html.count('value="wav"') == 1  # LTX-2's
    width = re.search(r'<input type="number" id="svd-width"[^>]*>', html)
    assert width is not None
    for attribute in ('value="1024"', 'min="64"', 'max="4096"', 'step="64"'):
        assert attribute in width[0]
    assert 'id="wan-prompt"' in html  # the preview makes videos of all families
    assert not re.search(r"<script(?! type=\"module\" src)|<style|\sstyle=|\son\w+=", html)


def test_the_defaults_of_a_running_model_file_fill_the_form_and_the_jobs(
    server: Server, connection: redis.Redis, photo: Path
) -> None:
    facts = published_model("svd").facts | {"defaults": {"motion_bucket_id": 60, "width": 512, "height": 256}}
    save(connection, rank(0, num_ranks=1, model="svd-calm", family="svd", facts=facts))
    html = server.get("/").body.decode()
    assert re.search(r'id="svd-motion_bucket_id" name="motion_bucket_id" value="60"', html)
    assert '<option value="512x256" selected>' in html
    assert [model["id"] for model in server.get("/v1/models").json["data"]] == ["svd-calm"]
    (made,) = upload(server, photo, family="svd").json["jobs"]
    assert view(connection, made["id"]).parameters["motion_bucket_id"] == 60


def test_the_page_makes_the_jobs_of_svdq_submit(server: Server, svdq, photo: Path) -> None:
    fields = {"family": "svd", "frames": "5", "steps": "3", "variations": "3", "folder": "holiday"}
    jobs = upload(server, photo, **fields).json["jobs"]
    assert [each["is_new"] for each in jobs] == [True] * 3
    said = svdq(
        "submit", photo, "--frames", 5, "--steps", 3, "--variations", 3, "--output", "holiday", "--json"
    ).stdout.splitlines()
    assert [json.loads(line)["id"] for line in said] == [each["id"] for each in jobs]
    assert not any(each["is_new"] for each in upload(server, photo, **fields).json["jobs"])


def test_the_page_takes_the_template_of_svdq_submit(
    server: Server, photo: Path, connection: redis.Redis, tmp_path: Path
) -> None:
    gps = Image.Exif()
    gps.get_ifd(ExifTags.IFD.GPSInfo).update({1: "N", 2: (48.0, 8.0, 0.0), 3: "E", 4: (11.0, 0.0, 0.0)})
    with Image.open(photo) as image:
        image.save(tmp_path / "with place.jpg", exif=gps)
    fields = {"family": "svd", "folder": "trip/{photo}-{frames}", "frames": "5", "below": "day {1}"}
    for more, kept in (({}, False), ({"keep_location": "yes", "steps": "3"}, True)):
        (made,) = upload(server, tmp_path / "with place.jpg", **fields, **more).json["jobs"]
        job = fetch(connection, made["id"])
        assert read_job(job).output_stem("") == "outputs/trip/day {1}/with place-5-"
        assert (read_arguments(job).notes.get(LOCATION_NOTE) == "48.13333,11.00000") is kept
    again = server.ask("POST", "/page/repeat", {"id": made["id"], "changes": {}})
    assert (again.status, again.json.get("is_new")) == (200, True), again.body
    assert view(connection, again.json["id"]).parameters["folder"] == "trip/day {1}"
    refused = upload(server, photo, **fields | {"below": "../.."})
    assert (refused.status, "is not inside the storage's outputs/" in refused.error["message"]) == (400, True)


def test_the_page_makes_chains_and_names_their_links(server: Server, photo: Path, connection: redis.Redis) -> None:
    fields = {"family": "wan", "prompt": "A", "then": "B\r\nC"}
    jobs = [view(connection, each["id"]) for each in upload(server, photo, **fields).json["jobs"]]
    assert [(job.prompt, job.link) for job in jobs] == [("A", "1 of 3"), ("B", "2 of 3"), ("C", "3 of 3")]
    assert server.get(f"/page/results/{jobs[1].id}").json["name"] == "a photo (link 2 of 3)"


def test_the_page_says_that_no_worker_takes_a_last_frame(server: Server, photo: Path, connection: redis.Redis) -> None:
    save(
        connection,
        rank(0, num_ranks=1, model="ti2v", family="wan", facts=MODELS["Wan-AI/Wan2.2-TI2V-5B-Diffusers"].facts),
    )
    for answer in (
        upload(server, photo, family="wan", loop="yes"),
        server.get("/page/estimate?family=wan&loop=yes"),
    ):
        says = "Loop does not apply to the workers' model, which takes no last frame; "
        assert (answer.status, answer.error["message"].startswith(says)) == (400, True)


def test_loras_of_workers_are_chosen_on_the_page_and_by_clients(
    server: Server, photo: Path, connection: redis.Redis
) -> None:
    assert 'name="loras"' not in server.get("/").body.decode()
    loras = {"anime/line": "a" * 16, "style_high": "b" * 16, "style_low": "c" * 16}
    save(connection, rank(0, num_ranks=1, intake=IntakeStatus(worker="w", loras=loras)))
    html = server.get("/").body.decode()
    assert re.search(r'<input type="text" id="wan-loras" name="loras" list="wan-loras-known"', html)
    assert '<option value="anime/line"></option>' in html

    assert server.get("/page/estimate?family=wan&loras=style:0.7").status == 200

    def names(job_id: str) -> list[str]:
        found = view(connection, job_id).parameters.get("loras", ())
        return [f"{each.get('expert') or ''} {each['name']} {each['strength']} {each['digest'][0]}" for each in found]

    answer = upload(server, photo, family="wan", loras="style:0.7; line")
    wanted = [" anime/line 1.0 a"]
    both = ["high style_high 0.7 b", "low style_low 0.7 c"]
    assert names(answer.json["jobs"][0]["id"]) == both + wanted
    repeated = server.ask(
        "POST", "/page/repeat", {"id": answer.json["jobs"][0]["id"], "changes": {"loras": "line:0.5"}}
    )
    assert repeated.status == 200, repeated.body
    wrong = upload(server, photo, loras="nothing")
    assert (wrong.status, "There is no LoRA 'nothing'" in wrong.json["error"]["message"]) == (400, True)

    url = f"data:image/jpeg;base64,{base64.b64encode(photo.read_bytes()).decode()}"
    for given, expected in (
        ({"lora": {"name": "line", "scale": 0.5, "int_id": 3}}, [" anime/line 0.5 a"]),
        ({"lora": {"name": "any", "local_path": "/models/loras/line.safetensors"}}, wanted),
        ({"extra_params": {"loras": ["style:0.7", "line"]}}, both + wanted),
        ({"loras": "line"}, wanted),
    ):
        made = server.ask("POST", "/v1/videos", {"input_reference": url, "seed": 5} | given)
        assert made.status == 200, made.body
        assert names(made.json["id"]) == expected
    for bad in ({"lora": {"path": "x"}}, {"loras": 3}, {"loras": "nothing"}):
        answer = server.ask("POST", "/v1/videos", {"input_reference": url} | bad)
        assert (answer.status, answer.json["error"]["param"]) == (400, next(iter(bad)))
        assert answer.json["error"]["message"].endswith(".")


def test_a_video_and_its_repetition_know_the_folder_of_their_photo(
    server: Server, photo: Path, connection: redis.Redis
) -> None:
    (first,) = upload(server, photo, source="holiday/day 1/a photo.jpg").json["jobs"]
    again = server.ask("POST", "/page/repeat", {"id": first["id"], "changes": {}}).json
    assert [view(connection, each["id"]).source for each in (first, again)] == ["holiday/day 1/a photo.jpg"] * 2
    (other,) = upload(server, photo, source="x" * 100_000, steps="2").json["jobs"]
    assert len(view(connection, other["id"]).source) == 1000


def test_a_portrait_is_cropped_with_a_warning_or_gets_its_shape(
    server: Server, tmp_path: Path, connection: redis.Redis
) -> None:
    portrait = tmp_path / "tall.png"
    Image.new("RGB", (200, 320)).save(portrait)
    (cropped,) = upload(server, portrait).json["jobs"]
    assert cropped["warning"] == "crop removes 65% of the photo's height"
    by_api = server.create(portrait.read_bytes(), seed=3).json
    assert "Crop removes 65%" in by_api["svdq"]["notice"]
    assert server.get(f"/v1/videos/{by_api['id']}").json["svdq"]["notice"] is None
    (shaped,) = upload(server, portrait, auto_size="yes").json["jobs"]
    assert shaped["warning"] == ""
    parameters = view(connection, shaped["id"]).parameters
    assert 0.5 < parameters["width"] / parameters["height"] < 0.75


def test_wrong_settings_are_sentences(server: Server, photo: Path, storage: Storage) -> None:
    for name, value, sentence in (
        ("frames", "0", "Frames 0 is not allowed"),
        ("width", "100", "the nearest such size is 128x576"),
        ("variations", "0", "ask for 1 to 10,000"),
        ("priority", "soon", "There is no priority 'soon'"),
        ("at", "yesterday", "Time 'yesterday' is not a time"),
        ("folder", "../up", "is not inside the storage's outputs/"),
        ("nonsense", "1", "There is no setting 'nonsense'"),
    ):
        for answer in (upload(server, photo, **{name: value}), server.get(f"/page/estimate?{name}={value}")):
            assert (answer.status, sentence in answer.error["message"]) == (400, True), answer.body
    assert list(storage.entries("inputs")) == []


def test_the_estimate_without_a_worker_says_why(server: Server) -> None:
    expected = {"eta_s": None, "reason": "No worker is running.", "bytes": None}
    assert server.get("/page/estimate?num_videos=3").json == expected
    assert server.get("/page/estimate?num_videos=lots").status == 400


def test_the_estimate_before_the_first_video_is_by_published_times(server: Server, connection: redis.Redis) -> None:
    facts = dict(MODELS["Wan-AI/Wan2.2-I2V-A14B-Diffusers"].facts)
    who = {"family": "wan", "model": "wan2.2-4step", "facts": facts, "num_ranks": 1, "published_step_s": 30.5}
    save(connection, rank(0, intake=IntakeStatus(worker="w", round_size=2), **who))
    found = server.get("/page/estimate?family=wan&num_videos=300").json
    assert found["eta_s"] == pytest.approx(300 * (40 + 0.9) * 30.5 * 1.05)
    assert found["reason"].startswith("By published times")


def pages(server: Server, show: str = "open") -> list[dict[str, Any]]:
    """Return all pages of the list of results, together."""
    found, before = [], ""
    while before is not None:
        page = server.get(f"/page/results?show={show}&before={before}").json
        found += page["results"]
        before = page["next"]
    return found


def test_results_come_in_pages_the_newest_first(server: Server, connection: redis.Redis, storage: Storage) -> None:
    # Many of the same second, in all queues: the order within it is that of the ids.
    priorities = ("high", "default", "low")
    ids = [
        finish(connection, storage, number, at=1_700_000_000 + number // 25, priority=priorities[number % 3])
        for number in range(101)
    ]
    gone = sorted([ids.pop(80), ids.pop()])  # expired, but still in its list
    for job_id in gone:
        connection.delete(f"rq:job:{job_id}")
    found = [each["id"] for each in pages(server)]
    assert found[:99] == ids[::-1]
    assert sorted(found[99:]) == gone  # in the storage


def test_videos_outlive_the_records_of_their_jobs(server: Server, connection: redis.Redis, storage: Storage) -> None:
    kept, other = [finish(connection, storage, number, name=f"Old {number}") for number in range(2)]
    act(server, "keep", kept)
    for key in connection.scan_iter("rq:*"):
        connection.delete(key)
    recent = finish(connection, storage, 2, name="New")
    newest, *others = [each["name"] for each in pages(server)]
    assert (newest, sorted(others)) == ("New", ["Old 0", "Old 1"])
    assert [each["name"] for each in pages(server, "keep")] == ["Old 0"]
    assert pages(server, "failed") == []
    for job_id in (kept, other, recent):
        assert server.get(f"/page/picture/{job_id}").headers["content-type"] == "image/jpeg"
        assert server.get(f"/page/content/{job_id}?format=gif").body.startswith(b"GIF")
    zipped = server.ask("POST", "/page/zip", f"ids={kept},{recent}", form_headers(server))
    assert len(zipfile.ZipFile(io.BytesIO(zipped.body)).namelist()) == 2
    again = server.ask("POST", "/page/repeat", {"id": kept, "changes": {"steps": "9"}}).json
    assert view(connection, again["id"]).parameters["steps"] == 9
    assert act(server, "delete", other) == {}
    assert act(server, "keep", other, recent) == {other: "The video was removed."}
    assert [each["name"] for each in pages(server, "keep")] == ["New", "Old 0"]


def test_results_by_verdict(server: Server, connection: redis.Redis, storage: Storage) -> None:
    ids = [finish(connection, storage, number, name=f"Café {number}") for number in range(3)]
    fail(enqueue(connection, job(9), "f" * 20), "x.SampleError: It is broken.", at=1_800_000_000)
    assert act(server, "keep", ids[0]) == {}
    assert act(server, "reject", ids[1]) == {}

    def shown(show: str) -> list[str]:
        return [each["name"] for each in server.get(f"/page/results?show={show}").json["results"]]

    assert shown("open") == ["photo 9", "Café 2", "Café 0"]
    assert [shown(show) for show in ("new", "keep", "reject", "failed")] == [
        ["Café 2"],
        ["Café 0"],
        ["Café 1"],
        ["photo 9"],
    ]
    assert act(server, "unmark", ids[0]) == {}
    assert shown("keep") == []
    assert server.get("/page/results?show=odd").status == 400
    assert server.get("/page/results?before=odd").status == 400
    failure = server.get("/page/results?show=failed").json["results"][0]
    assert (failure["error"], failure["is_there"]) == ("It is broken.", False)


def test_a_photo_whose_name_is_not_valid_unicode(server: Server, connection: redis.Redis) -> None:
    fail(enqueue(connection, job(9), "f" * 20))
    record = fetch(connection, "f" * 20)
    record.kwargs = {**record.kwargs, "photo": "/photos/caf\udce9.jpg"}  # of a system with another encoding
    record.save()
    [result] = server.get("/page/results?show=failed").json["results"]
    assert result["photo_name"] == "caf\udce9.jpg"


def test_actions_on_jobs(server: Server, connection: redis.Redis) -> None:
    for number in range(3):
        enqueue(connection, job(number), f"{number}" * 20)
    enqueue(connection, job(3), "3" * 20, "low")
    assert act(server, "front", "3" * 20) == {}
    assert connection.lrange("rq:queue:svdq-default", 0, 0) == [b"3" * 20]
    assert act(server, "cancel", "1" * 20, "nobody") == {"nobody": "The video was removed."}
    assert act(server, "cancel", "1" * 20) == {"1" * 20: '"photo 1" is canceled: it has ended already.'}
    assert view(connection, "1" * 20).status == "canceled"
    assert act(server, "pause") == {}
    assert connection.exists("rq:suspended")
    assert act(server, "free") == {}
    assert is_freed(connection, "anywhere")
    state = next(states(server))
    assert (state["paused"], state["freed"]) == (True, True)
    assert state["warnings"][0] == "Paused: the GPUs are left to other programs until you press Resume."
    assert act(server, "resume") == {}
    assert not connection.exists("rq:suspended")
    assert next(states(server))["freed"] is False
    assert act(server, "cancel-waiting") == {}
    assert [view(connection, f"{number}" * 20).status for number in range(4)] == ["canceled"] * 4
    assert act(server, "retry", "0" * 20) == {}
    assert view(connection, "0" * 20).status == "queued"


def test_wrong_actions_are_refused(server: Server) -> None:
    for body in ({}, {"action": "fly"}, *({"action": "cancel", "ids": ids} for ids in (["a b:*"], ["a"] * 10_001))):
        answer = server.ask("POST", "/page/actions", body)
        assert (answer.status, answer.error["message"][-1]) == (400, ".")


def test_a_video_is_repeated_with_a_new_seed_or_one_changed_value(
    server: Server, connection: redis.Redis, storage: Storage
) -> None:
    first = finish(connection, storage, 7, name="Sea", priority="high")

    def repeat(**changes: str):
        return server.ask("POST", "/page/repeat", {"id": first, "changes": changes})

    again = view(connection, repeat().json["id"])
    assert (again.name, again.queue, again.parameters["steps"]) == ("Sea", "svdq-high", 4)
    assert again.parameters["seed"] != 7
    changed = view(connection, repeat(steps="9").json["id"])
    assert (changed.parameters["seed"], changed.parameters["steps"]) == (7, 9)
    assert repeat(steps="9").json["is_new"] is False
    by_seed = view(connection, repeat(seed="8").json["id"])
    assert by_seed.parameters["seed"] == 8
    refused = repeat(steps="0")
    assert (refused.status, "Steps 0 is not allowed" in refused.error["message"]) == (400, True)
    assert repeat(wings="2").status == 400
    storage.remove(again.parameters["image"])
    assert "add it again" in repeat().error["message"]


def test_a_zip_has_the_files_of_the_chosen_videos(server: Server, connection: redis.Redis, storage: Storage) -> None:
    ids = [
        finish(connection, storage, 1, name="Été", formats=("gif", "png")),
        finish(connection, storage, 2, name="v1.2", formats=("png",)),
    ]
    enqueue(connection, job(3), "3" * 20)
    answer = server.ask("POST", "/page/zip", f"ids={','.join([*ids, '3' * 20, 'nobody'])}", form_headers(server))
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/zip"
    archive = zipfile.ZipFile(io.BytesIO(answer.body))
    assert archive.testzip() is None
    assert sorted(archive.namelist()) == [
        *(f"v1.2-{ids[1]}/frame_000{number}.png" for number in (1, 2)),
        f"Été-{ids[0]}.gif",
        *(f"Été-{ids[0]}/frame_000{number}.png" for number in (1, 2)),
    ]
    gone = server.ask("POST", "/page/zip", f"ids={'3' * 20}", form_headers(server))
    assert (gone.status, gone.error["code"]) == (404, "not_found")


def test_an_unknown_video_has_no_picture(server: Server) -> None:
    for job_id in ("nobody", "..", "a%20b", "x:executions"):
        assert server.get(f"/page/picture/{job_id}").status == 404


def form_headers(server: Server) -> dict[str, str]:
    return {**server.bearer, "Content-Type": "application/x-www-form-urlencoded"}


def states(server: Server) -> Iterator[dict[str, object]]:
    """Yield the states that a page puts together from what has changed."""
    state: dict[str, object] = {}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", "/page/events", headers=server.bearer)
    response = connection.getresponse()
    assert response.status == 200
    try:
        while line := response.readline():
            if line.startswith(b"data: "):
                state = state | json.loads(line.removeprefix(b"data: "))
                yield state
    finally:
        connection.close()


def test_the_stream_shows_what_waits(server: Server, connection: redis.Redis) -> None:
    enqueue(connection, job(1), "1" * 20)
    stream = states(server)
    first = next(stream)
    assert [(row["name"], row["state"]) for row in first["rows"]] == [("photo 1", "next")]
    assert first["warnings"] == ["No worker is running, so the videos wait. Start one with `svdq worker`."]
    enqueue(connection, job(2), "2" * 20, "high")
    names: list[str] = []
    while names != ["photo 2", "photo 1"]:
        names = [row["name"] for row in next(stream)["rows"]]


def test_the_stream_says_that_a_group_has_paused_itself(server: Server, connection: redis.Redis) -> None:
    connection.hset(keys.PAUSES, "svdq-a-1-x", "3 jobs failed.")
    connection.hset("rq:worker:svdq-a-1-x", "birth", "…")  # it lives
    state = next(states(server))
    assert state["warnings"] == ["Paused: svdq-a-1-x: 3 jobs failed. Fix the cause, then press Resume."]
    assert state["paused"] is True  # else the button says Pause
    assert act(server, "resume") == {}
    assert next(states(server))["paused"] is False
    assert act(server, "pause") == {}
    state = next(states(server))
    assert (state["paused"], len(state["warnings"])) == (True, 1)


def test_the_stream_says_how_webhooks_are_refused(server: Server, connection: redis.Redis) -> None:
    connection.xadd(keys.WEBHOOKS, {"type": "video.created", "id": "a"})
    connection.set(keys.WEBHOOKS_REFUSAL, "was answered with 401")
    [warning] = next(states(server))["warnings"]
    assert re.fullmatch(
        r"1 webhook not accepted, the oldest since \d\d:\d\d: the last attempt was answered with 401\.", warning
    )


def test_queue_counts_no_jobs_while_intake_is_paused(server: Server, connection: redis.Redis) -> None:
    enqueue(connection, job(1), "1" * 20)
    enqueue(connection, job(2), "2" * 20, "high")
    wait_until(lambda: server.get("/queue").json == {"waiting": 2})
    pause(connection)
    wait_until(lambda: server.get("/queue").json == {"waiting": 0})
    resume(connection)
    connection.hset(keys.PAUSES, keys.BURSTS, "3 jobs failed.")
    assert server.get("/queue").json == {"waiting": 0}
    assert server.ask("GET", "/queue", headers={}).status == 401


def test_the_stream_goes_on_when_the_storage_cannot_be_used(serve: Serve, connection: redis.Redis) -> None:
    server = serve(SVDQ_STORAGE=f"/tmp/{'too long' * 99}")
    state = next(states(server))
    assert state["disk"] == {}
    assert state["warnings"] == ["The storage of photos and videos cannot be used (File name too long)."]


def test_the_stream_says_that_redis_is_away(serve: Serve, own_server: Path, svdq) -> None:
    server = serve(SVDQ_REDIS_URL="redis://127.0.0.1:1/0")
    state = next(states(server))
    assert state == {"outage": "The queue cannot be reached: Redis does not answer. Try again in a few seconds."}
    assert server.get("/").status == 200


def test_the_stream_does_not_repeat_what_is_unchanged(server: Server, connection: redis.Redis) -> None:
    for number in range(100):
        enqueue(connection, job(number), f"waits-{number}")
    page = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    page.request("GET", "/page/events", headers=server.bearer)
    stream = page.getresponse()
    sizes: list[int] = []
    while len(sizes) < 4:
        line = stream.readline()
        if line.startswith(b"data: "):
            sizes.append(len(line))
    page.close()
    assert sizes[0] > 10_000
    assert max(sizes[2:]) < 500


def test_static_files_are_compressed_and_kept_by_browsers(server: Server) -> None:
    html = server.get("/").body.decode()
    [script] = re.findall(r'<script type="module" src="([^"]+)"', html)
    assert script.startswith(STATIC)
    answer = server.get(script.replace("main.js", "results.js"), **{"Accept-Encoding": "gzip"})
    assert "immutable" in answer.headers["Cache-Control"]
    assert answer.headers["Content-Encoding"] == "gzip"
    assert b"export" in gzip.decompress(answer.body)


def test_kept_videos_are_queued_to_be_upscaled(server: Server, connection: redis.Redis, storage: Storage) -> None:
    kept, other, gif = (
        finish(connection, storage, number, name=f"cup{number}", formats=(kind,))
        for number, kind in ((1, "mp4"), (2, "mp4"), (3, "gif"))
    )
    act(server, "keep", kept, gif)
    problems = act(server, "upscale", kept, other, gif)
    assert problems.keys() == {other, gif}
    assert problems[other] == "Only kept videos are upscaled."
    assert problems[gif].startswith(f"The video 'cup3' ({gif}) has neither an mp4 nor kept latents; submit its photo")
    [waiting] = server.get("/page/waiting").json["ids"]
    assert view(connection, waiting).parameters.items() >= {"upscale": "2", "finishes": f"cup1-{kept}"}.items()
    assert act(server, "upscale", kept) == {}
    assert server.get("/page/waiting").json["ids"] == [waiting]
