"""The page in a real browser, with a real server, Redis and preview worker."""

import io
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from svdq.producer.embedded_redis import stop_server
from tests.cli.serve.browser import Site, Watched, watched_page

sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright")
expect = sync_api.expect

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

#: Drops files on the page, as a person does.
DROP = """(files) => {
  const dataTransfer = new DataTransfer();
  for (const [name, base64] of files) {
    const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
    dataTransfer.items.add(new File([bytes], name));
  }
  for (const type of ['dragenter', 'dragover', 'drop']) {
    document.body.dispatchEvent(new DragEvent(type, { dataTransfer, bubbles: true, cancelable: true }));
  }
}"""


@pytest.fixture(scope="module")
def site(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("page"))
    try:
        site.start_server()
        site.start_worker()
        yield site
    finally:
        site.stop()
        stop_server(site.folder / "home")


@pytest.fixture
def desk(browser: Any, site: Site) -> Iterator[Watched]:
    """The page on a desk."""
    expect.set_options(timeout=60_000)
    with watched_page(browser, site.url, viewport={"width": 1280, "height": 900}) as watched:
        yield watched


def drop(page: Any, *paths: Path) -> None:
    import base64

    page.evaluate(DROP, [[path.name, base64.b64encode(path.read_bytes()).decode()] for path in paths])


def quick(page: Any, **more: str) -> None:
    """Ask for videos that take no time."""
    values = {"width": "64", "height": "64", "frames": "4", **more}
    page.evaluate("document.querySelector('details.more').open = true")
    page.select_option("#svd-shape", "other")
    for name, value in {"steps": "4", **values}.items():
        page.fill(f"#svd-{name}", value)


def have_results(page: Any, site: Site, number: int) -> None:
    """Make that many videos, unless an earlier test has made them."""
    quick(page)
    page.set_input_files("#photos", [site.photo(f"Any {n}.png", f"rgb(9,{n},9)") for n in range(number)])
    page.click("#make")
    expect(page.locator(".card", has_text="Any ")).to_have_count(number)


def names(page: Any) -> list[str]:
    return list(page.locator(".card h3").all_inner_texts())


def test_dropped_photos_become_videos_that_play(desk: Watched, site: Site, tmp_path: Path) -> None:
    page = desk.page
    text = tmp_path / "notes.txt"
    text.write_text("no photo")
    quick(page)
    drop(page, site.photo("Lake.jpg"), site.photo("Été.jpg", "green"), site.photo("Sky.jpg", "teal"), text)
    expect(page.locator("#plan")).to_contain_text("4 photos, 4 videos.")
    page.fill("#variations", "2")
    expect(page.locator("#plan")).to_contain_text(re.compile("4 photos . 2 = 8 videos"))
    page.fill("#variations", "1")
    page.click("#make")
    expect(page.locator("#upload-summary")).to_have_text("3 uploaded, 1 refused.")
    refused = page.locator("#upload-list .is-refused")
    expect(refused).to_contain_text("notes.txt")
    expect(refused).to_contain_text("is not a photo that can be read")
    desk.forgive("400")
    expect(page.locator(".card")).to_have_count(3)
    assert sorted(names(page)) == ["Lake", "Sky", "Été"]
    expect(page.locator("#num-left")).to_be_hidden()

    frame = page.locator(".card .frame").first
    frame.hover()
    page.wait_for_function("() => document.querySelector('.card video').currentTime > 0")
    page.mouse.move(0, 0)
    page.wait_for_function("() => document.querySelector('.card video').paused")

    drop(page, site.photo("Lake.jpg"))
    page.click("#make")
    expect(page.locator("#upload-list .is-done").last).to_contain_text("exists already, finished")


