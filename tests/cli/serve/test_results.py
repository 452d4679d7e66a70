"""Reviewing results in a real browser: keys go to the video that plays, and nothing moves while the reader works."""

import io
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from svdq.producer import keys
from svdq.producer.storage.storage import Storage
from tests.cli.serve.browser import Watched, watched_page
from tests.cli.serve.ended import finish
from tests.cli.serve.servers import Server
from tests.queued import JOB, enqueue
from tests.waiting import wait_until

sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright")
expect = sync_api.expect

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

#: When the first of the videos ended, in seconds since the epoch.
BEGIN = 1_700_000_000


def make(connection: redis.Redis, storage: Storage, *numbers: int, formats: tuple[str, ...] = ("gif",)) -> list[str]:
    """Put finished videos `Video N` where a worker leaves them, a second apart; return their ids."""
    return [
        finish(connection, storage, number, name=f"Video {number}", at=BEGIN + number, formats=formats)
        for number in numbers
    ]


@pytest.fixture
def desk(browser: Any, server: Server, connection: redis.Redis, storage: Storage) -> Iterator[Watched]:
    """The page on a desk, with twelve videos: 12 comes first."""
    make(connection, storage, *range(1, 13))
    expect.set_options(timeout=60_000)
    with watched_page(browser, server.url, viewport={"width": 1280, "height": 900}) as watched:
        expect(watched.page.locator(".card")).to_have_count(12)
        yield watched


def card(page: Any, number: int) -> Any:
    return page.locator(".card", has=page.get_by_role("heading", name=f"Video {number}", exact=True))


def frame(page: Any, number: int) -> Any:
    return card(page, number).locator(".frame")


def marks(connection: redis.Redis, ids: list[str]) -> dict[int, bytes]:
    """The verdicts about videos by their number."""
    found: Any = connection.hmget(keys.VERDICTS, ids)
    return {number: mark for number, mark in enumerate(found, 1) if mark}


def test_the_keys_go_to_the_video_that_plays(desk: Watched) -> None:
    page = desk.page
    current = page.locator(".card.is-current h3")
    frame(page, 12).focus()
    expect(current).to_have_text("Video 12")
    frame(page, 11).hover()
    expect(current).to_have_text("Video 11")
    expect(frame(page, 11).locator("img")).to_have_attribute("src", re.compile("content"))
    expect(frame(page, 12).locator("img")).to_have_attribute("src", re.compile("picture"))
    page.keyboard.press("r")
    expect(card(page, 11)).to_have_class(re.compile("is-reject"))
    expect(card(page, 12)).not_to_have_class(re.compile("is-reject"))

    expect(current).to_have_text("Video 10")  # the next one, and the resting pointer does not count
    page.keyboard.press("ArrowLeft")
    expect(current).to_have_text("Video 11")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("k")
    expect(card(page, 10)).to_have_class(re.compile("is-keep"))
    expect(card(page, 11)).to_have_class(re.compile("is-reject"))

    page.locator("#show").focus()
    frame(page, 9).hover()
    page.keyboard.press("k")
    expect(card(page, 9)).to_have_class(re.compile("is-keep"))
    expect(page.locator("#show")).to_have_value("open")
    expect(current).to_have_text("Video 8")
    page.locator("#show").focus()
    page.mouse.move(5, 5)
    expect(page.locator(".is-current")).to_have_count(0)


def test_new_results_wait_while_the_reader_works(desk: Watched, connection: redis.Redis, storage: Storage) -> None:
    page = desk.page
    first, behind = page.locator(".card h3").first, page.locator("#new-results")
    frame(page, 12).hover()
    make(connection, storage, 13, 14)
    expect(behind).to_have_text("2 new")
    page.keyboard.press("r")
    expect(card(page, 12)).to_have_class(re.compile("is-reject"))
    expect(first).to_have_text("Video 12")
    make(connection, storage, 15)
    expect(behind).to_have_text("3 new")
    behind.click()
    expect(first).to_have_text("Video 15")
    expect(behind).to_be_hidden()
    expect(page.locator(".card")).to_have_count(15)

    make(connection, storage, 16)  # the focus is in the grid
    expect(behind).to_have_text("1 new")
    page.mouse.move(5, 5)
    page.locator("#pause").focus()
    expect(first).to_have_text("Video 16")
    expect(behind).to_be_hidden()

    page.mouse.wheel(0, 2000)
    page.wait_for_function("() => document.querySelector('#cards').getBoundingClientRect().top < 0")
    make(connection, storage, 17)
    expect(behind).to_have_text("1 new")
    expect(behind).to_be_in_viewport()
    page.mouse.wheel(0, -2000)
    expect(first).to_have_text("Video 17")


