"""A real browser on a real page: Debian's chromium through Playwright, a server, a worker and a Redis of their own."""

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.cli.serve.servers import TOKEN
from tests.forks import Fork
from tests.waiting import wait_until

#: Names of Debian's and other systems' packages.
NAMES = ("chromium", "chromium-browser", "google-chrome")
#: Milliseconds for what a busy machine may take.
PATIENCE_MS = 60_000


def find_browser() -> str:
    """Return the path of a browser; skip the test if there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no browser: install Debian's package chromium")
    return found


@dataclass
class Site:
    """A home with photos, a Redis, a server and a worker."""

    folder: Path
    port: int = 0
    processes: dict[str, Fork] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def photo(self, name: str, color: str = "navy", size: tuple[int, int] = (96, 64)) -> Path:
        """A photo that is a gradient of one color."""
        path = self.folder / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        black = Image.new("RGB", size)
        Image.composite(Image.new("RGB", size, color), black, Image.linear_gradient("L").resize(size)).save(path)
        return path

    def start_server(self) -> None:
        """Start the server, on the port that it had before."""
        printed = self._start("Serving", "serve", "--port", str(self.port))
        self.port = int(printed.partition("http://127.0.0.1:")[2].partition("/")[0])

    def start_worker(self, num_ranks: int = 1) -> None:
        self._start("Ready with", "worker", "--ranks", str(num_ranks), "--device", "cpu")

    def kill_server(self) -> None:
        self.processes["serve"].kill()
        self.processes["serve"].wait()

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()

    def _start(self, ready: str, *arguments: str) -> str:
        """Start a command, and return what it has printed when it is ready."""
        log = self.folder / f"{arguments[0]}.log"
        log.write_text("")
        environment = {"SVDQ_HOME": str(self.folder / "home"), "SVDQ_SERVE_TOKEN": TOKEN}
        self.processes[arguments[0]] = Fork(arguments, log, log, folder=self.folder, **environment)
        wait_until(lambda: ready in log.read_text(), log.read_text)
        return log.read_text()


@dataclass
class Watched:
    """A page whose console is watched."""

    page: Any
    #: What the console said that it should not have.
    complaints: list[str] = field(default_factory=list)

    def forgive(self, pattern: str) -> None:
        """Drop the complaints that a test has caused on purpose."""
        self.complaints = [text for text in self.complaints if not re.search(pattern, text)]


@contextlib.contextmanager
def watched_page(browser: Any, url: str, token: str = TOKEN, **options: Any) -> Iterator[Watched]:
    """Open the page, logged in; fail if the console has an error or a violation of the CSP at the end."""
    context = browser.new_context(locale="en-GB", **options)
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    watched = Watched(page)
    page.on("console", lambda message: message.type == "error" and watched.complaints.append(message.text))
    page.on("pageerror", lambda error: watched.complaints.append(f"exception: {error}"))
    page.add_init_script(
        "addEventListener('securitypolicyviolation', (event) => console.error(`CSP: ${event.violatedDirective}`))"
    )
    page.goto(f"{url}/login?token={token}")
    page.wait_for_selector("#pause:not([hidden])", state="attached")
    try:
        yield watched
        assert watched.complaints == []
    finally:
        context.close()
