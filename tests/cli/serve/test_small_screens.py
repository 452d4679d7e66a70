"""The page at 400% (a desk of 1280x1024 is then 320x256) and on a phone on its side: nothing is cut off or covered."""

from typing import Any

import pytest
import redis

from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from tests.cli.serve.browser import watched_page
from tests.cli.serve.ended import finish
from tests.cli.serve.servers import Server

sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright")
expect = sync_api.expect

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

#: Elements that stick out at a side, of what is shown.
CUT_OFF = """() => [...document.querySelectorAll('main *, header *, dialog[open] *')].filter((each) => {
  const box = each.getBoundingClientRect();
  return each.checkVisibility() && !each.closest('.sr') && (box.left < -1 || box.right > innerWidth + 1);
}).map((each) => each.outerHTML)"""
#: Whether an element is at its middle, not below another one.
IS_ON_TOP = """(element) => {
  element.scrollIntoView({ block: 'center', behavior: 'instant' });
  const box = element.getBoundingClientRect();
  const found = document.elementFromPoint(box.left + box.width / 2, box.top + box.height / 2);
  return element.contains(found);
}"""


@pytest.mark.parametrize(("width", "height"), [(320, 256), (844, 390)])
def test_nothing_is_cut_off_or_covered(
    browser: Any, server: Server, connection: redis.Redis, settings: Settings, width: int, height: int
) -> None:
    for number in range(3):
        finish(connection, Storage(settings.storage), number, name=f"A video with a long name {number}")
    expect.set_options(timeout=60_000)
    with watched_page(browser, server.url, viewport={"width": width, "height": height}) as watched:
        page = watched.page

        def check(*selectors: str) -> None:
            assert page.evaluate("() => document.documentElement.scrollWidth") == width
            assert page.evaluate(CUT_OFF) == []
            covered = [each for each in selectors if not page.locator(each).first.evaluate(IS_ON_TOP)]
            assert covered == []

        check("#choose-photos", "#svd-frames", "#priority", "#make", ".top form button")
        page.get_by_role("link", name="Now").last.click()
        check("#pause", "#figure-end")
        page.get_by_role("link", name="Skip to the results").focus()
        page.keyboard.press("Enter")
        expect(page.locator("#results")).to_be_focused()
        expect(page.locator(".card")).to_have_count(3)
        for number in range(3):
            page.locator(".card [data-part=pick]").nth(number).check()
        check("#show", "#search", "#compare-results", ".card .frame", ".card h3")
        page.click("#compare-results")
        check("#compare [data-close]", "#compared img", "#compared button", "#compare-play")
        page.keyboard.press("Escape")
        page.locator(".card .frame").first.click()
        check("#viewer [data-close]", "#viewer-stage", "#viewer-delete", "#change-value")
