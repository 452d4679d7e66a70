"""200 uploads at the same time with 50 open pages: none is lost, in bounded memory and time."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import redis

from tests.cli.serve.servers import Server

ROOT = Path(__file__).parents[3]
NUM_UPLOADS, NUM_PAGES = 200, 50
MAX_RSS = 300 * 2**20
#: On an idle machine; a busy one is slower, and the figures say how busy it was.
MAX_P99_MS = 250


class Phases:
    """Reads the lines of the load as they come."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.found: list[dict] = []
        self._process = process
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.found.append(json.loads(line))


@pytest.mark.long
def test_uploads_and_pages(server: Server, connection: redis.Redis, capsys: pytest.CaptureFixture[str]) -> None:
    process, peak = psutil.Process(server.process.pid), 0
    load = os.getloadavg()[0]
    command = [sys.executable, "-m", "tests.cli.serve.load", str(server.port), server.token]
    polls_ms: dict[str, list[float]] = {when: [] for when in WHEN}
    with subprocess.Popen(
        [*command, str(NUM_UPLOADS), str(NUM_PAGES)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as client:
        phases, video_id = Phases(client), ""
        while client.poll() is None:
            phase = WHEN[len(phases.found)]
            path = "/v1/videos?limit=20" if len(polls_ms[phase]) % 2 or not video_id else f"/v1/videos/{video_id}"
            began_at = time.monotonic()
            answer = server.get(path)
            polls_ms[phase].append(1000 * (time.monotonic() - began_at))
            assert answer.status == 200
            video_id = video_id or (answer.json.get("last_id") or "")
            peak = max(peak, process.memory_info().rss)
            time.sleep(0.01)
    [_, result] = phases.found
    shown = [f"p99 of {len(each)} polls {p99(each):.0f} ms {when}" for when, each in polls_ms.items()]
    with capsys.disabled():
        print(f"\n{len(result['ids'])} uploads, {result['num_bytes'] / 2**20:.0f} MiB, {max(result['seconds']):.1f} s")
        print(f"{'; '.join(shown)}; RSS {peak / 2**20:.0f} MiB; load {load:.1f} on {os.cpu_count()} cores")
    assert len(set(result["ids"])) == connection.llen("rq:queue:svdq-default") == NUM_UPLOADS
    assert result["num_events"] >= NUM_PAGES
    assert peak < MAX_RSS
    if load < 0.5:
        assert all(p99(each) < MAX_P99_MS for each in polls_ms.values())


WHEN = ("before", "during the uploads", "after them")


def p99(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