def test_a_folder_keeps_its_subfolders_and_leaves_other_files_out(desk: Watched, site: Site) -> None:
    page = desk.page
    quick(page)
    site.photo("holiday/Top.jpg", "indigo")
    site.photo("holiday/day 1/Below.jpg", "tomato")
    site.photo("holiday/@eaDir/Thumbnail.jpg", "tomato")
    (site.folder / "photos/holiday/list.txt").write_text("no photo")
    page.check("[data-family=svd] [data-checks=formats] [value=gif]")
    page.uncheck("[data-family=svd] [data-checks=formats] [value=mp4]")
    page.set_input_files("#folder-of-photos", site.folder / "photos/holiday")
    expect(page.locator("#upload-summary")).to_have_text("2 photos chosen, 2 other files left out.")
    page.click("#make")
    expect(page.locator("#upload-summary")).to_contain_text("2 uploaded")
    expect(page.locator(".card h3", has_text="Below")).to_be_visible()
    outputs = site.folder / "home/storage/outputs"
    assert [path.parent.name for path in outputs.rglob("Below-*.gif")] == ["day 1"]
    page.select_option("#group", "photo")
    expect(page.locator(".group-heading", has_text="holiday/day 1/Below.jpg: 1 video")).to_be_visible()
    image = page.locator(".card", has_text="Below").locator(".frame img")
    expect(image).to_have_attribute("src", re.compile("picture"))
    image.hover()
    expect(image).to_have_attribute("src", re.compile("content"))


def test_a_prompt_for_models_that_take_one(desk: Watched, site: Site) -> None:
    page = desk.page
    expect(page.locator("#wan-prompt")).to_be_hidden()
    page.select_option("#family", "wan")
    page.select_option("#wan-shape", "other")
    page.fill("#wan-prompt", "The fog lifts")
    for name, value in {"width": "64", "height": "64", "frames": "5"}.items():
        page.fill(f"#wan-{name}", value)
    page.set_input_files("#photos", site.photo("Fog.png", "silver"))
    page.click("#make")
    page.locator(".card", has_text="Fog").locator(".frame").click()
    expect(page.locator("#viewer-made")).to_contain_text("The fog lifts")


def test_pause_move_cancel_and_resume(desk: Watched, site: Site) -> None:
    page = desk.page
    page.click("#pause")
    expect(page.locator("#warnings")).to_contain_text("Paused: no new videos are started until you press Resume.")
    expect(page.locator("#pause")).to_have_text("Resume")
    quick(page)
    for number in range(1, 5):
        page.set_input_files("#photos", site.photo(f"Wait {number}.png", f"rgb({number * 50},0,0)"))
        page.click("#make")
        expect(page.locator("#rows .row")).to_have_count(number)
    titles = page.locator("#rows strong")
    expect(titles).to_have_text(["Wait 1", "Wait 2", "Wait 3", "Wait 4"])
    page.click("[aria-label='Move Wait 3 to the front']")
    expect(titles).to_have_text(["Wait 3", "Wait 1", "Wait 2", "Wait 4"])
    page.check("[aria-label='Select Wait 2']")
    page.check("[aria-label='Select Wait 4']")
    expect(page.locator("#num-picked-rows")).to_have_text("2 selected")
    page.click("#front-rows")
    expect(titles).to_have_text(["Wait 2", "Wait 4", "Wait 3", "Wait 1"])
    page.click("#cancel-rows")
    expect(titles).to_have_text(["Wait 3", "Wait 1"])
    page.click("[aria-label='Cancel Wait 1']")
    expect(titles).to_have_text(["Wait 3"])
    page.click("#pause")
    expect(page.locator(".card h3", has_text="Wait 3")).to_be_visible()
    expect(page.locator(".card h3", has_text="Wait 1")).to_have_count(0)


def test_a_video_in_progress_shows_its_steps_and_can_be_canceled(desk: Watched, site: Site) -> None:
    page = desk.page
    quick(page, steps="1000", width="512", height="512")
    page.select_option("#priority", "high")
    page.set_input_files("#photos", site.photo("Long.png"))
    page.click("#make")
    row = page.locator("#rows .row", has_text="Long")
    expect(row).to_contain_text(re.compile(r"step \d+ of 1000"))
    expect(page.locator("#groups")).to_contain_text("CPU")
    page.wait_for_function("() => document.querySelector('#rows progress').value > 0")
    page.click("[aria-label='Cancel Long']")
    expect(page.locator("#rows .row")).to_have_count(0)


def test_a_set_time_and_the_undo(desk: Watched, site: Site) -> None:
    page = desk.page
    quick(page)
    page.select_option("#start", "at")
    page.fill("#at", "22:00")
    page.set_input_files("#photos", site.photo("Later.png", "olive"))
    page.click("#make")
    row = page.locator("#rows .row", has_text="Later")
    expect(row).to_contain_text("waits for its time")
    expect(row).to_contain_text("22:00")
    page.click("#undo-uploads")
    expect(page.locator("#rows .row")).to_have_count(0)


