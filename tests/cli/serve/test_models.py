"""Workers with different model files of one family: the page and the API choose between them."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import redis

from svdq.producer import keys
from svdq.producer.status.job_view import view
from svdq.producer.status.registries import newest_ids
from tests.cli.serve.browser import watched_page
from tests.cli.serve.servers import Server
from tests.ranks import rank, save
from tests.waiting import wait_until

sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright")
expect = sync_api.expect


def test_the_api_makes_a_video_with_a_model_that_it_lists(
    server: Server, connection: redis.Redis, photo_bytes: bytes, svdq: Any, photo: Path
) -> None:
    save(connection, rank(0, num_ranks=1, model="/models/fast.toml", family="wan"))
    wait_until(lambda: [each["id"] for each in server.get("/v1/models").json["data"]] == ["fast"])
    alone = server.create(photo_bytes, model="fast").json
    assert view(connection, alone["id"]).queue == "svdq-default"  # as without its name
    for name in ("fast", "full"):
        save(connection, rank(0, f"{name}-1", num_ranks=1, model=f"/models/{name}.toml", family="wan"))
    connection.delete("svdq:rank:here-1:0")
    wait_until(lambda: len(server.get("/v1/models").json["data"]) == 2)
    made = server.create(photo_bytes, model="full").json
    assert (made["model"], made["svdq"]["parameters"]["model"]) == ("full", "full")
    assert view(connection, made["id"]).queue == "svdq-default:full"
    assert server.get(f"/v1/videos/{made['id']}").json["status"] == "queued"
    assert server.create(photo_bytes, model="xt").error["code"] == "model_not_found"
    by_command = svdq("submit", photo, "--model", "full", "--json").stdout
    assert json.loads(by_command)["id"] == made["id"]
    for path, number in (("/queue", 2), ("/queue?model=full", 2), ("/queue?model=fast", 1)):
        wait_until(lambda path=path, number=number: server.get(path).json == {"waiting": number})


def test_a_model_that_a_worker_loads_may_be_named(server: Server, connection: redis.Redis, photo_bytes: bytes) -> None:
    """The weights of a large model take minutes."""
    until = int(time.time()) + 600
    connection.zadd(keys.STARTING, {"host:1 wan /models/fast.toml": until})
    made = server.create(photo_bytes, model="fast")
    assert made.status == 200, made.body
    assert (made.json["model"], made.json["svdq"]["parameters"]["family"]) == ("fast", "wan")
    assert [each["id"] for each in server.get("/v1/models").json["data"]] == ["fast"]
    refused = server.create(photo_bytes, model="sora-2").error["message"]
    assert refused == "There is no model 'sora-2'; choose one of fast, or leave model out."


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_form_offers_the_models_of_a_family_where_several_run(
    browser: Any, server: Server, connection: redis.Redis, photo: Path
) -> None:
    expect.set_options(timeout=60_000)
    until = int(time.time()) + 600
    connection.zadd(keys.STARTING, {"host:1 wan /models/fast.toml": until})
    with watched_page(browser, server.url) as watched:
        page = watched.page
        expect(page.locator("#wan-prompt")).to_be_visible()
        expect(page.locator("#model")).to_be_hidden()
        connection.zadd(keys.STARTING, {"host:2 wan full": until, "host:3 svd xt": until})
        expect(page.locator("#model option")).to_have_text(["any", "fast", "full"])
        page.select_option("#model", "full")
        page.reload()
        expect(page.locator("#model")).to_have_value("full")
        page.set_input_files("#photos", photo)
        page.click("#make")
        expect(page.locator("#rows .row")).to_have_count(1)
        [job_id] = newest_ids(connection)
        assert view(connection, job_id).parameters["model"] == "full"
        page.select_option("#family", "svd")
        expect(page.locator("#model")).to_be_hidden()
