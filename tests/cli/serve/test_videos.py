"""`/v1/videos`: create, retrieve, list, delete and remix, without a worker."""

import base64
import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import redis
import rq
from rq.job import JobStatus

from svdq.cli.serve.backend import FRESH_S
from svdq.cli.serve.bodies import UNQUOTED_BYTES, URLENCODED
from svdq.producer.queue import fetch, read_job
from svdq.producer.settings import Settings
from svdq.producer.status.job_view import view
from svdq.producer.status.ranks import IntakeStatus
from svdq.producer.storage.storage import Storage
from tests.cli.serve.servers import BOUNDARY, TYPE, Server, jpeg, multipart
from tests.conftest import Cli
from tests.ranks import COSTS, rank, save
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def data(photo: Path) -> bytes:
    return photo.read_bytes()


def data_url(data: bytes) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(data).decode()


def test_create_and_retrieve(server: Server, data: bytes, settings: Settings) -> None:
    answer = server.create(data, prompt="a dog", seconds=2, size="576x320", seed=7)
    assert answer.status == 200, answer.body
    video = answer.json
    assert video["object"] == "video"
    assert (video["status"], video["progress"], video["size"], video["seconds"]) == ("queued", 0, "576x320", "2")
    assert (video["model"], video["prompt"], video["error"]) == ("preview", "a dog", None)
    assert video["svdq"]["seed"] == 7
    assert video["svdq"]["ignored"] == ["prompt"]
    assert "ignored" in video["svdq"]["notice"]
    assert video["svdq"]["parameters"]["frames"] == 14
    assert server.get(f"/v1/videos/{video['id']}").json["id"] == video["id"]


def test_the_command_line_and_json_give_the_same_job(
    server: Server, data: bytes, svdq: Cli, photo: Path, connection: redis.Redis
) -> None:
    made = [
        server.create(data, file_name="x/../../other name.png").json["id"],
        server.ask("POST", "/v1/videos", {"prompt": "", "input_reference": data_url(data)}).json["id"],
        server.ask("POST", "/v1/videos", {"input_reference": {"image_url": data_url(data)}}).json["id"],
        svdq("submit", photo, "--json").stdout.partition('"id": "')[2][:20],
    ]
    assert len(set(made)) == 1
    assert view(connection, made[0]).name == "other name"

    flags = ("--frames", "20", "--steps", "3", "--size", "320x320", "--seed", "5", "--motion-bucket-id", "9")
    more = (*flags, "--output", "trip/day 1", "--name", "x-{seed}", "--format", "gif", "--format", "mp4")
    [line] = svdq("submit", photo, *more, "--json").stdout.splitlines()
    common = {"num_frames": 20, "num_inference_steps": 3, "seed": 5, "name": "x-{seed}"}
    more = {"extra_params[motion_bucket_id]": "9", "extra_params[output]": "trip/day 1", "formats[]": "gif mp4"}
    by_form = server.create(data, **common, **more, size="320x320").json["id"]
    assert by_form in line
    extra = {"motion_bucket_id": 9, "output": "trip/day 1", "formats": ["gif", "mp4"]}
    body = {**common, "width": 320, "height": 320, "extra_params": extra, "input_reference": data_url(data)}
    assert server.ask("POST", "/v1/videos", body).json["id"] == by_form


def test_a_family_with_prompts(server: Server, data: bytes, svdq: Cli, photo: Path) -> None:
    prompt = "a dog, running — 犬"
    answer = server.create(data, family="wan", prompt=prompt, seconds=2, guidance_scale=3, seed=1)
    assert answer.status == 200, answer.body
    video = answer.json
    assert (video["prompt"], video["svdq"]["ignored"], video["size"]) == (prompt, [], "auto")
    assert video["svdq"]["parameters"]["frames"] == 33  # 1 more than a multiple of 4
    flags = ["--family", "wan", "--frames", "33", "--fps", "16", "--guidance-scale", "3", "--seed", "1", "--json"]
    assert video["id"] in svdq("submit", photo, "--prompt", prompt, *flags).stdout
    again = server.ask("POST", f"/v1/videos/{video['id']}/remix", {"prompt": "a cat"}).json
    assert (again["prompt"], again["svdq"]["parameters"]["family"]) == ("a cat", "wan")