def test_review_compare_download_and_repeat(desk: Watched, site: Site) -> None:
    page = desk.page
    quick(page, seed="5")
    page.fill("#variations", "3")
    page.set_input_files("#photos", site.photo("Trio.png", "maroon"))
    page.click("#make")
    cards = page.locator(".card", has=page.locator("h3", has_text="Trio"))
    expect(cards).to_have_count(3)

    cards.nth(0).locator("[data-part=keep]").click()
    cards.nth(1).locator("[data-part=reject]").click()
    expect(cards.nth(0)).to_contain_text("Kept")
    expect(cards.nth(1)).to_contain_text("Rejected")
    page.select_option("#show", "keep")
    expect(page.locator(".card")).to_have_count(1)
    page.select_option("#show", "reject")
    expect(page.locator(".card")).to_have_count(1)
    page.select_option("#show", "open")
    expect(cards).to_have_count(2)
    page.reload()
    expect(cards).to_have_count(2)
    page.select_option("#group", "photo")
    expect(page.locator(".group-heading", has_text="Trio.png: 2 videos")).to_be_visible()

    for number in range(2):
        cards.nth(number).locator("[data-part=pick]").check()
    page.click("#compare-results")
    page.wait_for_function(
        "() => { const [a, b] = document.querySelectorAll('#compare video');"
        " return a.currentTime > 0 && Math.abs(a.currentTime - b.currentTime) < 0.2; }"
    )
    expect(page.locator("#compare figcaption").first).to_contain_text("Seed")
    page.keyboard.press("Escape")
    expect(page.locator("#compare")).to_be_hidden()

    with page.expect_download() as found:
        page.click("#zip-results")
    assert found.value.suggested_filename.startswith("videos-")
    archive = zipfile.ZipFile(io.BytesIO(Path(found.value.path()).read_bytes()))
    assert archive.testzip() is None
    assert sorted(name.partition("-")[0] for name in archive.namelist()) == ["Trio", "Trio"]

    cards.nth(0).locator(".frame").click()
    expect(page.locator("#viewer-made")).to_contain_text("64")
    page.click("#viewer-again")
    expect(page.locator("#viewer-status")).to_have_text("Queued.")
    page.select_option("#change-name", "motion_bucket_id")
    page.fill("#change-value", "200")
    page.click("#change-form button")
    expect(page.locator("#viewer-status")).to_have_text("Queued.")
    page.fill("#change-value", "2000")
    page.click("#change-form button")
    expect(page.locator("#viewer-status")).to_contain_text("Motion 2000 is not allowed")
    desk.forgive("400")
    page.keyboard.press("Escape")
    expect(page.locator("#new-results")).to_have_text("2 new")
    page.click("#new-results")
    expect(cards).to_have_count(4)


def test_everything_from_the_keyboard(desk: Watched, site: Site) -> None:
    page = desk.page
    have_results(page, site, 2)
    quick(page, motion_bucket_id="99")
    page.set_input_files("#photos", site.photo("Keys.png", "purple"))
    page.locator("#svd-motion_bucket_id").focus()
    page.keyboard.press("Enter")  # sends the form
    first = page.locator(".card .frame").first
    expect(page.locator(".card h3").first).to_have_text("Keys")

    page.locator("#show").focus()
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("() => document.activeElement.matches('.card .frame')"):
            break
    expect(first).to_be_focused()
    page.wait_for_function("() => document.querySelector('.card video').currentTime > 0")
    second = page.locator(".card .frame").nth(1)
    page.keyboard.press("k")
    expect(page.locator(".card").first).to_contain_text("Kept")
    expect(second).to_be_focused()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("r")
    expect(page.locator(".card").first).to_contain_text("Rejected")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("r")  # the same again takes it back
    expect(page.locator(".card .mark").first).to_have_text("")
    expect(first).to_be_focused()
    page.keyboard.press("Space")
    page.wait_for_function("() => document.querySelector('.card video').paused")
    page.keyboard.press("ArrowRight")
    expect(second).to_be_focused()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    expect(page.locator("#viewer-title")).to_have_text("Keys")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#viewer-title")).not_to_have_text("Keys")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#viewer-title")).to_have_text("Keys")
    page.keyboard.press("Escape")
    expect(page.locator("#viewer")).to_be_hidden()
    for _ in range(2):
        page.locator("#pause").focus()
        before = page.locator("#pause").inner_text()
        page.keyboard.press("Space")
        expect(page.locator("#pause")).not_to_have_text(before)
        expect(page.locator("#pause")).to_be_focused()


