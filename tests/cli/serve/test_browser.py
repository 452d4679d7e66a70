"""The page in a real browser, with a real server, Redis and preview worker."""

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from svdq.producer.embedded_redis import stop_server
from tests.cli.serve.browser import Site, Watched, watched_page
from tests.waiting import wait_until

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


#: Keeps the notifications of a page, which may show them.
NOTIFY = """() => {
  window.notified = [];
  window.Notification = class extends EventTarget {
    static permission = "granted";
    constructor(title, { body }) { super(); window.notified.push(body); }
  };
}"""
#: Moves a finger over the open video.
SWIPE = """(to) => {
  const stage = document.querySelector("#viewer-stage");
  for (const [type, x] of [["touchstart", 150], ["touchend", to]]) {
    const touch = new Touch({ identifier: 1, target: stage, clientX: x, clientY: 100 });
    stage.dispatchEvent(new TouchEvent(type, { touches: type === "touchend" ? [] : [touch], changedTouches: [touch] }));
  }
}"""


#: Buttons that are too low for a finger.
SMALL_BUTTONS = """() => [...document.querySelectorAll('button, select, .top nav a')]
  .filter((each) => each.checkVisibility() && each.getBoundingClientRect().height < 44).map((each) => each.outerHTML)"""


@pytest.fixture(scope="module")
def site(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("page"))
    try:
        site.start_server()
        site.start_worker(num_ranks=2)
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


def test_review_compare_and_repeat(desk: Watched, site: Site) -> None:
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
    page.keyboard.press("r")  # it stays
    expect(page.locator(".card").first).to_contain_text("Rejected")
    expect(second).to_be_focused()
    page.keyboard.press("u")
    expect(page.locator(".card").first).to_contain_text("Kept")
    expect(first).to_be_focused()
    page.keyboard.press("u")
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


@pytest.mark.parametrize(("scheme", "width"), [("dark", 360), ("light", 1280)])
def test_the_page_on_a_phone(browser: Any, site: Site, scheme: str, width: int) -> None:
    options = {"viewport": {"width": width, "height": 740}, "has_touch": True, "is_mobile": True}
    with watched_page(browser, site.url, color_scheme=scheme, **options) as watched:
        page = watched.page
        have_results(page, site, 2)
        page.set_input_files("#photos", site.photo("A name that is far too long for the screen of a phone.png"))
        for tab in ("Add", "Now", "Results"):
            page.get_by_role("link", name=tab, exact=False).last.tap()
            expect(page.locator(f"#{tab.lower()}")).to_be_in_viewport()
            assert page.evaluate("() => document.documentElement.scrollWidth") == width
        if width == 360:
            expect(page.locator("#add")).to_be_hidden()
            assert page.evaluate(SMALL_BUTTONS) == []
        names = page.locator(".card h3").all_inner_texts()
        page.locator(".card .frame").first.tap()
        expect(page.locator("#viewer-title")).to_have_text(names[0])
        assert page.evaluate("() => document.documentElement.scrollWidth") == width
        page.evaluate(SWIPE, 20)
        expect(page.locator("#viewer-title")).to_have_text(names[1])
        page.evaluate(SWIPE, 300)
        expect(page.locator("#viewer-title")).to_have_text(names[0])


def test_a_video_in_flight_shows_a_preview_and_one_variation_is_kept(desk: Watched, site: Site) -> None:
    page = desk.page
    found: dict[str, bytes] = {}
    page.on("response", lambda answer: "/preview/" in answer.url and found.setdefault(answer.url, answer.body()))
    quick(page, steps="1000", width="512", height="320", frames="14")
    page.fill("#variations", "2")
    page.select_option("#priority", "high")
    page.set_input_files("#photos", site.photo("Twins.png"))
    page.click("#make")
    flying = page.locator("#rows .row.is-started")
    expect(flying).to_have_count(2)
    one = flying.first
    expect(one).to_contain_text(re.compile(r"step \d+ of 1000"))
    expect(page.locator("#groups")).to_contain_text("CPU")
    page.wait_for_function("() => document.querySelector('#rows progress').value > 0")
    seen: set[str] = set()
    while len(seen) < 2:
        expect(one.locator("img")).to_have_attribute("src", re.compile("/page/preview/"))
        seen.add(one.locator("img").get_attribute("src"))
        page.wait_for_timeout(200)
    for data in found.values():
        assert len(data) <= 10_000
        with Image.open(io.BytesIO(data)) as image:
            assert image.format == "WEBP"
    assert len({*found.values()}) >= 2
    page.get_by_role("button", name="Keep this one: Twins").first.click()
    expect(flying).to_have_count(1)
    page.get_by_role("button", name="Pause").click()  # the next action makes it final
    page.get_by_role("button", name="Resume").click()
    page.reload()
    expect(flying).to_have_count(1)
    page.click("[aria-label='Cancel Twins']")
    page.reload()
    expect(page.locator("#rows .row")).to_have_count(0)


def test_the_end_of_a_batch_is_announced(browser: Any, site: Site) -> None:
    with watched_page(browser, site.url) as watched:
        page = watched.page
        page.clock.install()
        page.add_init_script(f"({NOTIFY})()")
        page.reload()
        for is_hidden in (False, True):
            page.click("#pause")
            quick(page)
            page.set_input_files("#photos", site.photo(f"Batch {is_hidden}.png", "gold" if is_hidden else "plum"))
            page.click("#make")
            expect(page.locator("#rows .row")).to_have_count(1)
            if is_hidden:
                page.evaluate("Object.defineProperty(document, 'hidden', { get: () => true })")
            page.click("#pause")
            if not is_hidden:
                expect(page.locator("#toast")).to_contain_text("All done: 1 video.")
                assert page.evaluate("window.notified") == []  # somebody sees the page

        def notified() -> Any:
            page.clock.fast_forward(20_000)  # as long as a hidden page waits between two looks
            return page.evaluate("window.notified")

        assert wait_until(notified) == ["All done: 1 video."]


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
        page.clock.install()
        page.add_init_script(f"({HIDE})()")
        page.reload()
        page.wait_for_function("() => document.querySelector('#figure-waiting').textContent !== '…'")
        assert page.evaluate(NUM_OPEN) == 1
        page.evaluate("hide(true)")
        assert page.evaluate(NUM_OPEN) == 0
        page.clock.fast_forward(8000)  # longer than a page waits before it shows that the connection is lost
        assert page.evaluate(NUM_OPEN) == 0
        expect(page.locator("#connection")).to_be_hidden()
        page.evaluate("hide(false)")
        assert page.evaluate(NUM_OPEN) == 1
        page.locator("#pause").click()
        expect(page.locator("#warnings")).to_contain_text("Paused")
        page.get_by_role("button", name="Resume").click()
        expect(page.locator("#warnings")).not_to_contain_text("Paused")


def test_the_gpu_is_freed_until_resume(desk: Watched, site: Site) -> None:
    page = desk.page
    page.get_by_role("button", name="Free the GPU").click()
    expect(page.locator("#warnings")).to_contain_text("the GPUs are left to other programs until you press Resume.")
    expect(page.locator("#free")).to_be_hidden()
    expect(page.locator("#groups")).to_contain_text("freed")
    quick(page)
    page.set_input_files("#photos", site.photo("Heron.png", "teal"))
    page.click("#make")
    expect(page.locator("#rows .row", has_text="Heron")).to_contain_text("next")
    page.get_by_role("button", name="Resume").click()
    expect(page.locator(".card h3", has_text="Heron")).to_be_visible()
    expect(page.locator("#free")).to_be_visible()
