"""Ranks connect to each other in a folder that still has what an earlier life of their group left there."""

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from svdq.pipeline.transport.message import Kind, Message
from svdq.pipeline.transport.topology import Links, Topology, agree, join


def join_rank(folder: Path, rank: int, num_ranks: int) -> Links:
    topology = Topology(rank=rank, num_ranks=num_ranks)
    return join(topology, torch.device("cpu"), folder=folder, rank_info=f"rank_info {rank}")


def all_ranks(num_ranks: int, start: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(num_ranks) as ranks:
        return list(ranks.map(start, range(num_ranks)))


def check(links: list[Links]) -> None:
    """The message of a rank arrives at the one after it, and the reports of all at rank 0."""
    assert links[0].rank_info == tuple(f"rank_info {rank}" for rank in range(len(links)))
    for rank, link in enumerate(links):
        assert link.outgoing is not None
        assert link.outgoing.begin(Message(kind=Kind.WORK, body={"from": rank})) is None
        incoming = links[(rank + 1) % len(links)].incoming
        assert incoming is not None
        assert incoming.receive().body == {"from": rank}
    for link in links:
        assert link.outgoing is not None
        assert link.incoming is not None
        link.outgoing.close()
        link.incoming.close()


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
def test_ranks_connect_and_connect_again_in_the_same_folder(tmp_path: Path, num_ranks: int) -> None:
    check(all_ranks(num_ranks, lambda rank: join_rank(tmp_path, rank, num_ranks)))
    check(all_ranks(num_ranks, lambda rank: join_rank(tmp_path, rank, num_ranks)))
    assert not list(tmp_path.iterdir()), "no rank listens any more"


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
def test_ranks_agree_on_what_rank_0_decides_and_connect_after_that(tmp_path: Path, num_ranks: int) -> None:
    asked: list[tuple[str, ...]] = []

    def decide(rank_info: tuple[str, ...]) -> str:
        asked.append(rank_info)
        return "größe " * 100_000

    def start(rank: int) -> tuple[str, Links]:
        topology = Topology(rank=rank, num_ranks=num_ranks)
        return agree(topology, f"{rank}", decide, folder=tmp_path), join_rank(tmp_path, rank, num_ranks)

    for _ in range(4):
        started = all_ranks(num_ranks, start)
        assert [agreed for agreed, _ in started] == ["größe " * 100_000] * num_ranks
        assert asked.pop() == tuple(f"{rank}" for rank in range(num_ranks))
        check([links for _, links in started])


def test_sockets_of_killed_ranks_are_replaced(tmp_path: Path) -> None:
    for rank in range(2):
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(tmp_path / f"rank{rank}.sock"))
    check(all_ranks(2, lambda rank: join_rank(tmp_path, rank, 2)))


def test_a_path_may_be_longer_than_the_address_of_a_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30) / ("longer" * 30)
    folder.mkdir(parents=True)
    check(all_ranks(3, lambda rank: join_rank(folder, rank, 3)))
