"""The ends of a link: a rank that stops waits for no neighbour."""

import queue
import socket
import threading

import pytest
import torch

from svdq.pipeline.transport.channel import Channel
from svdq.pipeline.transport.message import Kind, Message
from svdq.pipeline.transport.transport import Receiver, Sender

CPU = torch.device("cpu")


@pytest.fixture
def pair():
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def test_a_close_that_waits_for_a_neighbour_that_takes_nothing_is_released(pair) -> None:
    sender = Sender(Channel(pair[0], CPU), 1, print)
    sender.send(Message(kind=Kind.REPORT, body={"text": "x" * 10**7}))
    closing = threading.Thread(target=sender.close, daemon=True)
    closing.start()
    closing.join(0.5)
    assert closing.is_alive(), "the neighbour has not taken the message"
    sender.release()
    closing.join(60)
    assert not closing.is_alive()


def test_a_close_that_is_sent_is_received(pair) -> None:
    sender, receiver = Sender(Channel(pair[0], CPU), 1, print), Receiver(Channel(pair[1], CPU), 0, print)
    sender.send(Message(kind=Kind.REPORT, body={"text": "x" * 10**7}))
    sender.close()
    assert [receiver.receive().kind, receiver.receive().kind] == [Kind.REPORT, Kind.CLOSE]


def test_a_neighbour_that_sends_nonsense_is_reported_as_lost(pair) -> None:
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    Receiver(Channel(pair[1], CPU), 0, lost.put)
    pair[0].sendall(b"\0\0\0\2[]")
    assert "Cannot receive from rank 0 any more" in lost.get(timeout=60)
