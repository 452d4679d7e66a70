"""LTX-2 whose components come and go: diffusers' bits, with a text encoder whose layers are streamed."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from svdq.pipeline.loop.protocols import Request
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.ltx.family import FAMILY, LtxParameters
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.needs import published
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.planning.rounds import DECODER, ENCODERS, TEXT_ENCODER
from tests.pipeline.fakes import Alone
from tests.pipeline.references import call_ltx
from tests.pipeline.rendering import pipeline_of

CPU = torch.device("cpu")
VIDEO = LtxParameters(prompt="A dog barks.", frames=9, width=64, height=64, seed=1)
VIDEOS = [
    VIDEO,
    VIDEO.model_copy(update={"stages": 1, "guidance_scale": 3.0, "seed": 2}),
    VIDEO.model_copy(update={"prompt": "A cat.", "loop": True, "seed": 3}),
]


@pytest.fixture(scope="module")
def videos(tiny_ltx):
    facts = FAMILY.read_facts(tiny_ltx, "tiny")
    return [FAMILY.complete(video, facts) for video in VIDEOS]


@pytest.mark.slow
@pytest.mark.parametrize("role", [{"in_rounds": True}, {"in_rounds": True, "host_bytes": 10**9}, {"leaves": "text"}])
def test_frames_and_sound_are_those_of_diffusers(tiny_ltx, image, videos, role):
    model = open_model(resolve(str(tiny_ltx)), replace(Role.of_rank(0), **role), CPU, torch.float32)
    if "in_rounds" in role:
        assert tuple(model.sets) == (TEXT_ENCODER, ENCODERS, "transformer", DECODER)
    sounds = {}
    requests = [
        Request(job_id=str(number), parameters=video, photo=image, num_waiting=len(videos) - number - 1)
        for number, video in enumerate(videos)
    ]
    alone = Alone(model, requests)
    deliver = alone.sink.deliver
    alone.sink.deliver = lambda sample, *rest: (sounds.update({sample.job_id: sample.tensors}), deliver(sample, *rest))
    alone.stage.run()
    for number, video in enumerate(videos):
        frames, sound = call_ltx(pipeline_of(tiny_ltx), image, video)
        np.testing.assert_array_equal(
            alone.sink.frames[str(number)], np.stack([np.asarray(each) for each in frames[0]])
        )
        np.testing.assert_array_equal(sounds[str(number)]["sound"].numpy(), sound[0].numpy())


@pytest.mark.slow
def test_layers_of_the_text_encoder_come_singly_and_the_upsampler_with_steps(tiny_ltx):
    model = open_model(resolve(str(tiny_ltx)), replace(Role.of_rank(0), in_rounds=True), CPU, torch.float32)
    pipeline = model.pipeline
    model.hold(TEXT_ENCODER)
    layers = pipeline.text_encoder.model.language_model.layers
    assert all(layer._diffusers_hook.get_hook("group_offloading") for layer in layers)
    assert (pipeline.transformer, pipeline.vocoder, pipeline.latent_upsampler) == (None, None, None)
    model.hold("transformer")
    assert None not in (pipeline.transformer, pipeline.latent_upsampler)
    assert (pipeline.text_encoder, pipeline.connectors, pipeline.vocoder) == (None, None, None)
    model.hold(DECODER)
    assert None not in (pipeline.vae, pipeline.audio_vae, pipeline.vocoder)
    assert pipeline.latent_upsampler is None


@pytest.mark.parametrize(("gpus_gb", "fits"), [(16, "streamed"), (24, "int8"), (48, "rounds"), (80, "resident")])
def test_what_fits_on_a_card(gpus_gb, fits):
    size = published("diffusers/LTX-2.3-Distilled-Diffusers")
    assert size is not None
    video = FAMILY.complete(LtxParameters(seed=0), size.facts)
    room = gpus_gb * 2**30 - 1_300_000_000
    ways = {
        "resident": (size, "resident", "text"),
        "rounds": (size, "rounds", "nothing"),
        "int8": (replace(size, int8=True), "rounds", "nothing"),
        "streamed": (replace(size, streamed=True), "rounds", "nothing"),
    }
    needs = {
        name: max(each.phases(video, residency, leaves=leaves).values())
        for name, (each, residency, leaves) in ways.items()
    }
    assert next(name for name, need in needs.items() if need <= room) == fits