def test_a_prompt_is_for_a_model_that_takes_one_where_such_a_one_runs(
    server: Server, data: bytes, connection: redis.Redis
) -> None:
    for family in ("svd", "ltx"):
        save(connection, rank(0, family, num_ranks=1, model=f"/models/my-{family}", family=family))
    wait_until(lambda: len(server.get("/v1/models").json["data"]) == 2)
    told, plain = (server.create(data, prompt=prompt, seed=1).json for prompt in ("It rains.", ""))
    assert (told["svdq"]["parameters"]["family"], told["model"], told["prompt"]) == ("ltx", "my-ltx", "It rains.")
    assert (told["svdq"]["ignored"], told["svdq"]["notice"]) == ([], None)
    assert plain["model"] == "my-svd"
    assert plain["svdq"]["ignored"] == [], "it is empty"
    says = "for Stable Video Diffusion, the default: the workers do not all have models of one known family."
    assert says in plain["svdq"]["notice"]
    alone = server.ask("POST", "/v1/videos", {"prompt": "It rains."})
    assert (alone.status, alone.error["param"], alone.error["code"]) == (400, "input_reference", "missing_parameter")
    assert "not of a prompt alone" in alone.error["message"]


def test_a_last_frame(
    server: Server, data: bytes, svdq: Cli, photo: Path, tmp_path: Path, settings: Settings, connection: redis.Redis
) -> None:
    last = tmp_path / "last.jpg"
    last.write_bytes(jpeg(5, 0.1))
    answer = server.create(data, last_reference=last.read_bytes())
    assert answer.status == 200, answer.body
    video = answer.json
    assert video["svdq"]["parameters"]["family"] == "wan"
    body = {"input_reference": data_url(data), "last_reference": {"image_url": data_url(last.read_bytes())}}
    assert server.ask("POST", "/v1/videos", body).json["id"] == video["id"]
    assert video["id"] in svdq("submit", photo, "--last", last, "--json").stdout
    again = server.ask("POST", f"/v1/videos/{video['id']}/remix", {"prompt": "It opens."}).json
    jobs = [read_job(fetch(connection, made["id"])) for made in (video, again)]
    assert jobs[0].photos == jobs[1].photos
    assert Path(settings.storage, jobs[0].photos[1]).read_bytes() == last.read_bytes()


def test_a_request_for_a_video_that_is_being_deleted_makes_it_anew(
    server: Server, data: bytes, connection: redis.Redis
) -> None:
    video_id = server.create(data).json["id"]
    job = fetch(connection, video_id)
    connection.lrem("rq:queue:svdq-default", 1, video_id)
    job.set_status(JobStatus.STARTED)
    connection.zadd(f"rq:executions:{video_id}", {"e": time.time() + 60})  # a group has it
    assert server.ask("DELETE", f"/v1/videos/{video_id}").json["deleted"]
    assert server.get(f"/v1/videos/{video_id}").status == 404  # for whoever has deleted it
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.create, data)
        connection.delete(f"rq:executions:{video_id}")  # as the group does after its current step
        job.set_status(JobStatus.STOPPED)
        again = answer.result(60).json
    assert (again["id"], again["svdq"]["existing"], again["status"]) == (video_id, False, "queued")


def test_a_plain_request_asks_for_a_scheduled_video_now(server: Server, data: bytes, connection: redis.Redis) -> None:
    later = server.create(data, at="+2h", priority="high").json
    assert (later["status"], later["svdq"]["status"], later["svdq"]["priority"]) == ("queued", "scheduled", "high")
    assert later["svdq"]["at"]
    assert server.create(data, at="+3h").json["svdq"]["status"] == "scheduled"
    now = server.create(data).json
    assert (now["id"], now["svdq"]["status"], now["svdq"]["existing"]) == (later["id"], "queued", True)
    assert connection.lrange("rq:queue:svdq-high", 0, -1) == [now["id"].encode()]
    assert connection.zcard("rq:scheduled:svdq-high") == 0


def test_the_same_request_again(server: Server, data: bytes) -> None:
    first = server.create(data, prompt="a dog").json
    again = server.create(data, prompt="a cat").json
    assert (first["svdq"]["existing"], again["svdq"]["existing"]) == (False, True)
    assert (again["id"], again["prompt"]) == (first["id"], "a cat")
    assert "this prompt was not recorded" in again["svdq"]["notice"]
    assert server.create(data).json["prompt"] is None
    assert server.get(f"/v1/videos/{first['id']}").json["prompt"] == "a dog"


