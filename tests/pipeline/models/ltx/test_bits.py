"""LTX-2's bits: both versions, in one stage and in two, cut at every step, against diffusers."""

from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load, save

from svdq.pipeline.models.compute import options
from svdq.pipeline.models.compute.options import ComputeOptions
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.ltx.family import LtxParameters
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.video_model import Role
from tests.pipeline.references import call_ltx
from tests.pipeline.rendering import denoise, pipeline_of

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
EVERYTHING = Role(embed=True, encode=True, decode=True)
#: What each rank has besides the transformer: text encoder and VAE, nothing, and the decoders.
FIRST, MIDDLE, LAST = Role(embed=True, encode=True), Role(), Role(decode=True)
GUIDED = {"guidance_scale": 3.0, "audio_guidance_scale": 7.0, "stg_scale": 1.0, "modality_scale": 3.0}
GUIDED |= {"guidance_rescale": 0.7, "negative_prompt": "blurry, echo"}


@pytest.fixture(scope="module")
def opened(folder_of):
    """Open a kind of model for a role, once."""
    return cache(lambda kind, role=EVERYTHING: open_model(resolve(str(folder_of(kind))), role, CPU, torch.float32))


def photo_of(width: int, height: int, seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def parameters(**changes) -> LtxParameters:
    defaults = {"prompt": "A cat walks over a wall and meows.", "frames": 17, "width": 128, "height": 64, "seed": 5}
    return LtxParameters(**(defaults | changes))


def reference(folder, photo, values, last_photo=None, dtype=torch.float32):
    frames, sound = call_ltx(pipeline_of(folder, dtype), photo, values, last_photo)
    return np.stack([np.asarray(frame) for frame in frames[0]]), sound[0].numpy()


def render(encoder, ranks, decoder, photo, values, last_photo=None):
    """Carry one video through the ranks step by step; each gets nothing but the bytes of the state that it needs."""
    state = encoder.encode(photo, values, last_photo)
    for index, rank in enumerate(ranks):
        state = load(save({name: tensor.contiguous() for name, tensor in state.items()}))
        state |= rank.denoiser(state, values).step(state, index)
    state = load(save({name: state[name].contiguous() for name in decoder.decoded}))
    return decoder.decode(state, values, values.num_frames).numpy(), decoder.sound(state, values)


@pytest.mark.parametrize("kind", ["2.3", pytest.param("2.5", marks=pytest.mark.long)])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("changes", [{}, {"last_image": "b"}, {"loop": True}], ids=["first", "last", "loop"])
def test_same_bits_as_diffusers_when_cut_at_every_step(opened, folder_of, kind, stages, changes):
    model = opened(kind)
    values = model.complete(parameters(stages=stages, **changes))
    assert values.steps == (8 if stages == 1 else 11)
    photo, last_photo = photo_of(128, 64), photo_of(128, 64, seed=1) if values.last_image else None
    ours, our_sound = render(model, [model] * values.steps, model, photo, values, last_photo)
    frames, sound = reference(folder_of(kind), photo, values, last_photo)
    assert np.array_equal(ours, frames)
    assert np.array_equal(our_sound.numpy(), sound)
    assert ours.std() > 20
    assert sound.std() > 0.001


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("2.3", GUIDED | {"stages": 1}),
        ("2.3", GUIDED | {"stages": 2, "loop": True}),
        ("2.3", {"stages": 1, "guidance_scale": 3.0}),
        ("2.3-dev", {"steps": 4}),
        ("2.3-dev", {"steps": 6, "stages": 2, "last_image": "b"}),
        ("2.5", {"stages": 2, "width": 64, "frames": 9, "fps": 30}),
        ("2.5", {"stages": 1, "frames": 1, "prompt": ""}),
    ],
    ids=str,
)
def test_same_bits_with_guidance_and_for_other_parameters(opened, folder_of, kind, changes):
    model = opened(kind)
    values = model.complete(parameters(**changes))
    photo = photo_of(values.width, values.height)
    last_photo = photo_of(values.width, values.height, seed=1) if values.last_image else None
    ours, our_sound = render(model, [model] * values.steps, model, photo, values, last_photo)
    frames, sound = reference(folder_of(kind), photo, values, last_photo)
    assert np.array_equal(ours, frames)
    assert np.array_equal(our_sound.numpy(), sound)


@pytest.mark.parametrize("kind", ["2.3", "2.5"])
def test_same_bits_on_ranks_that_have_only_their_components(opened, folder_of, kind):
    first, middle, last = (opened(kind, role) for role in (FIRST, MIDDLE, LAST))
    assert middle.pipeline.vae is None
    assert first.pipeline.vocoder is None
    assert last.pipeline.text_encoder is None
    values = first.complete(parameters())
    ranks = [first] * 4 + [middle] * 6 + [last]
    assert len(ranks) == values.steps
    photo = photo_of(128, 64)
    frames, sound = reference(folder_of(kind), photo, values)
    ours, our_sound = render(first, ranks, last, photo, values)
    assert np.array_equal(ours, frames)
    assert np.array_equal(our_sound.numpy(), sound)


