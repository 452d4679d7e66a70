"""Several owners in a real browser: the page starts with one's own videos, and can show everybody's."""

import json
from typing import Any

import pytest
import redis

from svdq.producer.pauses import read_pauses
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.enqueue import enqueue_many
from svdq.producer.submitting.entries import Entry
from tests.cli.serve.browser import watched_page
from tests.cli.serve.ended import finish
from tests.cli.serve.servers import Server
from tests.conftest import Cli
from tests.queued import JOB
from tests.waiting import wait_until

sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright")
expect = sync_api.expect

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_page_starts_with_ones_own_videos(
    browser: Any, server: Server, svdq: Cli, connection: redis.Redis, storage: Storage
) -> None:
    expect.set_options(timeout=60_000)
    token = json.loads(svdq("serve", "token", "add", "ana", "--json").stdout)["token"]
    for number, owner in ((1, "ana"), (2, "ben")):
        job_id = finish(connection, storage, number, name=f"Video {number}")
        connection.hset(f"rq:job:{job_id}", "svdq_owner", owner)
    waiting = {"ana": "a" * 20, "ben": "b" * 20}
    for owner, job_id in waiting.items():
        enqueue_many(connection, [Entry(job=JOB, job_id=job_id, owner=owner)])

    def in_queue() -> list[str]:
        return [job_id.decode() for job_id in connection.lrange("rq:queue:svdq-default", 0, -1)]

    with watched_page(browser, server.url, viewport={"width": 1280, "height": 900}) as shared:
        expect(shared.page.locator(".card")).to_have_count(2)
        expect(shared.page.locator(".row")).to_have_count(2)
        expect(shared.page.locator("#rows")).to_contain_text("ben · ")
        shared.forgive("404")  # the photos of the jobs that wait
    with watched_page(browser, server.url, token, viewport={"width": 1280, "height": 900}) as own:
        page = own.page
        expect(page.locator(".card")).to_have_count(1)
        expect(page.locator("#reviewed")).to_have_text("0 of 1 reviewed")
        expect(page.locator(".card h3")).to_have_text("Video 1")
        expect(page.locator(".row")).to_have_count(1)
        page.get_by_label("Whose videos").select_option("everybody")
        expect(page.locator(".card")).to_have_count(2)
        expect(page.locator("#reviewed")).to_have_text("0 of 2 reviewed")
        expect(page.locator(".row")).to_have_count(2)
        page.reload()
        expect(page.locator(".row")).to_have_count(2)
        page.get_by_label("Whose", exact=True).select_option("mine")
        expect(page.locator(".row")).to_have_count(1)
        asked: list[str] = []
        page.once("dialog", lambda dialog: (asked.append(dialog.message), dialog.dismiss()))
        page.click("#pause")
        expect(page.locator("#pause")).to_have_attribute("aria-busy", "false")
        assert asked == ["Pause all workers? 1 video of other people waits, too."]
        assert not read_pauses(connection)
        page.once("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Cancel all that wait").click()
        wait_until(lambda: in_queue() == [waiting["ben"]])
        own.forgive("404")