def test_a_key_makes_a_video_of_its_own(server: Server, data: bytes) -> None:
    def create(key: str, **fields: object) -> Any:
        headers = {**server.bearer, "Content-Type": TYPE, "Idempotency-Key": key}
        return server.ask("POST", "/v1/videos", multipart(data, **fields), headers).json

    plain = server.create(data).json
    one, one_again, two = create("1"), create("1"), create("2")
    assert one["id"] == one_again["id"]
    assert (one["svdq"]["existing"], one_again["svdq"]["existing"]) == (False, True)
    assert len({plain["id"], one["id"], two["id"]}) == len({each["svdq"]["seed"] for each in (plain, one, two)}) == 3
    seeded = [create(key, seed=7) for key in "121"]
    assert [each["svdq"]["seed"] for each in seeded] == [7, 7, 7]
    assert seeded[0]["id"] == seeded[2]["id"] != seeded[1]["id"]
    assert server.ask("DELETE", f"/v1/videos/{one['id']}").json["deleted"]
    assert server.get(f"/v1/videos/{one['id']}").status == 404
    assert create("1")["svdq"]["seed"] == one["svdq"]["seed"]


def test_a_delete_removes_a_video_also_if_two_requests_share_it(server: Server, data: bytes) -> None:
    [video_id, other] = [server.create(data).json["id"] for _ in range(2)]
    assert video_id == other
    answer = server.ask("DELETE", f"/v1/videos/{video_id}").json
    assert answer == {"id": video_id, "object": "video.deleted", "deleted": True}
    assert server.get(f"/v1/videos/{video_id}").status == 404


def test_forms_without_files(server: Server, data: bytes) -> None:
    by_file = server.create(data, num_frames=5).json["id"]
    fields = {"num_frames": 5, "image_reference": json.dumps({"image_url": data_url(data)})}
    assert server.create(None, **fields).json["id"] == by_file
    kind = {**server.bearer, "Content-Type": TYPE}
    photo = multipart(data, num_frames=5)
    for written, sent in [
        (b'; filename="a photo.jpg"', b'; filename=""'),
        (b'name="input_reference"', b'name="image_reference"'),
        (b'name="input_reference"', b'name="input_reference[]"'),
        (
            b"\r\n--",
            b'\r\n--%b\r\nContent-Disposition: form-data; name="reference_url"\r\n\r\n\r\n--' % BOUNDARY.encode(),
        ),
    ]:
        changed = photo.replace(written, sent, 1)
        assert changed != photo
        answer = server.ask("POST", "/v1/videos/generations", changed, kind)
        assert answer.json.get("id") == by_file, (sent, answer.body)


#: Of the size that these videos have by default.
COSTS_HERE = COSTS.model_copy(update={"frames": 25, "width": 1024, "height": 576, "step_s": (0.02, 0.02)})


@pytest.mark.parametrize(("names", "kind"), [("", "image/jpeg"), ("; filename*=UTF-8''a%20c%C3%BCp.jpg", "text/plain")])
def test_a_photo_whose_part_has_no_filename(server: Server, data: bytes, names: str, kind: str) -> None:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="input_reference"{names}\r\nContent-Type: {kind}'
    body = head.encode() + b"\r\n\r\n" + data + f"\r\n--{BOUNDARY}--\r\n".encode()
    made = server.ask("POST", "/v1/videos", body, {**server.bearer, "Content-Type": TYPE})
    assert made.status == 200, made.body


def test_a_form_without_a_file(server: Server, data: bytes) -> None:
    made = server.create(data, seed=7, name="Ü & co")
    url = f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"
    fields = {"seed": "7", "extra_params[name]": "Ü & co"}
    plain = urlencode({"input_reference": url, **fields})
    escaped = f"input_reference={''.join(f'%{byte:02x}' for byte in url.encode())}&{urlencode(fields)}"
    assert len(escaped) > 2 * UNQUOTED_BYTES
    for body in (plain, escaped):
        answer = server.ask("POST", "/v1/videos", body, {**server.bearer, "Content-Type": URLENCODED})
        assert (answer.status, answer.json["id"]) == (200, made.json["id"]), answer.body
    much = {"Content-Type": URLENCODED, "Content-Length": str((8 << 20) + 1)}
    answer = server.ask("POST", "/v1/videos", "", server.bearer | much)
    assert (answer.status, answer.error["code"]) == (413, "too_large")


