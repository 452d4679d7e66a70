"""All rules of axe-core for WCAG 2.2 A and AA, best practice and experimental ones, in every state of the page."""

from typing import Any

import pytest
import redis

from svdq.producer.queue import fetch
from svdq.producer.storage.storage import Storage
from tests.cli.serve.browser import watched_page
from tests.cli.serve.ended import finish
from tests.cli.serve.servers import Server
from tests.cli.serve.test_add import choose
from tests.queued import JOB, enqueue, fail, start
from tests.ranks import rank, save

sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright")
axe_core = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe-core")
expect = sync_api.expect

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

TAGS = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22a", "wcag22aa", "best-practice", "experimental")


@pytest.mark.parametrize(("scheme", "width"), [("dark", 360), ("light", 360), ("dark", 1280), ("light", 1280)])
def test_no_rule_is_violated(
    browser: Any, server: Server, connection: redis.Redis, storage: Storage, scheme: str, width: int
) -> None:
    expect.set_options(timeout=60_000)
    for number in range(2):
        finish(connection, storage, number, name=f"Video {number}")
    ids = [f"{letter * 20}" for letter in "abcd"]
    for number, job_id in enumerate(ids):
        enqueue(connection, JOB.model_copy(update={"seed": number, "name": "Cup"}), job_id)
    for job_id in ids[:2]:
        connection.lrem("rq:queue:svdq-default", 1, job_id)
    fail(fetch(connection, ids[0]))
    start(fetch(connection, ids[1]), step=1)
    # Of the far future, so that they answer as long as the test takes.
    save(connection, *(rank(number, device=f"cuda:{number}", at=4e9) for number in range(2)))
    axe, violations = axe_core.Axe(), set()

    def check(page: Any) -> None:
        # A bar that stays in sight would cover half of a button in the list below it.
        page.evaluate("scrollTo({ top: 0, behavior: 'instant' })")
        found = axe.run(page, options={"runOnly": {"type": "tag", "values": TAGS}}).response
        assert len(found["passes"]) > 15
        violations.update((each["id"], node["html"]) for each in found["violations"] for node in each["nodes"])

    options = {"viewport": {"width": width, "height": 740}, "has_touch": width < 1000, "is_mobile": width < 1000}
    with watched_page(browser, server.url, color_scheme=scheme, **options) as watched:
        page = watched.page
        page.select_option("#family", "wan")
        page.locator("details.more:visible summary").click()
        choose(page, "Lake.png", "Sky.png")
        expect(page.locator("#plan")).to_contain_text("2 photos have no prompt; they will move at random.")
        check(page)
        page.locator(".top nav a[href='#now']").click()
        expect(page.locator(".ranks li")).to_contain_text(["GPU 1", "GPU 2"])
        expect(page.get_by_role("button", name="Keep this one: Cup; cancels 2 others")).to_be_visible()
        check(page)
        page.locator(".top nav a[href='#results']").click()
        expect(page.get_by_role("button", name="Try again: Cup")).to_be_visible()
        for number in range(2):
            page.get_by_label(f"Select Video {number}", exact=True).check()
        check(page)
        page.click("#compare-results")
        check(page)
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Open Video 1").click()
        check(page)
        watched.forgive("404")  # of photos that are not there
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Log out").click()
        expect(page.get_by_label("Token")).to_be_visible()
        check(page)
        page.goto(server.url)
        assert page.url == f"{server.url}/login"
    assert violations == set()
