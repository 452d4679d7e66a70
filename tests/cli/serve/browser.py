"""A real browser on a real page: Debian's chromium through Playwright, a server, a worker and a Redis of their own."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.cli.serve.servers import TOKEN
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
class House:
    """A home with photos, a Redis, a server and a worker."""

    folder: Path
    port: int = 0
    server: "subprocess.Popen[str] | None" = None
    worker: "subprocess.Popen[bytes] | None" = None

    @property
    def environment(self) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SVDQ_")}
        return {**clean, "SVDQ_HOME": str(self.folder / "home"), "SVDQ_SERVE_TOKEN": TOKEN}

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
        self.server = subprocess.Popen(
            [sys.executable, "-m", "svdq.cli", "serve", "--port", str(self.port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
            cwd=self.folder,
        )
        assert self.server.stdout is not None
        line = ""
        while not line.startswith("Serving"):
            line = self.server.stdout.readline()
            assert line, self.server.wait()
        found = re.search(r":(\d+)", line.removeprefix("Serving at http:"))
        assert found is not None
        self.port = int(found[1])

    def kill_server(self) -> None:
        assert self.server is not None
        self.server.kill()
        self.server.wait()
        assert self.server.stdout is not None
        self.server.stdout.close()

    def start_worker(self) -> None:
        log = (self.folder / "worker.log").open("wb")
        with log:
            self.worker = subprocess.Popen(
                [sys.executable, "-m", "svdq.cli", "worker", "--ranks", "1", "--device", "cpu"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                cwd=self.folder,
            )
        text = self.folder / "worker.log"
        wait_until(lambda: "Ready with" in text.read_text())

    def stop(self) -> None:
        if self.worker is not None:
            self.worker.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.worker.wait(60)
            self.worker.kill()
            self.worker.wait()
        if self.server is not None:
            self.kill_server()


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
def watched_page(browser: Any, url: str, **options: Any) -> Iterator[Watched]:
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
    page.goto(f"{url}/login?token={TOKEN}")
    page.locator("#pause").wait_for()
    try:
        yield watched
        assert watched.complaints == []
    finally:
        context.close()