def test_when_to_poll_again(server: Server, data: bytes, connection: redis.Redis, svdq: Cli) -> None:
    created = [server.create(data, seed=seed) for seed in range(9)]
    made = [answer.json["id"] for answer in created]
    for answer in (created[0], server.get(f"/v1/videos/{made[0]}")):
        assert answer.headers["openai-poll-after-ms"] == "5000"
    save(connection, rank(0, intake=IntakeStatus(worker="w", costs=(COSTS_HERE,))), rank(1))
    time.sleep(FRESH_S)
    answers = [server.get(f"/v1/videos/{each}") for each in made]
    listed = {each["id"]: each["svdq"]["eta_s"] for each in server.get("/v1/videos").json["data"]}
    assert listed == {answer.json["id"]: answer.json["svdq"]["eta_s"] for answer in answers}
    for answer in answers:
        due_ms = 1000 * answer.json["svdq"]["eta_s"]
        assert abs(int(answer.headers["openai-poll-after-ms"]) - min(max(due_ms, 2000), 5000)) <= 50
    svdq("cancel", made[0])
    wait_until(lambda: "openai-poll-after-ms" not in server.get(f"/v1/videos/{made[0]}").headers)


def test_a_waiting_client_may_leave_and_another_learns_of_the_end(server: Server, data: bytes, svdq: Cli) -> None:
    kind = {**server.bearer, "Content-Type": TYPE}
    leaving = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    leaving.request("POST", "/v1/videos/sync", multipart(data), kind)
    wait_until(lambda: server.get("/v1/videos?limit=1").json["data"])
    leaving.close()
    [video] = server.get("/v1/videos").json["data"]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.ask, "POST", "/v1/videos/sync", multipart(data), kind)
        assert (video["status"], answer.done()) == ("queued", False)
        wait_until(lambda: (svdq("cancel", video["id"]), answer.done())[1])  # it may not have asked at the first time
        failed = answer.result(60)
    assert (failed.status, failed.error["code"], failed.error["message"]) == (
        500,
        "cancelled",
        "The video was canceled.",
    )


def test_a_remix_has_another_seed(server: Server, data: bytes, connection: redis.Redis) -> None:
    first = server.create(data, size="320x320", seed=7, output="trip").json
    path = f"/v1/videos/{first['id']}/remix"
    second = server.ask("POST", path, {"prompt": "again"}).json
    assert second["id"] != first["id"]
    assert second["remixed_from_video_id"] == first["id"]
    assert second["prompt"] == "again"
    assert second["svdq"]["seed"] != 7
    jobs = [read_job(fetch(connection, video["id"])) for video in (first, second)]
    assert jobs[0] is not None
    assert jobs[1] is not None
    assert jobs[0].model_dump(exclude={"seed"}) == jobs[1].model_dump(exclude={"seed"})

    third = server.ask("POST", path, {"prompt": "again", "seed": 9, "num_frames": 5}).json
    assert (third["svdq"]["seed"], third["svdq"]["parameters"]["frames"]) == (9, 5)
    repeated = [
        server.ask("POST", path, '{"prompt": ""}', {**server.bearer, "Idempotency-Key": "k"}).json["id"]
        for _ in range(2)
    ]
    assert repeated[0] == repeated[1] != second["id"]


def test_a_remix_shows_the_photo(server: Server, data: bytes) -> None:
    path = f"/v1/videos/{server.create(data, 'Käse 1.jpg').json['id']}/remix"
    own = server.ask("POST", path, {}).json
    assert (own["svdq"]["name"], own["svdq"]["photo"]) == ("Käse 1", "Käse 1.jpg")
    named = server.create(data, "a.jpg", name="b").json
    again = server.ask("POST", f"/v1/videos/{named['id']}/remix", {}).json
    assert again["svdq"]["name"] == "b"


def test_jobs_of_other_programs_are_left_alone(server: Server, connection: redis.Redis, svdq: Cli) -> None:
    job = rq.Queue("mail", connection=connection).enqueue("os.getcwd")
    path = f"/v1/videos/{job.id}"
    for method, url in [("GET", path), ("DELETE", path), ("GET", f"{path}/content"), ("POST", f"{path}/remix")]:
        answer = server.ask(method, url)
        assert (answer.status, answer.error["code"]) == (404, "not_found"), (method, url)
    for action in ("cancel", "front", "retry"):
        answer = server.ask("POST", "/page/actions", {"action": action, "ids": [job.id]})
        assert list(answer.json["problems"]) == [job.id]
    assert svdq("cancel", job.id).returncode == 2
    assert job.get_status() == "queued"
    job.set_status(JobStatus.FINISHED)
    assert server.ask("DELETE", path).status == 404
    assert connection.exists(job.key)


