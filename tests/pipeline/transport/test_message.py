"""Messages are JSON and bytes, and arrive as they were sent."""

import json
import socket
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from svdq.pipeline.loop.sample import Resumption, Sample, sample_body, sample_from
from svdq.pipeline.models.svd.family import SvdParameters
from svdq.pipeline.transport.links import Channel, ChannelClosedError
from svdq.pipeline.transport.message import Kind, Message

CPU = torch.device("cpu")
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
SHAPES = st.lists(st.integers(0, 5), min_size=1, max_size=5)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    steps = draw(st.integers(1, 50))
    names = draw(st.lists(st.sampled_from(["latents", "image_latents", "image_embedding"]), unique=True))
    return Sample(
        job_id=draw(st.text(max_size=30)),
        parameters=SvdParameters(
            seed=draw(st.integers(0, 2**63 - 1)), steps=steps, frames=draw(st.integers(1, 30)), max_guidance_scale=2.5
        ),
        boundaries=tuple(sorted(draw(st.lists(st.integers(0, steps), min_size=2, max_size=8)))),
        step=draw(st.integers(0, steps)),
        tensors={name: torch.randn(draw(SHAPES)).to(draw(DTYPES)) for name in names},
        job=draw(st.dictionaries(st.text(max_size=5), st.text(max_size=5) | st.lists(st.integers()))),
        failure=draw(st.none() | st.text()),
        canceled=draw(st.booleans()),
        stages=tuple(draw(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9), st.floats(0, 9))))),
        seconds={"encode": draw(st.floats(0, 9))},
        memory=draw(st.dictionaries(st.sampled_from(["encode", "step", "decode"]), st.integers(0, 2**40))),
        resumed=tuple(
            draw(st.lists(st.builds(Resumption, from_step=st.integers(0, 50), steps_done_again=st.integers(0, 50))))
        ),
    )


@given(samples())
def test_a_sample_survives_json(sample: Sample) -> None:
    body = json.loads(json.dumps(sample_body(sample)))
    assert sample_from(body, sample.tensors) == sample


@given(samples())
@settings(max_examples=50)
def test_a_sample_reaches_another_rank_bit_by_bit(sample: Sample) -> None:
    received = over_a_socket(Message(kind=Kind.SAMPLE, body=sample_body(sample), tensors=sample.tensors))
    assert sample_from(received.body, sample.tensors) == sample
    assert list(received.tensors) == list(sample.tensors)
    for name, tensor in sample.tensors.items():
        assert received.tensors[name].dtype == tensor.dtype
        assert received.tensors[name].shape == tensor.shape
        assert torch.equal(received.tensors[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


def test_a_tensor_larger_than_any_socket_buffer_arrives_whole() -> None:
    latents = torch.arange(20_000_000, dtype=torch.float32)
    received = over_a_socket(Message(kind=Kind.SAMPLE, body={}, tensors={"latents": latents}))
    assert torch.equal(received.tensors["latents"], latents)


def test_a_tensor_that_is_not_contiguous_arrives_as_it_looks() -> None:
    latents = torch.arange(24, dtype=torch.float32).view(4, 6).t()
    assert torch.equal(over_a_socket(Message(kind=Kind.SAMPLE, tensors={"x": latents})).tensors["x"], latents)


def test_a_neighbor_that_closes_in_mid_message_is_noticed() -> None:
    near, far = socket.socketpair()
    with near, far:
        near.sendall(b"\0\0\1\0{")
        near.close()
        with pytest.raises(ChannelClosedError):
            Channel(far, CPU).receive()


def over_a_socket(message: Message) -> Message:
    """Send a message from one thread to another through real sockets."""
    near, far = socket.socketpair()
    with near, far:
        sending = Channel(near, CPU)
        thread = threading.Thread(target=lambda: sending.finish(sending.begin(message)))
        thread.start()
        received = Channel(far, CPU).receive()
        thread.join()
    return received


def test_tensors_can_be_changed_after_they_were_passed_on_without_a_copy() -> None:
    latents = torch.zeros(3, 5, dtype=torch.bfloat16)
    received = over_a_socket(over_a_socket(Message(kind=Kind.SAMPLE, tensors={"none": torch.empty(0), "x": latents})))
    received.tensors["x"].add_(1)
    assert bool((received.tensors["x"] == 1).all())
    assert received.tensors["none"].numel() == 0
    assert not latents.any()
