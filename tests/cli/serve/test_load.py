"""200 uploads at the same time with 50 open pages: none is lost, in bounded memory; prints how long they take."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import redis

from tests.cli.serve.servers import Server

ROOT = Path(__file__).parents[3]
NUM_UPLOADS, NUM_PAGES = 200, 50
MAX_RSS = 300 * 2**20


@pytest.mark.nightly
def test_uploads_and_pages(server: Server, connection: redis.Redis, capsys: pytest.CaptureFixture[str]) -> None:
    process, peak, load = psutil.Process(server.process.pid), 0, os.getloadavg()[0]
    command = [sys.executable, "-m", "tests.cli.serve.load", str(server.port), server.token]
    polls_ms: list[float] = []
    video_id = ""
    with subprocess.Popen(
        [*command, str(NUM_UPLOADS), str(NUM_PAGES)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as client:
        while client.poll() is None:
            path = "/v1/videos?limit=20" if len(polls_ms) % 2 or not video_id else f"/v1/videos/{video_id}"
            began_at = time.monotonic()
            answer = server.get(path)
            polls_ms.append(1000 * (time.monotonic() - began_at))
            assert answer.status == 200
            video_id = video_id or (answer.json.get("last_id") or "")
            peak = max(peak, process.memory_info().rss)
            time.sleep(0.01)
        assert client.stdout is not None
        result = json.load(client.stdout)
    p99_ms = sorted(polls_ms)[int(len(polls_ms) * 0.99)]
    with capsys.disabled():
        print(f"\n{len(result['ids'])} uploads, {result['num_bytes'] / 2**20:.0f} MiB, {max(result['seconds']):.1f} s")
        print(f"p99 of {len(polls_ms)} polls {p99_ms:.0f} ms; RSS {peak / 2**20:.0f} MiB; load {load:.1f}")
    assert len(set(result["ids"])) == connection.llen("rq:queue:svdq-default") == NUM_UPLOADS
    assert result["num_events"] >= NUM_PAGES
    assert peak < MAX_RSS
