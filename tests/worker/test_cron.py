"""The crontab line of docs/overnight.md under a real cron daemon: short windows, until all photos are videos.

cron runs in a mount namespace of its own, where it finds nobody's crontabs but the test's.
"""

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from PIL import Image

ROOT = Path(__file__).parent.parent.parent
CRONTAB = ROOT / "deploy/cron/crontab"
CRON = shutil.which("cron") or shutil.which("cron", path="/usr/sbin")
NUM_PHOTOS = 20
VIDEO_S = 2.0  # seconds of a video; 20 of them take longer than a window
WINDOW_S = 35  # seconds that a window is open; it opens every minute

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("own_server"),  # cron's jobs know a home only
    pytest.mark.skipif(CRON is None, reason="no cron daemon is installed (Debian: apt-get install cron)"),
]

#: Hides what this machine's cron would do, then becomes cron. $1: folder of crontabs, $2: an empty one, $3: a file.
HIDE = """
mount --make-rprivate / &&
mount --bind "$1" /var/spool/cron/crontabs && mount --bind "$2" /etc/cron.d && mount --bind "$3" /etc/crontab &&
mount -t tmpfs tmpfs /run && exec "$4" -f
"""


@pytest.fixture
def cron(tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Start a cron daemon with one crontab."""
    daemons: list[subprocess.Popen[bytes]] = []
    log = tmp_path / "cron.log"

    def start(crontab: str) -> None:
        for name in ("crontabs", "empty"):
            (tmp_path / name).mkdir()
        (tmp_path / "file").touch()
        table = tmp_path / "crontabs/root"
        table.write_text(crontab)
        table.chmod(0o600)
        with log.open("wb") as output:
            command = ["unshare", "--mount", "sh", "-c", HIDE, "sh"]
            places = [str(tmp_path / name) for name in ("crontabs", "empty", "file")]
            daemons.append(subprocess.Popen([*command, *places, str(CRON)], stdout=output, stderr=output))
        time.sleep(1.0)
        if daemons[0].poll() is not None:
            pytest.skip(f"no cron daemon of its own can be had here: {log.read_text().strip()}")

    yield start
    for daemon in daemons:
        for process in [*psutil.Process(daemon.pid).children(recursive=True), daemon]:
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                process.kill()
        daemon.wait()


def test_bursts_from_cron_render_all_photos(site, cron: Callable[[str], None], until: Callable[..., object]) -> None:
    jobs = []
    for number in range(NUM_PHOTOS):
        photo = site.folder / f"{number}.png"
        Image.new("RGB", (80, 60), (number, 0, 0)).save(photo)
        jobs.append(site.submit(photo=photo, steps=20))
    reports = site.folder / "reports"
    reports.mkdir()

    # The line that is shipped, with other times, and on the processor.
    text = CRONTAB.read_text()
    [line] = [line for line in text.splitlines() if "--burst" in line and not line.startswith("#")]
    line = line.replace("0 22 * * *", "* * * * *")
    assert "--until 06:00" in line
    line = line.replace("--until 06:00", f"--until $(date -d '+{WINDOW_S} seconds' +\\%H:\\%M:\\%S)")
    line = line.replace("--burst", "--burst --ranks 2 --device cpu")
    line = line.replace("$HOME/svdq-reports", str(reports)).replace("\\%F", "\\%s")
    variables = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "SVDQ_HOME": str(site.settings.home),
        "SVDQ_MODEL": f"simulated:step_ms={1000 * VIDEO_S / 10:.0f}",
    }
    cron("".join(f"{name}={value}\n" for name, value in variables.items()) + line + "\n")

    def told() -> list[dict]:
        return [json.loads(path.read_text()) for path in sorted(reports.glob("*.json"))]

    deadline = time.monotonic() + 500
    while sum(report["finished"] for report in told()) < NUM_PHOTOS:
        assert time.monotonic() < deadline, (told(), [path.read_text() for path in reports.glob("*.log")])
        time.sleep(0.5)

    # Each window adds up, and the next one takes the rest.
    left = NUM_PHOTOS
    for report in told():
        assert report["failed"] == report["canceled"] == report["left"]["started"] == 0
        assert report["finished"] + report["left"]["queued"] == left
        left = report["left"]["queued"]
    assert left == 0
    assert len(told()) >= 2
    assert "--until" not in told()[0]["ending"]
    assert "could be done by" in told()[0]["ending"] or "at the time given" in told()[0]["ending"]
    assert site.states(jobs) == ["finished"] * NUM_PHOTOS
    assert len(list((Path(site.settings.storage) / "outputs").glob("*.json"))) == NUM_PHOTOS
