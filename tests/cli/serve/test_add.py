"""Adding photos in a real browser, without a worker: uploads that fail, jobs that were canceled, and crops."""

import hashlib
import io
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import redis
from PIL import Image
from rq.job import JobStatus

from svdq.cli.serve.review import plain
from svdq.producer import job_control, keys
from svdq.producer.queue import fetch, read_job
from tests.cli.serve.browser import Watched, watched_page
from tests.cli.serve.servers import Server
from tests.queued import JOB, enqueue, fail, finish, start
from tests.waiting import wait_until

sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright")
expect = sync_api.expect

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture
def desk(browser: Any, server: Server) -> Iterator[Watched]:
    expect.set_options(timeout=60_000)
    with watched_page(browser, server.url, viewport={"width": 1280, "height": 900}) as watched:
        yield watched


def choose(page: Any, *names: str, size: tuple[int, int] = (96, 64)) -> None:
    """Choose photos, each of a color of its own."""
    files = []
    for number, name in enumerate(names):
        data = io.BytesIO()
        Image.new("RGB", size, (number % 256, sum(map(ord, name)) % 256, 9)).save(data, "png")
        files.append({"name": name, "mimeType": "image/png", "buffer": data.getvalue()})
    page.set_input_files("#photos", files)


def test_canceled_videos_can_be_made_again(desk: Watched) -> None:
    page = desk.page
    rows = page.locator("#rows .row")
    choose(page, "Lake.png", "Sky.png")
    page.click("#make")
    expect(rows).to_have_count(2)
    page.click("#undo-uploads")
    expect(rows).to_have_count(0)
    choose(page, "Lake.png")
    page.click("#make")
    expect(page.locator("#upload-list .is-done").last).to_contain_text("queued")
    expect(rows).to_have_count(1)

    page.select_option("#show", "canceled")
    expect(page.locator(".card h3")).to_have_text(["Sky"])
    expect(page.locator(".card .frame")).to_have_text("Canceled")
    page.click("[aria-label='Try again: Sky']")
    expect(page.locator(".card")).to_have_count(0)
    expect(rows).to_have_count(2)
    page.click("#pick-rows")
    page.click("#cancel-rows")
    expect(rows).to_have_count(0)
    page.reload()  # ends the time to take it back
    expect(page.locator(".card")).to_have_count(2)
    page.click("#pick-results")
    page.click("#retry-results")
    expect(rows).to_have_count(2)
    expect(page.locator(".card")).to_have_count(0)


def test_last_frames_are_those_of_pairs_and_of_all_others(desk: Watched, connection: redis.Redis) -> None:
    page = desk.page
    page.select_option("#family", "wan")
    choose(page, "Lake.last.png", "Lake.png", "Sky.png")
    expect(page.locator("#upload-list li")).to_have_count(2)
    expect(page.locator("#upload-list")).to_contain_text("Lake.png → Lake.last.png")
    last = io.BytesIO()
    Image.new("RGB", (96, 64), "red").save(last, "png")
    page.set_input_files("#wan-last-photo", {"name": "red.png", "mimeType": "image/png", "buffer": last.getvalue()})
    page.click("#make")
    expect(page.locator("#upload-list .is-done")).to_have_count(2)
    jobs = {job.name: job for job in map(read_job, map(partial(fetch, connection), queued_ids(connection)))}
    assert sorted(jobs) == ["Lake", "Sky"]
    assert all(job.last_image for job in jobs.values())
    assert jobs["Sky"].last_image.endswith(f"{hashlib.sha256(last.getvalue()).hexdigest()}.png")
    assert jobs["Lake"].last_image != jobs["Sky"].last_image


def queued_ids(connection: redis.Redis) -> list[str]:
    return [job_id.decode() for job_id in connection.lrange("rq:queue:svdq-default", 0, -1)]


def test_the_photos_that_were_added_show_what_became_of_them(desk: Watched, connection: redis.Redis) -> None:
    page = desk.page
    choose(page, "Lake.png", "Sky.png", "Hill.png")
    page.click("#make")
    expect(page.locator("#undo-uploads")).to_have_text("Cancel these 3 videos")
    jobs = [fetch(connection, job_id) for job_id in queued_ids(connection)]
    start(next(job for job in jobs if job.kwargs["job"]["name"] == "Hill"), step=1)
    for job in jobs:
        if job.kwargs["job"]["name"] != "Hill":
            connection.lrem("rq:queue:svdq-default", 1, job.id)
            (finish if job.kwargs["job"]["name"] == "Lake" else fail)(job)
    photos = page.locator("#upload-list li")
    expect(photos.filter(has_text="Lake.png").locator(".state")).to_have_text("finished")
    expect(photos.filter(has_text="Sky.png").locator(".state")).to_have_text("failed")
    expect(photos.filter(has_text="Hill.png").locator(".state")).to_have_text("is made now")
    expect(page.locator("#undo-uploads")).to_have_text("Cancel this video")