def test_results_are_culled_while_new_ones_arrive(desk: Watched, connection: redis.Redis, storage: Storage) -> None:
    page = desk.page
    frame(page, 12).focus()
    for number in range(12, 0, -1):
        if number % 5 == 0:
            make(connection, storage, 100 + number)
            expect(page.locator("#new-results")).to_have_text(re.compile(r"\d new"))
        expect(page.locator(".is-current h3")).to_have_text(f"Video {number}")
        page.keyboard.press("k" if number % 3 == 0 else "r")
        expect(card(page, number).locator(".mark")).to_have_text("Kept" if number % 3 == 0 else "Rejected")
    expected = {number: b"reject" if number % 3 else b"keep" for number in range(1, 13)}
    wait_until(lambda: marks(connection, [f"{number:020x}" for number in expected]) == expected)
    assert connection.hlen(keys.VERDICTS) == 12


def test_select_all_means_all_that_match(
    browser: Any, server: Server, connection: redis.Redis, storage: Storage
) -> None:
    """Also those that are not loaded yet, of the results and of the queue."""
    ids = make(connection, storage, *range(1, 51))
    for number in range(110):
        enqueue(connection, JOB.model_copy(update={"name": f"Wait {number}", "seed": number}), f"waits-{number}")
    with watched_page(browser, server.url, viewport={"width": 1280, "height": 900}) as watched:
        page = watched.page
        expect(page.locator(".card").first).to_be_visible()
        assert page.locator(".card").count() < 50
        page.click("#pick-results")
        expect(page.locator("#num-picked-results")).to_have_text("50 selected")
        card(page, 49).locator("[data-part=pick]").uncheck()
        expect(page.locator("#num-picked-results")).to_have_text("49 selected")
        page.click("#keep-results")
        expect(card(page, 50)).to_have_class(re.compile("is-keep"))
        wait_until(lambda: marks(connection, ids) == dict.fromkeys({*range(1, 51)} - {49}, b"keep"))
        with page.expect_download() as found:
            page.click("#zip-results")
        assert found.value.suggested_filename.startswith("videos-")
        assert len(zipfile.ZipFile(io.BytesIO(Path(found.value.path()).read_bytes())).namelist()) == 49
        page.locator("#results-end").scroll_into_view_if_needed()
        expect(page.locator(".card")).to_have_count(50)
        expect(page.locator(".card [data-part=pick]:checked")).to_have_count(49)

        page.click("#pick-rows")
        expect(page.locator("#num-picked-rows")).to_have_text("110 selected")
        expect(page.locator("#front-rows")).to_be_disabled()
        page.click("#cancel-rows")
        expect(page.locator("#rows .row")).to_have_count(0)
        expect(page.locator("#num-picked-rows")).to_have_text("Select all")
        watched.forgive("404")  # of photos that are not there
        page.reload()  # ends the time to take it back
    wait_until(lambda: connection.llen("rq:queue:svdq-default") == 0)


def test_the_address_has_the_open_video_the_filter_and_the_grouping(desk: Watched) -> None:
    page = desk.page
    viewer, title = page.locator("#viewer"), page.locator("#viewer-title")
    frame(page, 12).click()
    expect(title).to_have_text("Video 12")
    page.keyboard.press("ArrowRight")
    expect(title).to_have_text("Video 11")
    page.go_back()
    expect(viewer).to_be_hidden()
    expect(page.locator(".card")).to_have_count(12)
    page.go_forward()
    expect(title).to_have_text("Video 11")
    page.keyboard.press("Escape")
    expect(viewer).to_be_hidden()
    page.wait_for_url(lambda url: "video=" not in url)  # the history goes back after the dialog

    frame(page, 10).focus()
    page.keyboard.press("k")
    expect(card(page, 10)).to_have_class(re.compile("is-keep"))
    page.select_option("#show", "keep")
    page.select_option("#group", "photo")
    expect(page.locator(".card")).to_have_count(1)
    frame(page, 10).click()
    page.reload()
    expect(title).to_have_text("Video 10")
    page.keyboard.press("Escape")
    expect(viewer).to_be_hidden()
    expect(page.locator("#show")).to_have_value("keep")
    expect(page.locator("#group")).to_have_value("photo")
    expect(page.locator(".card")).to_have_count(1)