def test_pages(server: Server, data: bytes) -> None:
    made = [server.create(data, seed=seed).json["id"] for seed in range(5)]
    whole = server.get("/v1/videos").json
    assert (whole["first_id"], whole["last_id"], whole["has_more"]) == (made[4], made[0], False)

    def pages(query: str) -> list[list[str]]:
        found, after = [], ""
        while True:
            page = server.get(f"/v1/videos?limit=2&{query}{after}").json
            found.append([video["id"] for video in page["data"]])
            if not page["has_more"]:
                return found
            after = f"&after={page['last_id']}"

    assert pages("") == [[made[4], made[3]], [made[2], made[1]], [made[0]]]
    assert pages("order=asc&") == [[made[0], made[1]], [made[2], made[3]], [made[4]]]

    none = {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": True}
    assert server.get("/v1/videos?limit=0").json == none

    # Whoever deletes what each page has goes on where the page ended.
    page = server.get("/v1/videos?limit=2").json
    for video in page["data"]:
        assert server.ask("DELETE", f"/v1/videos/{video['id']}").status == 200
    rest = server.get(f"/v1/videos?limit=2&after={page['last_id']}").json
    assert [video["id"] for video in rest["data"]] == [made[2], made[1]]


def test_queries_of_lists(server: Server) -> None:
    empty = {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    assert server.get("/v1/videos").json == empty
    unknown = server.get("/v1/videos?status=completed")
    assert (unknown.status, unknown.error["code"], unknown.error["param"]) == (400, "unknown_parameter", "status")
    for query in ("limit=-1", "limit=101", "limit=x", "limit=%C2%B2", "limit=" + "1" * 5000, "order=up", "after=no"):
        answer = server.get(f"/v1/videos?{query}")
        assert (answer.status, answer.error["param"]) == (400, query.partition("=")[0])


def test_delete_before_a_worker_takes_it(server: Server, data: bytes, settings: Settings) -> None:
    video_id = server.create(data).json["id"]
    assert server.get(f"/v1/videos/{video_id}").status == 200
    deleted = {"id": video_id, "object": "video.deleted", "deleted": True}
    assert server.ask("DELETE", f"/v1/videos/{video_id}").json == deleted
    assert server.get(f"/v1/videos/{video_id}").status == 404
    assert server.ask("DELETE", f"/v1/videos/{video_id}").status == 404
    assert len(list(Storage(settings.storage).entries("inputs"))) == 1  # `svdq prune` removes photos
    # A new submission of the same is a new job.
    again = server.create(data).json
    assert (again["id"], again["status"]) == (video_id, "queued")


def test_a_canceled_video_has_failed(server: Server, data: bytes, svdq: Cli) -> None:
    video_id = server.create(data).json["id"]
    assert svdq("cancel", video_id).returncode == 0
    video = server.get(f"/v1/videos/{video_id}").json
    assert (video["status"], video["error"]["code"]) == ("failed", "cancelled")
    error = server.get(f"/v1/videos/{video_id}/content").error
    assert (error["code"], error["message"]) == ("cancelled", "The video was canceled.")


def test_the_content_of_a_queued_video(server: Server, data: bytes) -> None:
    video_id = server.create(data).json["id"]
    for query in ("", "?variant=thumbnail"):
        error = server.get(f"/v1/videos/{video_id}/content{query}").error
        assert (error["code"], "is queued" in error["message"]) == ("not_ready", True)


def test_models(server: Server, data: bytes) -> None:
    [model] = server.get("/v1/models").json["data"]
    assert (model["id"], model["object"]) == ("preview", "model")
    assert server.get("/v1/models/preview").json == server.get("/v1/models/hub%2Fpreview").json == model
    missing = server.get("/v1/models/sora-2")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")
    assert server.create(data, model="hub/preview").json["model"] == "preview"


def test_there_is_no_such_video(server: Server) -> None:
    for path in ("/v1/videos/none", "/v1/videos/..%2f..%2fetc", "/v1/videos/%00", "/v1/videos/a:b"):
        for method, suffix in [("GET", ""), ("DELETE", ""), ("GET", "/content"), ("POST", "/remix")]:
            answer = server.ask(method, path + suffix)
            assert answer.status == 404, answer.body
            assert answer.error["code"] == "not_found"