def test_taking_an_upload_back_tells_what_was_too_late(desk: Watched, connection: redis.Redis) -> None:
    page = desk.page
    page.route(
        "**/page/verdicts", lambda route: route.fulfill(json={"verdicts": {}, "states": {}})
    )  # the page has not heard of it yet
    choose(page, "Lake.png", "a'b\"c.png")
    page.click("#make")
    expect(page.locator("#undo-uploads")).to_have_text("Cancel these 2 videos")
    expect(page.locator("#rows .row")).to_have_count(2)
    expect(page.locator("#rows strong", has_text="a'b_c")).to_have_count(1)
    for job_id in connection.lrange("rq:queue:svdq-default", 0, -1):
        if fetch(connection, job_id.decode()).kwargs["job"]["name"] == "Lake":
            connection.lrem("rq:queue:svdq-default", 1, job_id)
            fetch(connection, job_id.decode()).set_status(JobStatus.FINISHED)
    page.click("#undo-uploads")
    photos = page.locator("#upload-list")
    expect(photos.locator("li", has_text="c.png")).to_contain_text("canceled")
    expect(photos.locator("li", has_text="Lake.png")).to_contain_text("not canceled")
    expect(page.locator("#add-problem")).to_have_text('"Lake" is finished: it has ended already.')


def test_the_line_that_stays_in_sight_says_what_has_no_prompt_and_what_is_uploaded(desk: Watched) -> None:
    page, plan = desk.page, desk.page.locator("#plan")
    choose(page, "Lake.png", "Sky.png", "Hill.png")
    expect(plan).to_contain_text("3 photos, 3 videos.")
    assert "prompt" not in plan.inner_text()
    page.select_option("#family", "wan")
    expect(plan).to_contain_text("3 photos have no prompt; they will move at random.")
    page.get_by_label("Prompt of Sky.png").fill("Clouds drift")
    page.get_by_label("Prompt of Lake.png").fill("Waves roll in")
    expect(plan).to_contain_text("1 photo has no prompt; it will move at random.")
    page.fill("#wan-prompt", "The camera moves")
    expect(plan).not_to_contain_text("at random")
    held: list[Any] = []
    page.route("**/page/photos", lambda route: held.append(route) if len(held) < 2 else route.continue_())
    page.click("#make")
    expect(plan).to_have_text("Uploading 2 photos… 1 uploaded")
    for route in held:
        route.continue_()
    expect(plan).to_have_text("3 uploaded.")


def test_uploads_go_on_by_themselves_after_failures_of_the_network(desk: Watched, connection: redis.Redis) -> None:
    """While a proxy answers 502, and the network is gone for some of them: all arrive once."""
    page = desk.page
    sent: list[str] = []

    def answer(route: Any) -> None:
        sent.append(route.request.url)
        if len(sent) in (4, 5, 6):
            route.fulfill(status=502, body="Bad Gateway")
        elif len(sent) in (12, 13, 14, 15):
            route.abort("internetdisconnected")
        elif len(sent) == 20:
            route.fulfill(status=503, headers={"Retry-After": "1"}, body="{}")
        else:
            route.continue_()

    page.route("**/page/photos", answer)
    choose(page, *(f"Photo {number}.png" for number in range(20)))
    page.click("#make")
    expect(page.locator("#upload-summary")).to_contain_text("svdq answered with the error 502. Trying again at")
    expect(page.locator("#upload-summary")).to_contain_text("svdq cannot be reached. Trying again at")
    expect(page.locator("#upload-summary")).to_have_text("20 uploaded.")
    expect(page.locator("#retry-uploads")).to_be_hidden()
    assert connection.llen("rq:queue:svdq-default") == 20
    assert 20 + 6 <= len(sent) <= 20 + 8  # a pause sends one photo after the other
    desk.forgive("502|503|ERR_INTERNET")


def test_the_form_follows_the_model_of_a_worker_that_starts(desk: Watched, connection: redis.Redis) -> None:
    page = desk.page
    page.reload()
    expect(page.locator("#svd-shape")).to_be_visible()
    choose(page, "Lake.png")
    now = int(time.time())
    connection.zadd(keys.STARTING, {"host:1 wan /models/wan": now + 600})
    expect(page.locator("#wan-prompt")).to_be_visible()
    expect(page.locator("#svd-shape")).to_be_hidden()
    expect(page.locator("#add-problem")).to_contain_text("The workers make videos with")
    page.click("#make")
    expect(page.locator("#rows .row")).to_have_count(1)
    [job_id] = connection.lrange("rq:queue:svdq-default", 0, -1)
    assert fetch(connection, job_id.decode()).kwargs["job"]["family"] == "wan"