def test_nothing_plays_by_itself_for_a_reader_who_prefers_less_motion(
    browser: Any, server: Server, connection: redis.Redis, storage: Storage
) -> None:
    make(connection, storage, 1)
    with watched_page(browser, server.url, reduced_motion="reduce") as watched:
        page = watched.page
        frame(page, 1).click()
        image = page.locator("#viewer-stage img")
        expect(image).to_have_attribute("src", re.compile("picture"))
        page.locator("#viewer-stage").get_by_role("button", name="Play").click()
        expect(image).to_have_attribute("src", re.compile("content"))


def test_verdicts_and_deletions_are_taken_back(desk: Watched, connection: redis.Redis, storage: Storage) -> None:
    page, toast = desk.page, desk.page.locator("#toast")
    num_files = len(list(storage.entries("outputs")))
    frame(page, 12).focus()
    page.keyboard.press("r")
    expect(toast).to_contain_text('"Video 12" rejected.')
    expect(page.locator("#reviewed")).to_have_text("1 of 12 reviewed")
    page.keyboard.press("u")
    expect(card(page, 12)).not_to_have_class(re.compile("is-reject"))
    expect(page.locator("#reviewed")).to_have_text("0 of 12 reviewed")

    for number in (12, 11):
        card(page, number).locator("[data-part=pick]").check()
    page.click("#delete-results")
    expect(page.locator(".card")).to_have_count(10)
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".card")).to_have_count(12)
    assert len(list(storage.entries("outputs"))) == num_files

    frame(page, 12).click()
    page.click("#viewer-delete")
    expect(page.locator("#viewer-title")).to_have_text("Video 11")
    expect(page.locator(".card")).to_have_count(11)
    page.keyboard.press("Escape")
    frame(page, 11).focus()
    page.keyboard.press("k")  # the next action makes it final
    wait_until(lambda: len(list(storage.entries("outputs"))) == num_files - 2)  # the video and its JSON
    page.reload()
    expect(page.locator(".card")).to_have_count(11)


def test_an_old_video_is_deleted_without_its_record(
    browser: Any, server: Server, connection: redis.Redis, storage: Storage
) -> None:
    make(connection, storage, 1, 2)
    for key in connection.scan_iter("rq:*"):
        connection.delete(key)
    with watched_page(browser, server.url) as watched:
        card(watched.page, 1).locator("[data-part=pick]").check()
        watched.page.click("#delete-results")
        watched.page.reload()
        wait_until(lambda: {entry.key.partition("-")[0] for entry in storage.entries("outputs")} == {"outputs/Video 2"})
        watched.page.reload()
        expect(watched.page.locator(".card h3")).to_have_text(["Video 2"])


def test_results_are_searched_grouped_and_selected_as_a_range(
    desk: Watched, connection: redis.Redis, storage: Storage
) -> None:
    page = desk.page
    page.fill("#search", "video 1")
    expect(page.locator(".card")).to_have_count(4)  # 1, 10, 11, 12
    page.reload()
    expect(page.locator("#search")).to_have_value("video 1")
    expect(page.locator(".card")).to_have_count(4)
    page.click("#pick-results")
    expect(page.locator("#num-picked-results")).to_have_text("4 selected")
    page.click("#pick-results")
    page.fill("#search", "")
    expect(page.locator(".card")).to_have_count(12)
    card(page, 11).locator("[data-part=pick]").click()
    card(page, 8).locator("[data-part=pick]").click(modifiers=["Shift"])
    expect(page.locator("#num-picked-results")).to_have_text("4 selected")
    card(page, 9).locator("[data-part=pick]").click(modifiers=["Shift"])
    expect(page.locator("#num-picked-results")).to_have_text("2 selected")
    finish(connection, storage, 50, name="Later", at=BEGIN + 86_400)
    page.reload()
    for kind in ("run", "day"):
        page.select_option("#group", kind)
        headings = page.locator(".group-heading")
        expect(headings).to_have_count(2)
        expect(headings.last).to_contain_text(": 12 videos")


