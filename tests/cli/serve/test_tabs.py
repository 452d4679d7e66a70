"""What the page shows of changes that another page, or a person before, has made."""

import io
from typing import Any

import pytest
import redis
from PIL import Image

from svdq.producer.queue import fetch, statuses
from svdq.producer.settings import Settings
from svdq.producer.status.ranks import IntakeStatus
from svdq.producer.storage.storage import Storage
from tests.cli.serve.browser import watched_page
from tests.cli.serve.ended import finish
from tests.cli.serve.servers import Server
from tests.queued import SvdJob, enqueue
from tests.ranks import rank, save
from tests.waiting import wait_until

sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright")
expect = sync_api.expect

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

DESK = {"viewport": {"width": 1280, "height": 900}}


@pytest.fixture(autouse=True)
def _patient() -> None:
    expect.set_options(timeout=60_000)


def test_videos_that_another_page_has_deleted_disappear(
    browser: Any, server: Server, connection: redis.Redis, settings: Settings
) -> None:
    ids = [finish(connection, Storage(settings.storage), number, name=f"Video {number}") for number in range(4)]
    connection.delete(f"rq:job:{ids[0]}")  # Redis has forgotten it
    with watched_page(browser, server.url, **DESK) as watched:
        page, other = watched.page, watched.page.context.new_page()
        other.goto(server.url)
        names = other.locator(".card h3")
        expect(names).to_have_count(4)
        expect(page.locator(".card")).to_have_count(4)
        names.first.hover()  # the reader of the other page works there
        for name in ("Video 0", "Video 2"):
            page.get_by_label(f"Select {name}", exact=True).check()
        page.click("#delete-results")
        page.click("#pick-results")
        page.click("#keep-results")  # the next action makes it final
        expect(other.locator(".card.is-keep")).to_have_count(2)
        expect(names).to_have_count(4)
        other.get_by_role("button", name="Reject Video 2", exact=True).click()
        expect(other.locator("#results-problem")).to_have_text("The video was removed.")
        expect(other.locator("#toast")).not_to_be_visible()
        other.evaluate("document.activeElement.blur()")
        other.mouse.move(5, 5)
        expect(names).to_have_text(["Video 3", "Video 1"])


def test_keep_this_one_cancels_also_the_variations_that_wait(
    browser: Any, server: Server, connection: redis.Redis
) -> None:
    for number, photo in enumerate("aaab"):
        job = SvdJob(image=f"inputs/{photo * 64}.jpg", name="Cup", seed=number, steps=4)
        enqueue(connection, job, f"job-{number}")
    connection.lrem("rq:queue:svdq-default", 1, "job-0")
    connection.hset("rq:job:job-0", "status", "started")
    connection.zadd("rq:wip:svdq-default", {"job-0:execution": "inf"})
    with watched_page(browser, server.url, **DESK) as watched:
        page = watched.page
        expect(page.locator("#rows .row")).to_have_count(4)
        page.get_by_role("button", name="Keep this one: Cup; cancels 2 others").click()
        expect(page.locator("#toast")).to_contain_text("2 videos canceled.")
        expect(page.locator("#rows .row")).to_have_count(2)
        page.reload()  # ends the time to take it back
        watched.forgive("404")  # of photos that are not there
    ids = [f"job-{number}" for number in range(4)]
    wait_until(lambda: statuses(connection, ids) == ["started", "canceled", "canceled", "queued"])


def test_the_crop_is_said_once(browser: Any, server: Server, connection: redis.Redis) -> None:
    with watched_page(browser, server.url, **DESK) as watched:
        page = watched.page
        data = io.BytesIO()
        Image.new("RGB", (300, 600)).save(data, "png")
        page.set_input_files("#photos", {"name": "Tall.png", "mimeType": "image/png", "buffer": data.getvalue()})
        page.select_option("#svd-shape", "1024x576")
        photo = page.locator("#upload-list li")
        expect(photo).to_contain_text("crop removes 72% of the height")
        page.click("#make")
        expect(photo.locator(".state")).to_have_text("queued")
        [job_id] = connection.lrange("rq:queue:svdq-default", 0, -1)
        assert fetch(connection, job_id.decode()).kwargs["job"]["width"] == 1024