def test_a_thumbnail_shows_the_crop_before_the_photo_is_sent(desk: Watched) -> None:
    page = desk.page
    choose(page, "Tall.png", size=(600, 890))
    photo = page.locator("#upload-list li")
    page.select_option("#svd-shape", "1024x576")
    expect(photo).to_contain_text("crop removes 62% of the height")
    brightness = """(y) => {
      const canvas = document.querySelector('#upload-list canvas');
      return canvas.getContext('2d').getImageData(32, y, 1, 1).data.slice(0, 3).reduce((sum, value) => sum + value);
    }"""
    assert page.evaluate(brightness, 3) < page.evaluate(brightness, 24) / 2
    page.select_option("#svd-shape", "auto")
    expect(photo).not_to_contain_text("crop")
    assert page.evaluate(brightness, 3) == page.evaluate(brightness, 24)
    page.select_option("#svd-shape", "other")
    page.fill("#svd-width", "512")
    page.fill("#svd-height", "1024")
    expect(photo).to_contain_text("crop removes 26% of the width")


def test_a_hanging_redis_is_not_a_lost_connection(desk: Watched, connection: redis.Redis) -> None:
    notice = desk.page.locator("#connection")
    connection.execute_command("CLIENT", "PAUSE", "8000")
    expect(notice).to_contain_text("Redis does not answer")
    expect(notice).to_be_hidden()
    desk.forgive("503|404")


def text_of(name: str, text: str) -> dict[str, Any]:
    return {"name": name, "mimeType": "text/plain", "buffer": text.encode()}


def test_a_text_beside_a_photo_is_its_prompt(desk: Watched, connection: redis.Redis) -> None:
    page = desk.page
    page.select_option("#family", "wan")
    page.fill("#wan-prompt", "The camera moves")
    files = []
    for number, name in enumerate(("Lake.png", "Sky.png", "Fog.png")):
        data = io.BytesIO()
        Image.new("RGB", (96, 64), (number, 9, 9)).save(data, "png")
        files.append({"name": name, "mimeType": "image/png", "buffer": data.getvalue()})
    page.set_input_files("#photos", [*files, text_of("Lake.txt", "Waves roll in\n")])
    expect(page.locator("#upload-summary")).to_have_text("3 photos chosen.")
    expect(page.get_by_label("Prompt of Lake.png")).to_have_value("Waves roll in")
    page.get_by_label("Prompt of Sky.png").fill("Clouds drift")
    page.click("#make")
    expect(page.locator("#rows .row")).to_have_count(3)
    jobs = [
        fetch(connection, job_id.decode()).kwargs["job"] for job_id in connection.lrange("rq:queue:svdq-default", 0, -1)
    ]
    assert {job["name"]: job["prompt"] for job in jobs} == {
        "Lake": "Waves roll in",
        "Sky": "Clouds drift",
        "Fog": "The camera moves",
    }


def test_files_that_are_no_photos_are_marked_before_they_are_sent(desk: Watched) -> None:
    page = desk.page
    broken = {"name": "Broken.jpg", "mimeType": "image/jpeg", "buffer": b"no photo at all"}
    raw = {"name": "Night.NEF", "mimeType": "", "buffer": b"raw"}
    page.set_input_files("#photos", [broken, raw])
    expect(page.locator("#upload-list .is-refused")).to_contain_text("a RAW photo: export it as JPEG")
    expect(page.locator("#upload-list .is-bad")).to_contain_text("cannot be read")
    expect(page.locator("#upload-summary")).to_have_text("1 photo cannot be read, 1 refused.")
    expect(page.locator("#plan")).to_have_text("No photos are chosen.")
    page.get_by_label("Remove Broken.jpg").click()
    expect(page.locator("#make")).to_be_disabled()


def test_the_number_and_the_button_stay_in_sight(desk: Watched) -> None:
    page = desk.page
    choose(page, *(f"Photo {number}.png" for number in range(40)))
    expect(page.locator("#plan")).to_contain_text("40 photos, 40 videos.")
    expect(page.locator("#make")).to_be_in_viewport(ratio=1)
    page.evaluate("document.querySelector('details.more').open = true")
    page.locator("#priority").scroll_into_view_if_needed()
    expect(page.locator("#make")).to_be_in_viewport(ratio=1)
    expect(page.locator("#plan")).to_be_in_viewport(ratio=1)


