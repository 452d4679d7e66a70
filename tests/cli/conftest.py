"""A browser, for the tests of pages."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cli.serve.browser import find_browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright")
    path = find_browser()
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
