"""A group of ranks follows the folders, names, times and orders of `svdq submit`."""

import json
from pathlib import Path

import pytest

from svdq.producer.queue import fetch
from tests.conftest import Cli
from tests.worker.conftest import Site

pytestmark = pytest.mark.long

SMALL = ("--frames", 2, "--steps", 4, "--size", "64x64", "--format", "gif", "--json")


def submitted(site: Site, svdq: Cli, *arguments: object) -> dict[str, object]:
    done = svdq("submit", site.photo, *SMALL, *arguments)
    assert done.returncode == 0, done.stderr
    made: dict[str, object] = json.loads(done.stdout)
    return made


def test_folder_name_time_and_order(site: Site, svdq: Cli) -> None:
    first = submitted(site, svdq, "--output", "trip/day 1", "--name", "{stem}-{seed}", "--seed", 3)
    after = submitted(site, svdq, "--depends-on", first["id"], "--priority", "high")
    later = submitted(site, svdq, "--at", "+1s", "--seed", 4)
    assert [made["status"] for made in (first, after, later)] == ["queued", "deferred", "scheduled"]
    site.start(1)
    views = site.wait([str(made["id"]) for made in (first, after, later)])
    assert [view.status for view in views] == ["finished"] * 3
    before, behind = (fetch(site.connection, str(made["id"])) for made in (first, after))
    assert before.ended_at < behind.started_at
    (gif,) = views[0].outputs
    folder = Path(site.settings.storage, "outputs", "trip", "day 1")
    assert Path(gif) == folder / f"{site.photo.stem}-3-{first['id']}.gif"
    assert {path.suffix for path in folder.iterdir()} == {".gif", ".json"}

    assert svdq("retry", first["id"], "--force").returncode == 0
    assert site.wait([str(first["id"])])[0].outputs == (gif,)
