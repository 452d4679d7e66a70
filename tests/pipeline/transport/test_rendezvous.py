"""Ranks connect to each other in a folder that still has what an earlier life of their group left there."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from svdq.pipeline.transport.rendezvous import Ring, agree, close_ring


def close_all(folder: Path, num_ranks: int) -> list[Ring]:
    with ThreadPoolExecutor(num_ranks) as ranks:
        return list(ranks.map(lambda rank: close_ring(folder, rank, num_ranks, f"rank_info {rank}"), range(num_ranks)))


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
def test_ranks_connect_and_connect_again_in_the_same_folder(tmp_path: Path, num_ranks: int) -> None:
    check(close_all(tmp_path, num_ranks))
    check(close_all(tmp_path, num_ranks))
    assert not list(tmp_path.iterdir()), "no rank listens any more"


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
def test_ranks_agree_on_what_rank_0_decides_and_connect_after_that(tmp_path: Path, num_ranks: int) -> None:
    asked: list[tuple[str, ...]] = []

    def decide(rank_info: tuple[str, ...]) -> str:
        asked.append(rank_info)
        return "größe " * 100_000

    def start(rank: int) -> tuple[str, Ring]:
        agreed = agree(tmp_path, rank, num_ranks, f"{rank}", decide)
        return agreed, close_ring(tmp_path, rank, num_ranks, f"rank_info {rank}")

    for _ in range(10):
        with ThreadPoolExecutor(num_ranks) as ranks:
            started = list(ranks.map(start, range(num_ranks)))
        assert [agreed for agreed, _ in started] == ["größe " * 100_000] * num_ranks
        assert asked.pop() == tuple(f"{rank}" for rank in range(num_ranks))
        check([ring for _, ring in started])


def test_sockets_of_killed_ranks_are_replaced(tmp_path: Path) -> None:
    for rank in range(2):
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(tmp_path / f"rank{rank}.sock"))
    check(close_all(tmp_path, 2))


def test_a_path_may_be_longer_than_the_address_of_a_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30) / ("longer" * 30)
    folder.mkdir(parents=True)
    check(close_all(folder, 3))