def test_settings_survive_a_reload_and_are_saved_under_a_name(desk: Watched) -> None:
    page = desk.page
    page.fill("#svd-frames", "9")
    page.select_option("#svd-shape", "768x768")
    page.check("[data-family=svd] [data-checks=formats] [value=gif]")
    page.select_option("#start", "at")
    page.once("dialog", lambda dialog: dialog.accept("Short squares"))
    page.click("#save-preset")
    page.fill("#svd-frames", "14")
    page.locator("#folder").focus()
    page.reload()
    expect(page.locator("#svd-frames")).to_have_value("14")
    expect(page.locator("[data-family=svd] [data-checks=formats] [value=gif]")).to_be_checked()
    expect(page.locator("#at-field")).to_be_visible()
    page.select_option("#preset", "Short squares")
    expect(page.locator("#svd-frames")).to_have_value("9")
    expect(page.locator("#svd-shape")).to_have_value("768x768")
    page.click("#delete-preset")
    expect(page.locator("#preset option")).to_have_count(1)


def test_the_queue_is_ordered_by_dragging_keys_and_buttons_and_canceled(desk: Watched, connection: redis.Redis) -> None:
    page, names = desk.page, desk.page.locator("#rows strong")

    def row(name: str) -> Any:
        return page.locator("#rows .row", has=page.get_by_text(name, exact=True))

    def check(order: str) -> None:
        """The page and the queue have an order."""
        expect(names).to_have_text(list(order))
        wait_until(
            lambda: [fetch(connection, each).kwargs["job"]["name"] for each in queued_ids(connection)] == [*order]
        )

    for name in "ABCD":  # one after the other, in this order
        choose(page, f"{name}.png")
        page.click("#make")
        expect(names.last).to_have_text(name)
    row("D").drag_to(row("B"), target_position={"x": 9, "y": 3})
    check("ADBC")
    handle = page.get_by_label("Move A; arrow")  # one for all keys: it takes the focus again after each move
    for key, order in (("ArrowDown", "DABC"), ("ArrowDown", "DBAC"), ("ArrowUp", "DABC")):
        handle.press(key)
        check(order)
    row("D").drag_to(row("B"), target_position={"x": 9, "y": row("B").bounding_box()["height"] - 3})
    check("ABDC")
    page.reload()
    check("ABDC")

    page.click("#pause")
    expect(page.locator("#warnings")).to_contain_text("Paused: no new videos are started until you press Resume.")
    expect(page.locator("#pause")).to_have_text("Resume")
    page.click("[aria-label='Move to front: B']")
    check("BADC")
    page.check("[aria-label='Select C']")
    page.check("[aria-label='Select D']")
    expect(page.locator("#num-picked-rows")).to_have_text("2 selected")
    page.click("#front-rows")
    check("DCBA")
    page.click("#cancel-rows")
    expect(names).to_have_text(["B", "A"])
    page.click("[aria-label='Cancel A']")
    expect(names).to_have_text(["B"])
    page.get_by_role("button", name="Undo").click()
    expect(names).to_have_text(["B", "A"])
    assert connection.llen("rq:queue:svdq-default") == 2


def test_rows_stay_in_place_while_one_is_dragged(desk: Watched, connection: redis.Redis) -> None:
    page, names = desk.page, desk.page.locator("#rows strong")

    def in_queue() -> list[str]:
        return [fetch(connection, each).kwargs["job"]["name"] for each in queued_ids(connection)]

    for name in "ABCD":  # one after the other, in this order
        choose(page, f"{name}.png")
        page.click("#make")
        expect(names.last).to_have_text(name)
    rows = page.locator("#rows .row")
    rows.nth(3).hover(position={"x": 9, "y": 3})
    page.mouse.down()
    for y in (9, 3):  # a drag begins with the second move
        rows.nth(1).hover(position={"x": 9, "y": y})
    expect(page.locator(".is-target")).to_have_count(1)
    job_control.move(connection, queued_ids(connection)[2], front=True, priority=None)
    enqueue(connection, JOB, "e" * 20)
    expect(page.locator("#num-left")).to_have_text("5")
    expect(names).to_have_text(list("ABCD"))
    page.mouse.up()
    wait_until(lambda: in_queue()[:4] == list("CADB"))
    expect(names).to_have_text([*"CADB", JOB.name])
    desk.forgive("404")  # the photo of the job


def test_an_error_names_no_folder_of_the_server_and_no_flag() -> None:
    error = "File exists at '/srv/svdq/outputs/a/Lake.mp4'; choose another --name or --decode-chunk-size."
    assert plain(error) == "File exists at 'Lake.mp4'; choose another Name or Frames decoded at a time."
    assert plain("Either/or 'is' fine.") == "Either/or 'is' fine."


def test_one_side_of_a_size_is_named_alone(desk: Watched) -> None:
    page = desk.page
    page.select_option("#family", "wan")
    page.select_option("#wan-shape", "other")
    choose(page, "Lake.png")
    page.fill("#wan-width", "100")
    expect(page.locator("#add-problem")).to_contain_text("Width 100 is not allowed")
    desk.forgive("400")