def test_verdicts_reach_a_second_tab_and_come_from_a_comparison(desk: Watched, server: Server) -> None:
    page = desk.page
    other = page.context.new_page()
    other.goto(server.url)
    expect(other.locator(".card")).to_have_count(12)
    page.bring_to_front()  # a browser draws a hidden tab once a second
    for number in (12, 11, 10):
        card(page, number).locator("[data-part=pick]").check()
    page.click("#compare-results")
    expect(page.locator("#compare-play")).to_be_in_viewport()
    page.get_by_role("button", name="Keep Video 12, seed 12").click()
    page.get_by_role("button", name="Reject Video 11, seed 11").click()
    expect(card(other, 12)).to_have_class(re.compile("is-keep"))
    expect(card(other, 11)).to_have_class(re.compile("is-reject"))
    expect(other.locator("#reviewed")).to_have_text("2 of 12 reviewed")


def test_the_grid_takes_the_whole_width_and_its_actions_stay_in_sight(
    browser: Any, server: Server, connection: redis.Redis, storage: Storage
) -> None:
    make(connection, storage, *range(1, 31))
    with watched_page(browser, server.url, viewport={"width": 1920, "height": 1000}) as watched:
        page = watched.page
        page.check("#wide")
        box = page.locator("#cards").bounding_box()
        assert box["width"] > 1800
        page.locator("#thumb-size").fill("9")
        smaller = page.locator(".card").first.bounding_box()["width"]
        page.locator("#thumb-size").fill("25")
        assert page.locator(".card").first.bounding_box()["width"] > 1.5 * smaller
        page.locator(".card").last.scroll_into_view_if_needed()
        expect(page.locator("#keep-results")).to_be_in_viewport()


def test_the_button_upscales_kept_videos_only(desk: Watched, connection: redis.Redis) -> None:
    page, button = desk.page, desk.page.locator("#upscale-results")
    card(page, 12).locator("[data-part=pick]").check()
    expect(button).to_be_disabled()
    page.locator("#keep-results").click()
    expect(button).to_be_enabled()
    button.click()
    expect(page.locator("#results-problem")).to_contain_text("neither an mp4 nor kept latents")  # they are gifs


def test_only_the_viewer_has_sound_and_it_remembers_that(
    browser: Any, server: Server, connection: redis.Redis, storage: Storage
) -> None:
    make(connection, storage, 1, 2, formats=("mp4",))
    with watched_page(browser, server.url) as watched:
        page, video, title = watched.page, watched.page.locator("#viewer-stage video"), "#viewer-title"
        are_muted = "videos => videos.map((video) => video.muted)"

        def open_second() -> None:
            frame(page, 2).click()
            expect(page.locator(title)).to_have_text("Video 2")

        open_second()
        assert video.evaluate_all(are_muted) == [True]
        video.evaluate("video => { video.muted = false; }")  # as its controls do
        page.wait_for_function("() => localStorage.getItem('with-sound') === 'yes'")
        page.keyboard.press("ArrowRight")
        expect(page.locator(title)).to_have_text("Video 1")
        assert video.evaluate_all(are_muted) == [False]
        page.reload()
        expect(page.locator(title)).to_have_text("Video 1")
        page.keyboard.press("Escape")
        expect(page.locator("#viewer")).to_be_hidden()
        assert page.locator(".card video").evaluate_all(are_muted) == [True, True]
        for number in (1, 2):
            card(page, number).locator("[data-part=pick]").check()
        page.click("#compare-results")
        expect(page.locator("#compare video")).to_have_count(2)
        assert page.locator("#compare video").evaluate_all(are_muted) == [True, True]
        page.keyboard.press("Escape")
        open_second()
        assert video.evaluate_all(are_muted) == [False]
        video.evaluate("video => { video.muted = true; }")
        page.wait_for_function("() => localStorage.getItem('with-sound') === ''")
        page.keyboard.press("ArrowRight")
        assert video.evaluate_all(are_muted) == [True]
