"""Ranks find each other in a store that still has what an earlier life of their group left there."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from svdq.pipeline.transport.meeting import Meeting, address_among_hosts, meet

LOOPBACK = "127.0.0.1"


def meet_all(store: HashStore, num_ranks: int) -> list[Meeting]:
    with ThreadPoolExecutor(num_ranks) as ranks:
        return list(ranks.map(lambda rank: meet(store, rank, num_ranks, LOOPBACK), range(num_ranks)))


def check_ring(met: list[Meeting]) -> None:
    """What a rank says to the one after it arrives there, and all have rank 0's word."""
    assert len({meeting.word for meeting in met}) == 1
    for rank, meeting in enumerate(met):
        meeting.following.sendall(bytes([rank]))
        assert met[(rank + 1) % len(met)].preceding.recv(1) == bytes([rank])
    for meeting in met:
        meeting.following.close()
        meeting.preceding.close()


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
def test_ranks_meet_and_meet_again_in_the_same_store(num_ranks: int) -> None:
    store = HashStore()
    first = meet_all(store, num_ranks)
    check_ring(first)
    again = meet_all(store, num_ranks)
    check_ring(again)
    assert first[0].word != again[0].word


def test_somebody_else_has_the_port_of_a_rank_that_is_gone() -> None:
    store = HashStore()
    with socket.create_server((LOOPBACK, 0)) as other, ThreadPoolExecutor(3) as pool:
        gone = {"address": LOOPBACK, "port": other.getsockname()[1], "secret": "0" * 32, "answer": "1" * 32}
        store.set("svdq/rank1", json.dumps(gone))
        first = pool.submit(meet, store, 0, 2, LOOPBACK)
        caller, _ = other.accept()  # rank 0 has taken it for its neighbour
        caller.sendall(b"220 mail.example.org ready to talk")
        second = pool.submit(meet, store, 1, 2, LOOPBACK)
        check_ring([first.result(60), second.result(60)])
        caller.close()


def test_whoever_does_not_know_the_secret_is_sent_away() -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(meet, store, 1, 2, LOOPBACK)
        where = json.loads(store.get("svdq/rank1"))
        with socket.create_connection((LOOPBACK, where["port"])) as stranger:
            stranger.sendall(b"x" * 32)
            assert stranger.recv(1) == b""
        first = pool.submit(meet, store, 0, 2, LOOPBACK)
        check_ring([first.result(60), second.result(60)])


def test_a_rank_listens_at_the_loopback_when_all_hosts_are_one() -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda rank: address_among_hosts(store, rank, 1 - rank, "localhost", 29400), range(2))
    assert set(found) <= {"127.0.0.1", "::1"}
