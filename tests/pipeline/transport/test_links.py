"""The ends of a link: messages arrive whole and in order, and a rank that stops waits for no neighbor."""

import queue
import socket
import threading

import pytest
import torch

from svdq.pipeline.transport.links import Channel, Receiver, Sender
from svdq.pipeline.transport.message import Kind, Message, Work

CPU = torch.device("cpu")
LARGE = {"text": "x" * 10**7}


@pytest.fixture
def pair():
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def second_pair():
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def collect(connection: socket.socket) -> list[Message]:
    """Receive messages to the last."""
    found: list[Message] = []

    receiver = Receiver(Channel(connection, CPU), 0, print)
    receiver.start(found.append)
    receiver.join()
    return found


def test_a_close_that_waits_for_a_neighbor_that_takes_nothing_is_released(pair) -> None:
    sender = Sender(Channel(pair[0], CPU), 1, print)
    sender.send(Message(kind=Kind.REPORT, body=LARGE))
    closing = threading.Thread(target=sender.close, daemon=True)
    closing.start()
    closing.join(0.5)
    assert closing.is_alive(), "the neighbor has not taken the message"
    sender.release()
    closing.join(60)
    assert not closing.is_alive()


def test_a_close_that_is_sent_is_received(pair) -> None:
    sender = Sender(Channel(pair[0], CPU), 1, print)
    sender.send(Message(kind=Kind.REPORT, body=LARGE))
    closing = threading.Thread(target=sender.close)
    closing.start()
    assert [message.kind for message in collect(pair[1])] == [Kind.REPORT, Kind.CLOSE]
    closing.join(60)


def test_messages_of_several_threads_arrive_whole_and_in_order(pair) -> None:
    sender = Sender(Channel(pair[0], CPU), 1, print)

    def send(number: int) -> None:
        for count in range(20):
            latents = torch.full((number * 100_000 + 1,), count, dtype=torch.float32)
            kind = Kind.FRAMES if number == 2 else Kind.SAMPLE
            sender.send(Message(kind=kind, body={"number": number, "count": count}, tensors={"latents": latents}))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(3)]
    closing = threading.Thread(target=lambda: ([thread.join() for thread in threads], sender.close()))
    for thread in (*threads, closing):
        thread.start()
    *messages, close = collect(pair[1])
    assert close.kind is Kind.CLOSE
    for number in range(3):
        of_one = [message for message in messages if message.body["number"] == number]
        assert [message.body["count"] for message in of_one] == list(range(20))
        for message in of_one:
            latents = message.tensors["latents"]
            assert latents.shape == (number * 100_000 + 1,)
            assert bool((latents == message.body["count"]).all())


def test_a_message_is_passed_on_bit_by_bit(pair, second_pair) -> None:
    sender = Sender(Channel(pair[0], CPU), 1, print)
    onward = Sender(Channel(second_pair[0], CPU), 2, print)
    frames = torch.arange(5_000_000, dtype=torch.int32).view(torch.uint8)
    onward.note([Work(1, 7, 1, 5, 0.5)])
    messages: list[Message] = []
    threads = [
        threading.Thread(target=lambda: messages.extend(collect(second_pair[1]))),
        threading.Thread(target=lambda: (sender.send(message), sender.close())),
    ]
    message = Message(kind=Kind.FRAMES, body={"a": 1}, tensors={"frames": frames}, work=[Work(0, 8, 26, 27, 2.0)])
    receiver = Receiver(Channel(pair[1], CPU), 0, print)
    receiver.start(onward.send)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    passed_on, close = messages
    assert (passed_on.kind, passed_on.body, close.kind) == (Kind.FRAMES, {"a": 1}, Kind.CLOSE)
    assert torch.equal(passed_on.tensors["frames"], frames)
    assert list(passed_on.work) == [Work(1, 7, 1, 5, 0.5), Work(0, 8, 26, 27, 2.0)]


def test_finished_work_is_sent_at_once_and_then_with_the_next_message(pair) -> None:
    sender = Sender(Channel(pair[0], CPU), 1, print)
    for index in range(3):
        sender.note([Work(0, index, 1, 5, 1.0)])
        sender.send_work()
    sender.send(Message(kind=Kind.REPORT))
    sender.close()
    kinds = [(message.kind, [work.sample for work in message.work]) for message in collect(pair[1])]
    assert kinds[0] == (Kind.WORK, [0])
    assert [index for _, indices in kinds for index in indices] == [0, 1, 2]
    assert kinds[-1] == (Kind.CLOSE, [])


def test_a_neighbor_that_sends_nonsense_is_reported_as_lost(pair) -> None:
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    Receiver(Channel(pair[1], CPU), 0, lost.put).start(lambda message: None)
    pair[0].sendall(b"\0\0\0\2{}")
    assert "Cannot receive from rank 0 any more" in lost.get(timeout=60)


def test_a_rank_that_is_lost_while_a_message_passes_by_is_named(pair, second_pair) -> None:
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    onward = Sender(Channel(second_pair[0], CPU), 2, lost.put)
    Receiver(Channel(pair[1], CPU), 0, lost.put).start(onward.send)
    sender = Sender(Channel(pair[0], CPU), 1, print)
    sender.send(Message(kind=Kind.WORK, body=LARGE))
    second_pair[1].recv(1000)
    second_pair[1].close()
    assert "Cannot send to rank 2 any more" in lost.get(timeout=60)


def test_a_rank_that_dies_in_a_message_that_passes_by_is_named(pair, second_pair) -> None:
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    onward = Sender(Channel(second_pair[0], CPU), 2, lost.put)
    sender = Channel(pair[0], CPU)
    sender.begin(Message(kind=Kind.WORK, body=LARGE))
    sender.close()
    Receiver(Channel(pair[1], CPU), 0, lost.put).start(onward.send)
    assert "Cannot receive from rank 0 any more: it closed the connection" in lost.get(timeout=60)


def test_finished_work_of_a_rank_stays_in_order_when_a_message_passes_by(pair) -> None:
    sender = Sender(Channel(pair[0], CPU), 1, print)
    sender.send_work()
    sender.note([Work(0, 7, 0, 1, 1.0)])
    sender.send(Message(kind=Kind.SAMPLE, work=[Work(0, 7, 1, 5, 1.0)]))
    sender.close()
    sample, _ = collect(pair[1])
    assert [work.stop for work in sample.work] == [1, 5]