@pytest.mark.parametrize(("scheme", "width"), [("light", 360), ("dark", 360), ("light", 1280)])
def test_a_phone_and_the_accessibility_rules(browser: Any, site: Site, scheme: str, width: int) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe-core").Axe()
    options = {"viewport": {"width": width, "height": 740}, "has_touch": True, "is_mobile": True}
    with watched_page(browser, site.url, color_scheme=scheme, **options) as watched:
        page = watched.page
        have_results(page, site, 2)
        page.set_input_files("#photos", site.photo("A name that is far too long for the screen of a phone.png"))
        for tab in ("Add", "Now", "Results"):
            page.get_by_role("link", name=tab, exact=False).last.tap()
            assert page.evaluate("() => document.documentElement.scrollWidth") == width
            check_rules(axe, page)
        page.locator(".card .frame").first.tap()
        expect(page.locator("#viewer")).to_be_visible()
        check_rules(axe, page)
        assert page.evaluate("() => document.documentElement.scrollWidth") == width


def check_rules(axe: Any, page: Any) -> None:
    """Assert that the page breaks no serious rule of axe-core."""
    found = axe.run(page).response
    assert len(found["passes"]) > 10
    serious = [each for each in found["violations"] if each["impact"] in ("serious", "critical")]
    assert [(each["id"], each["nodes"][0]["html"]) for each in serious] == []


def test_a_lost_connection_is_shown_and_recovers(desk: Watched, site: Site) -> None:
    page = desk.page
    quick(page)
    page.set_input_files("#photos", site.photo("Bridge.png", "gray"))
    site.kill_server()
    expect(page.locator("#connection")).to_contain_text("The connection to svdq is lost since")
    page.click("#make")
    expect(page.locator("#upload-summary")).to_contain_text("1 to upload. svdq cannot be reached. Trying again at")
    page.click("#pause")
    expect(page.locator("#now-problem")).to_have_text("svdq cannot be reached.")
    site.start_server()
    expect(page.locator("#connection")).to_have_text("Connected again.")
    expect(page.locator("#now-problem")).to_have_text("")
    expect(page.locator("#upload-summary")).to_have_text("1 uploaded.")
    expect(page.locator(".card h3", has_text="Bridge")).to_be_visible()
    expect(page.locator("#connection")).to_be_hidden()
    desk.forgive("ERR_|Failed to load resource")


#: Keeps the connections of a page, and lets a test hide it: a browser without a screen never does.
HIDE = """() => {
  const { EventSource } = window;
  window.sources = [];
  window.EventSource = function (url) {
    const source = new EventSource(url);
    window.sources.push(source);
    return source;
  };
  let isHidden = false;
  Object.defineProperty(document, 'hidden', { get: () => isHidden });
  window.hide = (value) => { isHidden = value; document.dispatchEvent(new Event('visibilitychange')); };
}"""
NUM_OPEN = "() => window.sources.filter((source) => source.readyState < 2).length"


def test_a_hidden_page_has_no_connection_and_a_shown_one_is_up_to_date(browser: Any, site: Site) -> None:
    """A browser has six connections for each server: a seventh tab showed nothing."""
    with watched_page(browser, site.url) as watched:
        page = watched.page
        page.add_init_script(f"({HIDE})()")
        page.reload()
        page.wait_for_function("() => document.querySelector('#figure-waiting').textContent !== '…'")
        assert page.evaluate(NUM_OPEN) == 1
        page.evaluate("hide(true)")
        assert page.evaluate(NUM_OPEN) == 0
        page.wait_for_timeout(8000)  # longer than a page waits before it shows that the connection is lost
        assert page.evaluate(NUM_OPEN) == 0
        expect(page.locator("#connection")).to_be_hidden()
        page.evaluate("hide(false)")
        assert page.evaluate(NUM_OPEN) == 1
        page.locator("#pause").click()
        expect(page.locator("#warnings")).to_contain_text("Paused")
        page.get_by_role("button", name="Resume").click()
        expect(page.locator("#warnings")).not_to_contain_text("Paused")
