"""Another prefix of RQ's keys keeps two svdq apart in one database; a cluster is refused."""

import socket
from pathlib import Path

import pytest

from tests.worker.own_redis import OwnRedis

pytestmark = pytest.mark.slow

CLUSTER = "is a node of a cluster, which svdq cannot use"


@pytest.mark.parametrize("prefix", ["studio", "{studio}"])
def test_a_prefix_keeps_two_svdq_apart(site, prefix: str) -> None:
    submit = ("submit", str(site.photo), "--frames", "2", "--steps", "4", "--size", "64x64", "--seed", "1")
    assert site.run("svdq", *submit).returncode == 0
    ours = {*site.connection.scan_iter()}
    other = {"RQ_KEY_PREFIX": prefix, "SVDQ_MODEL": "simulated:step_ms=1"}
    assert site.run("svdq", *submit, **other, SVDQ_OWNER="anna").returncode == 0
    assert site.run("svdq", *submit, "--force", **other, SVDQ_OWNER="ben").returncode == 0
    done = site.run("svdq", "worker", "--ranks", "1", "--burst", **other)
    assert done.returncode == 0, done.stderr
    assert "2 finished, 0 failed" in done.stdout + done.stderr
    theirs = {*site.connection.scan_iter()} - ours
    assert all(key.startswith(f"{prefix}:".encode()) for key in theirs), theirs
    assert site.queued() != []
    assert site.run("svdq", "list", "--status", "finished", "--json").stdout.count('"id"') == 0
    assert site.run("svdq", "list", "--status", "finished", "--json", **other).stdout.count('"id"') == 2


@pytest.mark.parametrize("command", ["list", "status"])
def test_a_prefix_that_rq_does_not_take_is_a_sentence(site, command: str) -> None:
    refused = site.run("svdq", command, RQ_KEY_PREFIX="a b")
    assert refused.returncode == 2
    assert refused.stderr.startswith("Error: RQ_KEY_PREFIX='a b' is not allowed: use letters, digits and _ . : - {")
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize("slots", [(0, 16383), (0, 8000)])
def test_a_cluster_is_refused(site, tmp_path: Path, slots: tuple[int, int]) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        bus = free.getsockname()[1]
    try:
        server = OwnRedis(folder, "--cluster-enabled", "yes", "--cluster-port", str(bus))
    except AssertionError as error:
        if "cluster-port" in str(error):
            pytest.skip("this machine's Redis server is older than 7.0, and takes no free port for its bus")
        raise
    try:
        with server.client(server.url()) as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", *slots)
        for command in (["submit", site.photo], ["worker", "--ranks", "1", "--model", "preview"]):
            refused = site.run("svdq", *command, SVDQ_REDIS_URL=server.url(), SVDQ_FAMILY="svd")
            assert refused.returncode == 3, refused.stderr
            assert CLUSTER in refused.stderr.splitlines()[-1]
    finally:
        server.stop()