def test_the_end_of_a_batch_leaves_the_time_to_take_a_verdict_back(
    browser: Any, server: Server, connection: redis.Redis, settings: Settings
) -> None:
    storage = Storage(settings.storage)
    finish(connection, storage, 1, name="Video 1")
    enqueue(connection, SvdJob(image=f"inputs/{'a' * 64}.jpg", name="Cup", seed=0), "waits")
    with watched_page(browser, server.url, **DESK) as watched:
        page, toast = watched.page, watched.page.locator("#toast")
        expect(page.locator("#num-left")).to_have_text("1")
        page.locator(".card .frame").focus()
        page.keyboard.press("r")
        expect(toast).to_contain_text("rejected.")
        connection.delete("rq:queue:svdq-default")
        finish(connection, storage, 2, name="Video 2")
        expect(page.locator("#new-results")).to_have_text("1 new")
        expect(toast).to_contain_text("rejected.")
        page.keyboard.press("u")
        expect(page.locator(".card.is-reject")).to_have_count(0)
        expect(toast).to_contain_text("All done: 1 video.")
        watched.forgive("404")  # of photos that are not there


def test_photos_that_are_added_later_come_into_view(browser: Any, server: Server) -> None:
    def photo(number: int) -> Any:
        data = io.BytesIO()
        Image.new("RGB", (96, 64), (number, 9, 9)).save(data, "png")
        return {"name": f"Photo {number}.png", "mimeType": "image/png", "buffer": data.getvalue()}

    with watched_page(browser, server.url, **DESK) as watched:
        page = watched.page
        page.set_input_files("#photos", [photo(number) for number in range(12)])
        expect(page.get_by_text("Photo 0.png")).to_be_in_viewport()
        page.click("#make")
        expect(page.locator("#upload-list .is-done")).to_have_count(12)
        page.set_input_files("#photos", photo(12))
        expect(page.get_by_text("Photo 12.png")).to_be_in_viewport()


def test_a_verdict_stays_at_the_same_key_and_is_taken_back_by_its_button(
    browser: Any, server: Server, connection: redis.Redis, settings: Settings
) -> None:
    finish(connection, Storage(settings.storage), 1, name="Video 1")
    with watched_page(browser, server.url, **DESK) as watched:
        page = watched.page
        for _ in range(2):
            page.locator(".card .frame").focus()
            page.keyboard.press("r")
            expect(page.locator(".card.is-reject")).to_have_count(1)
        page.locator(".card").get_by_role("button", name="Reject").click()
        expect(page.locator(".card.is-reject")).to_have_count(0)
        expect(page.locator("#toast")).to_have_class("toast")


def test_at_most_four_videos_are_loaded(
    browser: Any, server: Server, connection: redis.Redis, settings: Settings
) -> None:
    for number in range(6):
        finish(connection, Storage(settings.storage), number, name=f"Video {number}", formats=("mp4",))
    with watched_page(browser, server.url, **DESK) as watched:
        page = watched.page
        page.locator(".card .frame").first.focus()
        for number in range(5, -1, -1):
            playing = page.locator(".card.is-current").filter(has_text=f"Video {number}").locator("video")
            expect(playing).to_have_attribute("src", f"/page/content/{number:020x}?format=mp4")
            page.keyboard.press("ArrowRight")
        expect(page.locator(".card video[src]")).to_have_count(4)


def test_while_a_rank_decodes_there_is_something_to_do(browser: Any, server: Server, connection: redis.Redis) -> None:
    """A decode is not interrupted: a rank goes on with what was just canceled."""
    busy = {"num_ranks": 1, "job_id": "a", "step": 4, "steps": 4, "activity": "decoding"}
    save(connection, rank(0, **busy, intake=IntakeStatus(worker="w")))
    with watched_page(browser, server.url) as watched:
        expect(watched.page.locator("#figure-end")).to_have_text("almost done")
        save(connection, rank(0, num_ranks=1, intake=IntakeStatus(worker="w")))
        expect(watched.page.locator("#figure-end")).to_have_text("nothing to do")
