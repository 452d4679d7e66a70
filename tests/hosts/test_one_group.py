"""One group over two hosts: the bits of one rank, a cable that is pulled, a host that is switched off, a poison job."""

import json
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from svdq.producer.queue import connect
from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from tests.hosts.conftest import Lan, Running
from tests.hosts.network import Host
from tests.waiting import wait_until
from tests.worker.conftest import House
from tests.worker.test_recovery import leftovers

READY = "Ready with"
SIMULATED = "simulated:step_ms=50"
#: For a model that takes 2 ms a step: longer than rank 0 takes to fetch the next photo, so that all ranks are needed,
#: and in flight when a cable is pulled.
VIDEO = {"steps": 1000, "frames": 8, "formats": ("png",)}


def start(lan: Lan, host: Host, ranks: int, *options: str, model: str = "preview", at: str = "alpha") -> Running:
    """Start a host's part of the group, as a user does: the same line on each."""
    meeting = ("--nnodes", 2, "--rdzv-endpoint", f"{at}:29400")
    return lan.start(host, "svdq", "worker", "--ranks", ranks, "--device", "cpu", *meeting, *options, SVDQ_MODEL=model)


def start_both(lan: Lan, ranks: int, *options: str, model: str = "preview") -> list[Running]:
    parts = [start(lan, host, ranks, *options, model=model) for host in (lan.alpha, lan.beta)]
    wait_ready(lan, parts, 1)
    return parts


def wait_ready(lan: Lan, parts: list[Running], times: int) -> None:
    """Wait until the group has begun so often; the host of rank 0 says it."""
    wait_until(lambda: sum(part.text.count(READY) for part in parts) >= times, lan.all_text)


def check(lan: Lan, jobs: list[str]) -> None:
    house = lan.house
    views = house.wait(jobs)
    assert [view.status for view in views] == ["finished"] * len(jobs), lan.all_text()
    assert {house.connection.hget(f"rq:job:{job_id}", "retries_left") for job_id in jobs} == {b"3"}
    names = {entry.key for entry in Storage(house.settings.storage).entries("outputs") if entry.key.endswith(".json")}
    assert names == {f"outputs/photo-{job_id}.json" for job_id in jobs}


def pictures(storage: Storage, job_id: str) -> np.ndarray:
    """The frames of a finished video, (F, H, W, 3)."""
    keys = sorted(entry.key for entry in storage.entries(f"outputs/photo-{job_id}") if entry.key.endswith(".png"))
    return np.stack([np.asarray(Image.open(BytesIO(storage.read(key)))) for key in keys])


def rendered_by_one_rank(lan: Lan, seeds: list[int], video: dict[str, object]) -> list[np.ndarray]:
    """Make the same videos on this machine, without any network."""
    home = lan.house.folder / "alone"
    settings = Settings(home=home, redis_url=None, storage=str(home / "storage"))
    alone = House(lan.house.folder, settings, connect(settings), lan.house.photo)
    try:
        jobs = [alone.submit(seed=seed, **video) for seed in seeds]
        environment = {"SVDQ_HOME": str(home), "SVDQ_STORAGE": settings.storage}
        group = alone.start(1, "--burst", wait=False, **environment)
        assert group.end() == 0, group.text
        return [pictures(Storage(settings.storage), job_id) for job_id in jobs]
    finally:
        alone.leave()


def check_bits(lan: Lan, jobs: list[str], expected: list[np.ndarray], *, num_ranks: int) -> None:
    """All jobs finish with the frames of one rank, every rank has worked, and videos have passed from host to host."""
    check(lan, jobs)
    storage = Storage(lan.house.settings.storage)
    ranks = []
    for job_id, frames in zip(jobs, expected, strict=True):
        assert frames.std() > 5, "a picture without contrast would compare equal to anything alike"
        np.testing.assert_array_equal(pictures(storage, job_id), frames)
        sidecar = json.loads(storage.read(f"outputs/photo-{job_id}.json"))
        assert sidecar["group"]["ranks"] == num_ranks
        ranks.append({stage["rank"] for stage in sidecar["stages"]})
    assert set.union(*ranks) == {*range(num_ranks)}
    assert any(min(found) < num_ranks // 2 <= max(found) for found in ranks), ranks


def stop(parts: list[Running]) -> None:
    for part in parts:
        part.process.terminate()
    for part in parts:
        assert part.end() == 0, part.text


@pytest.mark.long
def test_two_hosts_make_the_bits_of_one_rank(lan: Lan) -> None:
    # More than ranks, and an odd number: the plan divides videos between the hosts.
    seeds = list(range(5))
    jobs = [lan.house.submit(seed=seed, **VIDEO) for seed in seeds]
    parts = [start(lan, host, 1, "--burst", at=lan.alpha.address) for host in (lan.alpha, lan.beta)]
    expected = rendered_by_one_rank(lan, seeds, VIDEO)
    check_bits(lan, jobs, expected, num_ranks=2)
    assert [part.end() for part in parts] == [0, 0], lan.all_text()


@pytest.mark.long
def test_a_pulled_cable_stops_the_group_until_it_is_back(lan: Lan) -> None:
    house, seeds = lan.house, list(range(8))
    expected = rendered_by_one_rank(lan, seeds, VIDEO)
    jobs = [house.submit(seed=seed, **VIDEO) for seed in seeds]
    parts = start_both(lan, 2)
    wait_until(lambda: "finished" in house.states(jobs), lan.all_text)
    lan.beta.pull_cable()
    # Neither side goes on alone, and none waits for ever for the other: all ranks end, to be started again.
    wait_until(lambda: not any(part.ranks() for part in parts), lan.all_text)
    assert "started" in house.states(jobs)
    lan.beta.plug_in()
    wait_ready(lan, parts, 2)
    check_bits(lan, jobs, expected, num_ranks=4)
    stop(parts)
    assert leftovers(house.connection) == []


@pytest.mark.long
@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_a_host_that_is_switched_off_comes_back(lan: Lan, name: str) -> None:
    """alpha keeps the store in which the hosts meet; rank 0 is on beta."""
    house = lan.house
    parts = start_both(lan, 1, model=SIMULATED)
    jobs = [house.submit(steps=40) for _ in range(6)]
    wait_until(lambda: "finished" in house.states(jobs), lan.all_text)
    lan.network.hosts[name].end()
    wait_until(lambda: not any(part.ranks() for part in parts if part.nsenter.poll() is None), lan.all_text)
    parts.append(start(lan, lan.network.boot(name), 1, model=SIMULATED))
    wait_ready(lan, parts, 2)
    check(lan, jobs)
    stop([part for part in parts if part.nsenter.poll() is None])
    assert leftovers(house.connection) == []


@pytest.mark.long
def test_a_job_that_kills_its_rank_on_another_host_is_set_aside(lan: Lan) -> None:
    """Rank 0 has no part in it: it dies on the host of rank 1."""
    parts = start_both(lan, 1, model="simulated:step_ms=20,kill_seed=13")
    jobs = [lan.house.submit(steps=4, seed=seed) for seed in (1, 2, 13, 3, 4)]
    views = lan.house.wait(jobs)
    assert [view.status for view in views] == ["finished", "finished", "failed", "finished", "finished"], lan.all_text()
    assert "died 2 times" in views[2].error
    stop(parts)
    assert leftovers(lan.house.connection) == []
