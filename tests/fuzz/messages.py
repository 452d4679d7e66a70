"""Messages between ranks and checkpoints: valid ones, and mutations of their headers."""

import contextlib
import json
import socket
import threading
from collections.abc import Sequence
from random import Random

import torch

from svdq.pipeline.loop.sample import Resumption, Sample, sample_body, sample_from
from svdq.pipeline.models.svd.parameters import SvdParameters
from svdq.pipeline.transport.channel import Channel
from svdq.pipeline.transport.message import Kind, Message, Work, byte_views, encode_header
from tests.fuzz.mutate import mutate_bytes, mutate_json


def sample(parameters: SvdParameters) -> Sample:
    """Make a sample with small tensors."""
    return Sample(
        job_id="job",
        parameters=parameters,
        boundaries=(0, 4, 9),
        step=4,
        tensors={"latents": torch.zeros(1, 2, 4, 8, 8), "image_embedding": torch.ones(1, 1, 5)},
        metadata={"name": "photo", "formats": ["mp4"]},
        stages=((0, 4, 0.25),),
        seconds={"encode": 0.5},
        memory={"step": 7},
        resumed=(Resumption(from_step=1, steps_done_again=0),),
    )


def messages(parameters: SvdParameters) -> list[Message]:
    """Make a message of each kind."""
    body = sample_body(sample(parameters))
    return [
        Message(kind=Kind.SAMPLE, body=body, tensors=sample(parameters).tensors),
        Message(kind=Kind.WARM, body=parameters.model_dump(mode="json")),
        Message(kind=Kind.REPORT, body=body | {"result": {"outputs": ["/x.mp4"]}}),
        Message(kind=Kind.FRAMES, body=body, tensors={"frames": torch.zeros(2, 8, 8, 3, dtype=torch.uint8)}),
        Message(kind=Kind.WORK, work=[Work(0, 3, "steps", 0.5)]),
        Message(kind=Kind.CLOSE),
    ]


def framed(message: Message) -> bytes:
    """Write a message as a channel sends it."""
    header = encode_header(message)
    return len(header).to_bytes(4, "big") + header + b"".join(map(bytes, byte_views(message.tensors)))


def read_message(data: bytes) -> None:
    """Send bytes through a socket and receive them as a message."""
    near, far = socket.socketpair()
    thread = threading.Thread(target=_send, args=(near, data))
    thread.start()
    with far:
        channel = Channel(far, torch.device("cpu"))
        message, layout = channel.receive_header()
        if message.kind in (Kind.SAMPLE, Kind.FRAMES):
            tensors = channel.receive_tensors(layout)
            sample_from(message.body, tensors)


def _send(near: socket.socket, data: bytes) -> None:
    with near, contextlib.suppress(OSError):  # the far end is closed at the first mistake
        near.sendall(data)


def mutate_message(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Mutate the header of a message as JSON, with its right length, or the bytes."""
    end = 4 + int.from_bytes(data[:4], "big")
    if random.random() < 0.3:
        return mutate_bytes(random, data, others)
    header = mutate_json(random, data[4:end])
    return len(header).to_bytes(4, "big") + header + data[end:]


def mutate_checkpoint(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Mutate the header of a safetensors file, or the metadata of ours in it, or the bytes."""
    end = 8 + int.from_bytes(data[:8], "little")
    if random.random() < 0.3:
        return mutate_bytes(random, data, others)
    header = json.loads(data[8:end])
    if random.random() < 0.6:
        metadata = mutate_json(random, header["__metadata__"]["svdq"].encode())
        header["__metadata__"]["svdq"] = metadata.decode("utf-8", "replace")
        text = json.dumps(header).encode()
    else:
        text = mutate_json(random, data[8:end])
    return len(text).to_bytes(8, "little") + text + data[end:]
