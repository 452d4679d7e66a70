"""An untrained Wan whose components come and go, in rounds or for encodes: diffusers' bits, and few loads."""

import logging
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from svdq.pipeline.errors import InputError
from svdq.pipeline.loop.protocols import Request
from svdq.pipeline.models.compute.options import DEFAULTS, ComputeOptions
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.models.wan.family import FAMILY
from svdq.pipeline.planning.rounds import DECODER, ENCODERS, TEXT_ENCODER
from tests.pipeline.fakes import Alone
from tests.pipeline.models.wan.test_ranks import VIDEOS
from tests.pipeline.rendering import diffusers_frames

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SETS = (TEXT_ENCODER, ENCODERS, "transformer", "transformer_2", DECODER)


def open_in_rounds(folder, host_bytes: int, options=DEFAULTS):
    role = replace(Role.of_rank(0), in_rounds=True, host_bytes=host_bytes)
    return open_model(resolve(str(folder)), role, CPU, torch.float32, options)


def requests(image, videos, *, resume=None) -> list[Request]:
    return [
        Request(
            job_id=f"job-{number}",
            parameters=video,
            photo=None if resume else image,
            resume=resume[number] if resume else None,
            num_waiting=len(videos) - number - 1,
        )
        for number, video in enumerate(videos)
    ]


def loaded(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.args[0] for record in caplog.records if record.msg.startswith("Loaded the")]


@pytest.fixture(scope="module")
def videos(tiny_wan):
    facts = FAMILY.read_facts(tiny_wan, "tiny")
    return [FAMILY.complete(video.model_copy(update={"seed": n}), facts) for n, video in enumerate(VIDEOS * 2)]


@pytest.fixture(scope="module")
def reference(tiny_wan, image, videos):
    return [diffusers_frames(tiny_wan, image, video) for video in videos]


@pytest.mark.parametrize(
    ("host_bytes", "options"),
    [(0, DEFAULTS), (10**9, DEFAULTS), pytest.param(10**9, ComputeOptions(offload="blocks"), id="streamed")],
)
def test_frames_are_those_of_diffusers_and_experts_are_loaded_once_a_round(
    tiny_wan, image, videos, reference, host_bytes, options, caplog
):
    caplog.set_level(logging.INFO, "svdq")
    alone = Alone(open_in_rounds(tiny_wan, host_bytes, options), requests(image, videos))
    alone.stage.run()
    for number, expected in enumerate(reference):
        np.testing.assert_array_equal(alone.sink.frames[f"job-{number}"], expected)
    loads = loaded(caplog)
    assert loads.count("transformer") == loads.count("transformer_2") == 2
    # All prompts are known in the second round.
    assert loads.count(TEXT_ENCODER) <= 2
    # Continued from each checkpoint, also of different ones at once.
    saved = [[each for each in alone.checkpointer.samples if each.index == number] for number in range(4)]
    assert [each.step for each in saved[0]] == [0, 3, 7]
    for place in range(3):
        chosen = [each[min(place, len(each) - 1)] for each in saved]
        again = Alone(open_in_rounds(tiny_wan, host_bytes), requests(None, videos[:4], resume=chosen))
        again.stage.run()
        for number, expected in enumerate(reference[:4]):
            np.testing.assert_array_equal(again.sink.frames[f"job-{number}"], expected)


def test_frames_equal_diffusers_if_weights_move_between_host_and_device(tiny_wan, image, videos, reference):
    model = open_in_rounds(tiny_wan, 10**9)
    model._residency._copy = torch.clone  # as on a GPU, whose weights are copies of those in host memory
    alone = Alone(model, requests(image, videos[:6]))
    alone.stage.run()
    for number, expected in enumerate(reference[:6]):
        np.testing.assert_array_equal(alone.sink.frames[f"job-{number}"], expected)


def test_a_model_with_one_transformer_takes_turns_with_its_text_encoder(folder_of, image, caplog):
    caplog.set_level(logging.INFO, "svdq")
    folder = folder_of("ti2v-5b")
    facts = FAMILY.read_facts(folder, "tiny")
    asked = [FAMILY.complete(VIDEOS[0].model_copy(update={"seed": n, "steps": 3}), facts) for n in range(3)]
    alone = Alone(open_in_rounds(folder, 0), requests(image, asked))
    alone.stage.run()
    assert [record.args[0] for record in caplog.records if record.msg.startswith("Loaded the")].count(
        "transformer"
    ) <= 2
    for number, video in enumerate(asked):
        np.testing.assert_array_equal(alone.sink.frames[f"job-{number}"], diffusers_frames(folder, image, video))


@pytest.mark.parametrize(("leaves", "host_bytes"), [("text", 0), ("experts", 10**9)])
def test_a_text_encoder_that_comes_for_new_prompts_equals_diffusers(
    tiny_wan, image, videos, reference, leaves, host_bytes, caplog
):
    caplog.set_level(logging.INFO, "svdq")
    role = replace(Role.of_rank(0), leaves=leaves, host_bytes=host_bytes)
    model = open_model(resolve(str(tiny_wan)), role, CPU, torch.float32)
    assert model.pipeline.text_encoder is None
    if leaves == "experts":
        model._residency._copy = torch.clone  # as on a GPU, whose weights are copies of those in host memory
    asked = requests(image, videos)
    alone = Alone(model, asked[4:])
    # All of these wait before the loop begins.
    early = [alone.stage._admission.admit(each) for each in asked[:4]]
    assert [sample.step for sample in early] == [-2] * 4
    for sample in early:
        alone.stage._begin(sample)
    alone.stage.run()
    for number in range(len(videos)):
        np.testing.assert_array_equal(alone.sink.frames[f"job-{number}"], reference[number])
    loads = [record.args[0] for record in caplog.records if record.msg.startswith("Loaded the")]
    assert loads == [TEXT_ENCODER], "for all prompts that were asked for meanwhile"
    assert (model.pipeline.text_encoder is None) == (host_bytes == 0), "it is dropped if host memory has no room"


def test_a_set_that_is_gone_fails_with_a_sentence(tiny_wan, tmp_path):
    folder = tmp_path / "wan"
    shutil.copytree(tiny_wan, folder)
    model = open_in_rounds(folder, 0)
    model.hold("transformer")
    shutil.rmtree(folder / "transformer_2")
    with pytest.raises(InputError, match=r"The transformer_2 of the model .*cannot be loaded"):
        model.hold("transformer_2")