ANCESTRAL = """
[scheduler]
class = "LTXEulerAncestralRFScheduler"
stage_2_sigmas = [0.85, 0.725, 0.4219]
"""


@pytest.mark.parametrize(
    "changes", [{"last_image": "b"}, GUIDED | {"stages": 1, "frames": 9}], ids=["two stages", "guided"]
)
def test_ancestral_steps_have_the_bits_of_diffusers_scheduler_on_any_ranks(folder_of, tmp_path, changes):
    """One rank, and three that get nothing but the state: also what a group resumes from after a kill."""
    folder = folder_of("2.5")
    (tmp_path / "mine.toml").write_text(f'base = "{folder}"\n{ANCESTRAL}')
    resolved = resolve(str(tmp_path / "mine.toml"))
    whole, *ranks = (open_model(resolved, role, CPU, torch.float32) for role in (EVERYTHING, FIRST, MIDDLE, LAST))
    values = whole.complete(parameters(**changes))
    photo, last_photo = photo_of(128, 64), photo_of(128, 64, seed=1) if values.last_image else None
    video = (photo, values, last_photo)
    one = render(whole, [whole] * values.steps, whole, *video)
    steps = [rank for rank, share in zip(ranks, (3, 6, values.steps), strict=True) for _ in range(share)]
    three = render(ranks[0], steps[: values.steps], ranks[-1], *video)
    frames, sound = call_ltx(pipeline_of(folder), photo, values, last_photo, resolved.facts)
    expected = np.stack([np.asarray(frame) for frame in frames[0]])
    for ours, our_sound in (one, three):
        assert np.array_equal(ours, expected)
        assert np.array_equal(our_sound.numpy(), sound[0].numpy())


def test_without_sound_the_frames_are_the_same(opened):
    model = opened("2.3")
    photo = photo_of(128, 64)
    values = [model.complete(parameters(stages=1, sound=sound)) for sound in (True, False)]
    (frames, sound), (same, none) = (render(model, [model] * 8, model, photo, each) for each in values)
    assert np.array_equal(frames, same)
    assert sound.shape[0] == 2
    assert none is None


def test_same_bits_with_streamed_blocks_and_in_tiles_only_where_asked_for(opened, folder_of):
    streaming = ComputeOptions(offload="blocks")
    model = open_model(resolve(str(folder_of("2.3"))), EVERYTHING, CPU, torch.float32, streaming)
    blocks = model.pipeline.transformer.transformer_blocks
    assert all(block._diffusers_hook.get_hook("group_offloading") for block in blocks)
    values = model.complete(parameters(frames=9, width=576))
    photo = photo_of(576, 64)
    state = denoise(model, model.encode(photo, values), values)
    whole, tiled, again = (model.decode(state, values, size).numpy() for size in (9, 1, 9))
    assert np.array_equal(whole, reference(folder_of("2.3"), photo, values)[0])
    assert np.array_equal(whole, again)
    assert not np.array_equal(whole, tiled)


def test_prompts_and_seeds_change_the_video_and_a_text_is_encoded_once(opened):
    model = opened("2.3")
    photo, calls = photo_of(128, 64), []
    hook = model.pipeline.text_encoder.register_forward_hook(lambda *_: calls.append(1))
    texts = ("Never before.", "Never before.", "Something else.")
    videos = []
    for seed, prompt in enumerate(texts, start=20):
        values = model.complete(parameters(stages=1, prompt=prompt, seed=max(21, seed)))
        videos.append(render(model, [model] * 8, model, photo, values)[0].astype(int))
    hook.remove()
    assert len(calls) == 2
    assert np.array_equal(videos[0], videos[1])
    assert np.abs(videos[0] - videos[2]).mean() > 0.5


@pytest.mark.parametrize("changes", [{}, {"loop": True}], ids=["first", "loop"])
def test_same_bits_in_bfloat16_with_the_vocoder_in_float32(folder_of, changes):
    """Stage 2 begins in bfloat16, its noise too, unless a last photo is behind the latents."""
    model = open_model(resolve(str(folder_of("2.3"))), EVERYTHING, CPU, torch.bfloat16)
    values = model.complete(parameters(frames=9, width=64, **changes))
    photo = photo_of(64, 64)
    ours, our_sound = render(model, [model] * values.steps, model, photo, values)
    frames, sound = reference(folder_of("2.3"), photo, values, dtype=torch.bfloat16)
    assert np.array_equal(ours, frames)
    assert np.array_equal(our_sound.numpy(), sound)


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_video_is_as_usual_after_every_part_was_warmed_up(opened, folder_of, monkeypatch, stages):
    monkeypatch.setattr(options, "BACKEND", "eager")
    compiled = ComputeOptions(compiled="blocks")
    model = open_model(resolve(str(folder_of("2.3"))), EVERYTHING, CPU, torch.float32, compiled)
    values, photo = model.complete(parameters(stages=stages)), photo_of(128, 64)
    model.warm_up(values)
    found, usual = (denoise(each, each.encode(photo, values), values) for each in (model, opened("2.3")))
    assert all(torch.equal(found[name], usual[name]) for name in model.decoded)
