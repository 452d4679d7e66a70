"""Videos in flight in a real browser, with a worker: how they look so far, the end of a batch, and a phone."""

import io
import re
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from svdq.producer.embedded_redis import stop_server
from tests.cli.serve.browser import Site, watched_page

sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright")
expect = sync_api.expect

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

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


@pytest.fixture(scope="module")
def site(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    expect.set_options(timeout=60_000)
    site = Site(tmp_path_factory.mktemp("page"))
    try:
        site.start_server()
        site.start_worker(num_ranks=2)
        yield site
    finally:
        site.stop()
        stop_server(site.folder / "home")


def make(page: Any, site: Site, name: str, **values: str) -> None:
    page.evaluate("document.querySelector('details.more').open = true")
    page.select_option("#svd-shape", "other")
    for field, value in {"width": "64", "height": "64", "frames": "4", "steps": "4", **values}.items():
        page.fill(f"#svd-{field}", value)
    page.set_input_files("#photos", site.photo(name, f"rgb({sum(map(ord, name)) % 256},90,90)"))
    page.click("#make")


def test_a_video_in_flight_shows_how_it_looks_so_far_and_one_variation_is_kept(browser: Any, site: Site) -> None:
    with watched_page(browser, site.url, viewport={"width": 1280, "height": 900}) as watched:
        page = watched.page
        found: dict[str, bytes] = {}
        page.on("response", lambda answer: "/preview/" in answer.url and found.setdefault(answer.url, answer.body()))
        page.fill("#variations", "2")
        make(page, site, "Twins.png", steps="1000", width="512", height="320", frames="14")
        flying = page.locator("#rows .row.is-started")
        expect(flying).to_have_count(2)
        one = flying.first
        seen: set[str] = set()
        while len(seen) < 3:
            expect(one.locator("img")).to_have_attribute("src", re.compile("/page/preview/"))
            seen.add(one.locator("img").get_attribute("src"))
            page.wait_for_timeout(200)
        pictures = set(found.values())
        assert len(pictures) >= 3
        for data in pictures:
            assert len(data) <= 10_000
            with Image.open(io.BytesIO(data)) as image:
                assert image.format == "WEBP"
        page.get_by_role("button", name="Keep this Twins").first.click()
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
        page.add_init_script(f"({NOTIFY})()")
        page.reload()
        page.wait_for_selector("#pause:not([hidden])", state="attached")
        make(page, site, "Batch.png", steps="100", width="512", height="512", frames="14")
        expect(page.locator("#rows .row")).to_have_count(1)
        expect(page.locator("#toast")).to_contain_text("All done: 1 video.")
        assert page.evaluate("window.notified") == []  # somebody sees the page
        page.evaluate("Object.defineProperty(document, 'hidden', { get: () => true })")
        make(page, site, "Batch 2.png", steps="100", width="512", height="512", frames="14")
        page.wait_for_function("() => window.notified.length === 1")
        assert page.evaluate("window.notified") == ["All done: 1 video."]


def test_a_phone_has_tabs_and_swipes(browser: Any, site: Site) -> None:
    options = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
    with watched_page(browser, site.url, **options) as watched:
        page = watched.page
        for name in ("One.png", "Two.png"):
            make(page, site, name)
        results = page.locator("#results")
        expect(results).to_be_hidden()
        page.get_by_role("link", name="Results").last.tap()
        expect(results).to_be_in_viewport()
        expect(page.locator("#add")).to_be_hidden()
        expect(page.locator(".card", has_text="Two")).to_be_visible()
        small = page.evaluate(
            "() => [...document.querySelectorAll('button, select, .top nav a')].filter((each) => each.checkVisibility()"
            " && each.getBoundingClientRect().height < 44).map((each) => each.outerHTML)"
        )
        assert small == []
        names = page.locator(".card h3").all_inner_texts()
        page.locator(".card .frame").first.tap()
        expect(page.locator("#viewer-title")).to_have_text(names[0])
        page.evaluate(SWIPE, 20)
        expect(page.locator("#viewer-title")).to_have_text(names[1])
        page.evaluate(SWIPE, 300)
        expect(page.locator("#viewer-title")).to_have_text(names[0])
