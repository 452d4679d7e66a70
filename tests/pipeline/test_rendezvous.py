"""Ranks connect to each other through an address book that still has what an earlier life of their group left there."""

import json
import socket
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from svdq.pipeline.transport.address_book import FolderBook, address_among_hosts
from svdq.pipeline.transport.rendezvous import Ring, agree, close_ring

LOOPBACK = "127.0.0.1"


@pytest.fixture
def book(tmp_path: Path) -> FolderBook:
    return FolderBook(tmp_path)


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path):
    """Where each rank listens."""
    return (lambda rank: str(tmp_path / f"rank{rank}.sock")) if request.param == "unix" else lambda rank: LOOPBACK


def close_all(book: FolderBook, num_ranks: int, address) -> list[Ring]:
    with ThreadPoolExecutor(num_ranks) as ranks:
        closed = ranks.map(
            lambda rank: close_ring(book, rank, num_ranks, address(rank), f"rank_info {rank}"), range(num_ranks)
        )
        return list(closed)


def check(rings: list[Ring]) -> None:
    """What a rank says to the one after it arrives there, and rank 0 knows what all have told."""
    assert rings[0].rank_info == tuple(f"rank_info {rank}" for rank in range(len(rings)))
    for rank, ring in enumerate(rings):
        ring.following.sendall(bytes([rank]))
        assert rings[(rank + 1) % len(rings)].preceding.recv(1) == bytes([rank])
    for ring in rings:
        ring.following.close()
        ring.preceding.close()


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
def test_ranks_connect_and_connect_again_through_the_same_book(
    book: FolderBook, address, num_ranks: int, tmp_path: Path
) -> None:
    check(close_all(book, num_ranks, address))
    check(close_all(book, num_ranks, address))
    assert not list(tmp_path.glob("*.sock")), "no rank listens any more"


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
def test_ranks_agree_on_what_rank_0_decides_and_connect_after_that(book: FolderBook, address, num_ranks: int) -> None:
    asked: list[tuple[str, ...]] = []

    def decide(rank_info: tuple[str, ...]) -> str:
        asked.append(rank_info)
        return "größe " * 100_000

    with ThreadPoolExecutor(num_ranks) as ranks:
        agreed = list(
            ranks.map(lambda rank: agree(book, rank, num_ranks, address(rank), f"{rank}", decide), range(num_ranks))
        )
    assert agreed == ["größe " * 100_000] * num_ranks
    assert asked == [tuple(f"{rank}" for rank in range(num_ranks))]
    check(close_all(book, num_ranks, address))


def test_sockets_of_killed_ranks_are_replaced(book: FolderBook, tmp_path: Path) -> None:
    for rank in range(2):
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(tmp_path / f"rank{rank}.sock"))
        gone = {"address": str(tmp_path / f"rank{rank}.sock"), "port": 0, "secret": "0" * 32, "answer": "1" * 32}
        book.publish(f"rank{rank}", json.dumps(gone))
    check(close_all(book, 2, lambda rank: str(tmp_path / f"rank{rank}.sock")))


def test_a_path_may_be_longer_than_the_address_of_a_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30) / ("longer" * 30)
    folder.mkdir(parents=True)
    check(close_all(FolderBook(folder), 3, lambda rank: str(folder / f"rank{rank}.sock")))


def test_another_program_has_the_port_of_a_rank_that_is_gone(book: FolderBook) -> None:
    with socket.create_server((LOOPBACK, 0)) as other, ThreadPoolExecutor(3) as pool:
        gone = {"address": LOOPBACK, "port": other.getsockname()[1], "secret": "0" * 32, "answer": "1" * 32}
        book.publish("rank1", json.dumps(gone))
        first = pool.submit(close_ring, book, 0, 2, LOOPBACK, "rank_info 0")
        caller, _ = other.accept()  # rank 0 has taken it for its neighbor
        caller.sendall(b"220 mail.example.org ready to talk")
        second = pool.submit(close_ring, book, 1, 2, LOOPBACK, "rank_info 1")
        check([first.result(60), second.result(60)])
        caller.close()


def connect_to(entry: dict) -> socket.socket:
    if not entry["port"]:
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(entry["address"])
        return stranger
    return socket.create_connection((entry["address"], entry["port"]))


def published(book: FolderBook, name: str) -> dict:
    while (entry := book.look_up(name)) is None:
        time.sleep(0.01)
    return json.loads(entry)


@pytest.mark.parametrize(
    "said",
    [
        b"x" * 32,
        pytest.param(None, id="the secret and then no hello"),
        pytest.param(b"\xff\xff\xff\xff", id="the secret and a hello of 4 GiB"),
        pytest.param(b"\x00\x00\x00\x02[]", id="the secret and another JSON"),
    ],
)
def test_a_stranger_is_sent_away(book: FolderBook, address, said: bytes | None) -> None:
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(close_ring, book, 1, 2, address(1), "rank_info 1")
        entry = published(book, "rank1")
        with connect_to(entry) as stranger:
            if said is None:
                stranger.sendall(entry["secret"].encode() + b"\x00\x00\x00\x05")
                stranger.shutdown(socket.SHUT_WR)
            else:
                stranger.sendall(said if len(said) == 32 else entry["secret"].encode() + said)
            assert stranger.recv(1) == b""
        first = pool.submit(close_ring, book, 0, 2, address(0), "rank_info 0")
        check([first.result(60), second.result(60)])


@pytest.fixture
def silent() -> Iterator[list[socket.socket]]:
    connections: list[socket.socket] = []
    yield connections
    for connection in connections:
        connection.close()


def test_silent_connections_delay_no_rank(book: FolderBook, address, silent: list[socket.socket]) -> None:
    """Each of them was waited for for 30 s, one after the other."""
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(close_ring, book, 1, 2, address(1), "rank_info 1")
        entry = published(book, "rank1")
        silent += [connect_to(entry) for _ in range(100)]
        silent[-1].sendall(b"x")
        started = time.monotonic()
        first = pool.submit(close_ring, book, 0, 2, address(0), "rank_info 0")
        rings = [first.result(60), second.result(60)]
        assert time.monotonic() - started < 20, "less than one of them could have taken"
        check(rings)


def test_what_is_published_is_for_this_user_alone(tmp_path: Path) -> None:
    """The folder keeps others away; a file keeps them away too when its folder was opened by mistake."""
    book = FolderBook(tmp_path)
    book.publish("rank0", "secret")
    assert stat.S_IMODE((tmp_path / "rank0").stat().st_mode) == 0o600


def test_a_rank_listens_at_the_loopback_when_all_hosts_are_one(book: FolderBook) -> None:
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda rank: address_among_hosts(book, rank, 1 - rank, "localhost", 29400), range(2))
    assert set(found) <= {"127.0.0.1", "::1"}
