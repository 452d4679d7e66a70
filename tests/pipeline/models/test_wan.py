"""Wan's bits: every kind of model, wherever its steps are cut and whichever experts a rank has, against diffusers."""

import contextlib
import itertools
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from gpu_checks.references import call_diffusers
from gpu_checks.tiny import VARIANTS, write_tiny_wan
from PIL import Image
from safetensors.torch import load, save

from svdq.pipeline.errors import SampleError
from svdq.pipeline.loop.sample import Sample
from svdq.pipeline.loop.work import Decoder
from svdq.pipeline.media.image import prepare_photo
from svdq.pipeline.models.compute_options import ComputeOptions
from svdq.pipeline.models.latent_rgb import rgb_of_latents
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.model_names import resolve
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.models.wan.family import WanParameters

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
EVERYTHING = Role(embed=True, encode=True, decode=True)
#: What each rank has: the expert of the noisy steps and the encoder, then that of the others and the decoder.
HIGH = Role(embed=True, encode=True, components=frozenset({"transformer"}))
LOW = Role(components=frozenset({"transformer_2"}), decode=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of each kind of model, and of two experts with the scheduler of distilled models."""
    root = tmp_path_factory.mktemp("wan")
    for variant in VARIANTS:
        write_tiny_wan(root / variant, variant)
    write_tiny_wan(root / "distilled", scheduler="FlowMatchEulerDiscreteScheduler")
    return root


@pytest.fixture(scope="module")
def opened(folders):
    """Open a kind of model for a role, once."""
    return cache(lambda kind, role=EVERYTHING: open_model(resolve(str(folders / kind)), role, CPU, torch.float32))


@pytest.fixture(scope="module")
def reference(folders):
    """Render with diffusers' pipeline, called as its users do."""
    from diffusers import WanImageToVideoPipeline

    @cache
    def pipeline(kind):
        loaded = WanImageToVideoPipeline.from_pretrained(folders / kind)
        loaded.set_progress_bar_config(disable=True)
        return loaded

    def render(kind, photo, parameters, **more):
        return np.stack([np.asarray(frame) for frame in call_diffusers(pipeline(kind), photo, parameters, **more)[0]])

    return render


@pytest.fixture(scope="module")
def photo(photo_bytes):
    return prepare_photo(photo_bytes, 64, 64)


def parameters(**changes) -> WanParameters:
    defaults = {"prompt": "A dog runs.", "negative_prompt": "slow", "frames": 5, "steps": 5, "width": 64, "height": 64}
    return WanParameters(**(defaults | {"seed": 11} | changes))


def of_kind(kind, **changes) -> WanParameters:
    """The parameters of a kind of model: FLF2V needs a last photo, which the first may be."""
    return parameters(**changes, **({"loop": True} if kind == "flf2v-14b" else {}))


def render(encoder, ranks, photo, values, last_photo=None):
    """Carry one video through the ranks step by step; each gets nothing but the bytes of the state."""
    state = encoder.encode(photo, values, last_photo)
    for index, rank in enumerate(ranks):
        state = load(save({name: tensor.contiguous() for name, tensor in state.items()}))
        state |= rank.denoiser(state, values).step(state, index)
    return ranks[-1].decode(load(save(state)), values, values.num_frames).numpy()


@pytest.mark.parametrize("kind", [*VARIANTS, "distilled"])
@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
@pytest.mark.parametrize("steps", [1, 7, *(pytest.param(steps, marks=pytest.mark.long) for steps in (2, 4))])
def test_same_bits_as_diffusers_when_cut_at_every_step(opened, reference, photo, kind, guidance_scale, steps):
    model = opened(kind)
    values = model.complete(of_kind(kind, steps=steps, guidance_scale=guidance_scale))
    ours = render(model, [model] * steps, photo, values)
    assert np.array_equal(ours, reference(kind, photo, values))
    assert ours.std() > 20


@pytest.mark.parametrize("kind", ["i2v-a14b", "distilled", "flf2v-14b"])
def test_the_bits_of_a_last_image(opened, reference, photo, photo_bytes, kind):
    last_photo = prepare_photo(photo_bytes, 64, 64, "stretch").transpose(Image.Transpose.ROTATE_180)
    model = opened(kind)
    frames = []
    for changes in ({"last_image": "b"}, {"last_image": "b", "frames": 13}, {"loop": True}):
        values = model.complete(parameters(**changes))
        other = None if values.loop else last_photo
        frames.append(render(model, [model] * values.steps, photo, values, other))
        assert np.array_equal(frames[-1], reference(kind, photo, values, last_image=other or photo))
    plain = [] if kind == "flf2v-14b" else [reference(kind, photo, model.complete(parameters()))]
    assert not any(np.array_equal(frames[0], each) for each in (frames[2], *plain))


@pytest.mark.parametrize("kind", ["i2v-a14b", "distilled"])
@pytest.mark.parametrize(("scale", "scale_2"), [(3.5, 3.5), (5.0, 2.0), (1.0, 1.0), (1.0, 4.0), (0.0, 7.0)])
def test_same_bits_on_ranks_with_one_expert_each(opened, reference, photo, kind, scale, scale_2):
    high, low = opened(kind, HIGH), opened(kind, LOW)
    values = high.complete(parameters(guidance_scale=scale, guidance_scale_2=scale_2))
    first, second = high.segments(values)
    assert (first.component, second.component) == ("transformer", "transformer_2")
    ranks = [high] * first.stop + [low] * (second.stop - second.start)
    assert np.array_equal(render(high, ranks, photo, values), reference(kind, photo, values))


def test_same_bits_with_streamed_blocks(folders, reference, photo):
    """On a processor, diffusers' hooks move blocks to where they are already, and without a stream."""
    streaming = ComputeOptions(offload="blocks")
    model = open_model(resolve(str(folders / "i2v-a14b")), EVERYTHING, CPU, torch.float32, streaming)
    for expert in (model.pipeline.transformer, model.pipeline.transformer_2):
        assert all(block._diffusers_hook.get_hook("group_offloading") for block in expert.blocks)
    values = model.complete(parameters())
    assert np.array_equal(render(model, [model] * 5, photo, values), reference("i2v-a14b", photo, values))
    assert model.info.compute == {"dtype": "float32"}, "they continue each other's videos"
    assert model.broken_weights() == ""


def test_an_expert_with_a_guidance_scale_of_1_computes_one_prediction(opened, reference, photo):
    high, low = opened("i2v-a14b", HIGH), opened("i2v-a14b", LOW)
    values = high.complete(parameters(guidance_scale=3.0, guidance_scale_2=1.0))
    first, second = high.segments(values)
    assert (first.cost, second.cost) == (1.0, 0.5)
    calls = []
    hook = low.pipeline.transformer_2.register_forward_hook(lambda *_: calls.append(1))
    ours = render(high, [high] * first.stop + [low] * (second.stop - second.start), photo, values)
    hook.remove()
    assert len(calls) == second.stop - second.start
    assert np.abs(ours.astype(int) - reference("i2v-a14b", photo, values)).max() <= 1


#: What is computed differently by the kinds of models, and what is the same code for all of them.
SHAPES = [{"width": 128, "frames": 9}, {"height": 96, "frames": 1}, {"frames": 17, "steps": 2}]
OTHERS = [
    {"prompt": "", "negative_prompt": ""},
    {"prompt": "Ein Hündchen läuft 🐶 &amp; " + "springt " * 200, "negative_prompt": None},
    {"flow_shift": 1.0},
    {"flow_shift": 12.0, "steps": 20},
    {"seed": 2**63 - 1},
]


def _is_possible(case):
    return case[0] != "flf2v-14b" or case[1].get("frames") != 1


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *filter(_is_possible, itertools.product([*VARIANTS, "distilled"], SHAPES)),
        *itertools.product(["i2v-a14b", "distilled"], OTHERS),
        *(
            pytest.param(kind, changes, marks=pytest.mark.long)
            for kind, changes in itertools.product(sorted({*VARIANTS} - {"i2v-a14b"}), OTHERS)
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_same_bits_for_other_parameters(opened, reference, photo_bytes, kind, changes):
    model = opened(kind)
    values = model.complete(of_kind(kind, **changes))
    photo = prepare_photo(photo_bytes, values.width, values.height)
    assert np.array_equal(render(model, [model] * values.steps, photo, values), reference(kind, photo, values))


def test_parameters_change_the_video(opened, photo):
    model = opened("i2v-a14b")

    def frames(**changes):
        values = model.complete(parameters(**changes))
        return render(model, [model] * values.steps, photo, values).astype(int)

    usual = frames()
    for changes in (
        {"prompt": "A cat."},
        {"negative_prompt": "fast"},
        {"guidance_scale": 1.0},
        {"guidance_scale_2": 8.0},
        {"flow_shift": 3.0},
        {"seed": 12},
    ):
        assert np.abs(frames(**changes) - usual).mean() > 0.5, changes


def test_interleaved_videos_of_other_shapes_and_steps(opened, reference, photo_bytes):
    high, low = opened("i2v-a14b", HIGH), opened("i2v-a14b", LOW)
    jobs = [
        high.complete(parameters(**changes))
        for changes in ({}, {"steps": 3, "guidance_scale": 1.0}, {"width": 96, "frames": 9, "flow_shift": 2.0})
    ]
    photos = [prepare_photo(photo_bytes, values.width, values.height) for values in jobs]
    states = [dict(high.encode(photo, values)) for photo, values in zip(photos, jobs, strict=True)]
    denoisers = [[rank.denoiser(*pair) for rank in (high, low)] for pair in zip(states, jobs, strict=True)]
    for index in range(5):
        for number, values in enumerate(jobs):
            if index < values.steps:
                is_low = index >= high.segments(values)[0].stop
                states[number] |= denoisers[number][is_low].step(states[number], index)
    for photo, values, state in zip(photos, jobs, states, strict=True):
        assert np.array_equal(low.decode(state, values, 99).numpy(), reference("i2v-a14b", photo, values))


def test_a_step_can_be_done_again(opened, photo):
    model = opened("i2v-a14b")
    values = model.complete(parameters())
    first = model.encode(photo, values)
    denoiser = model.denoiser(first, values)
    states = [first]
    for index in range(3):
        states.append({**states[-1], **denoiser.step(states[-1], index)})
    for index in (2, 0, 1):
        again = denoiser.step(states[index], index)
        assert all(torch.equal(tensor, states[index + 1][name]) for name, tensor in again.items())


def test_the_state_after_each_step(opened, photo):
    shapes = {"prompt_embeds": (1, 13, 32), "negative_prompt_embeds": (1, 6, 32), "condition": (1, 20, 2, 8, 8)}
    model = opened("i2v-a14b")
    values = model.complete(parameters())
    state = model.encode(photo, values)
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == shapes | {"latents": (1, 16, 2, 8, 8)}
    assert {str(tensor.dtype) for tensor in state.values()} == {"torch.float32"}
    one = model.denoiser(state, values).step(state, 0)
    assert set(one) == {"latents", "last_sample", "model_output_1"}
    two = model.denoiser(state, values).step({**state, **one}, 1)
    assert set(two) == {"latents", "last_sample", "model_output_0", "model_output_1"}
    assert {tuple(tensor.shape) for tensor in two.values()} == {(1, 16, 2, 8, 8)}
    unguided = model.complete(parameters(guidance_scale=1.0, guidance_scale_2=3.0))
    assert "negative_prompt_embeds" not in model.encode(photo, unguided)
    assert set(opened("distilled").denoiser(state, values).step(state, 0)) == {"latents"}
    assert opened("i2v-14b").encode(photo, values)["image_embeds"].shape == (1, 50, 16)
    assert opened("flf2v-14b").encode(photo, values, photo)["image_embeds"].shape == (2, 50, 16)
    with pytest.raises(
        SampleError, match=r"^Wan 2\.1 FLF2V-14B makes videos between two photos; give a last photo, or"
    ):
        opened("flf2v-14b").encode(photo, values)
    assert opened("ti2v-5b").encode(photo, values)["condition"].shape == (1, 48, 1, 4, 4)


def test_an_embedding_is_computed_once_for_each_text(opened, photo, monkeypatch):
    model = opened("i2v-a14b")
    calls = []
    forward = model.pipeline.text_encoder.forward
    monkeypatch.setattr(model.pipeline.text_encoder, "forward", lambda *given: calls.append(1) or forward(*given))
    values = model.complete(parameters(prompt="Once only.", negative_prompt="Never before."))
    first = model.encode(photo, values)
    assert len(calls) == 2
    again = model.encode(photo, values.model_copy(update={"seed": 4}))
    assert len(calls) == 2
    assert torch.equal(first["prompt_embeds"], again["prompt_embeds"])


def test_tiles_change_pixels_only_of_large_videos(opened, photo_bytes):
    model = opened("ti2v-5b")
    for width, differs in ((64, False), (320, True)):
        values = model.complete(parameters(width=width, steps=1, frames=5))
        state = dict(model.encode(prepare_photo(photo_bytes, width, 64), values))
        state |= model.denoiser(state, values).step(state, 0)
        whole, tiled, again = (model.decode(state, values, size).numpy() for size in (5, 1, 5))
        assert np.array_equal(whole, again)
        assert (not np.array_equal(whole, tiled)) == differs
        assert whole.shape == tiled.shape == (5, 64, width, 3)


def test_a_decode_that_runs_out_of_memory_falls_back_to_tiles_and_says_so(opened, photo_bytes, monkeypatch):
    model = opened("ti2v-5b")
    values = model.complete(parameters(width=320, steps=1))
    state = dict(model.encode(prepare_photo(photo_bytes, 320, 64), values))
    state |= model.denoiser(state, values).step(state, 0)
    tiled = model.decode(state, values, 1).numpy()
    vae, tries = model.pipeline.vae, []
    decode = vae.decode

    def little_memory(*given, **named):
        tries.append(vae.use_tiling)
        if not vae.use_tiling:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return decode(*given, **named)

    monkeypatch.setattr(vae, "decode", little_memory)
    decoder = Decoder(model)
    sample = Sample(job_id="a", parameters=values, boundaries=(0, 1), step=1, tensors=state, chunk_chosen=True)
    done, frames = decoder.decode(sample)
    assert frames is not None
    assert np.array_equal(frames.numpy(), tiled)
    assert (done.parameters.decode_chunk_size, tries) == (1, [False, True])
    # The next one starts with tiles, unless its job wants otherwise.
    assert decoder.decode(replace(sample, job_id="b"))[0].parameters.decode_chunk_size == 1
    assert tries == [False, True, True]


@pytest.mark.parametrize("kind", VARIANTS)
def test_no_call_of_the_vae_changes_the_next(opened, photo_bytes, kind):
    model = opened(kind)
    values = model.complete(of_kind(kind, width=320, steps=1))
    photo = prepare_photo(photo_bytes, 320, 64)
    kept: list[weakref.ref[torch.Tensor]] = []

    def all_calls():
        state = model.encode(photo, values)
        return [*state.values(), *(model.decode(state, values, size) for size in (5, 1))]

    def runs_out(_module, inputs):
        if inputs[1] is None:  # without the features of the frames before
            return
        kept.append(weakref.ref(inputs[1]))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def fails(call, layer):
        handle = layer.register_forward_pre_hook(runs_out)
        with contextlib.suppress(torch.OutOfMemoryError):
            call()
        handle.remove()

    before = all_calls()
    state, vae = model.encode(photo, values), model.pipeline.vae
    for size in (5, 1):
        fails(lambda size=size: model.decode(state, values, size), vae.decoder.conv_in)
    if kind != "ti2v-5b":  # it encodes one frame only
        fails(lambda: model.encode(photo, values), vae.encoder.conv_in)
    assert kept
    assert [each() for each in kept] == [None] * len(kept)
    assert all(map(torch.equal, before, all_calls()))


@pytest.mark.parametrize("kind", [*VARIANTS, "distilled"])
def test_pictures_change_with_the_steps_up_to_the_latents(opened, photo, kind):
    """After the last step the expected latents are those that are decoded."""
    model = opened(kind)
    values = model.complete(of_kind(kind))
    state = model.encode(photo, values)
    denoiser = model.denoiser(state, values)
    assert model.picture(denoiser) is None
    pictures = []
    for index in range(values.steps):
        state |= denoiser.step(state, index)
        pictures.append(model.picture(denoiser))
    assert len({picture.numpy().tobytes() for picture in pictures}) == values.steps
    rest = slice(0 if denoiser.first_frame_mask is None else 1, None)  # that of the photo is not denoised
    made = rgb_of_latents(state["latents"][0].transpose(0, 1))
    assert (pictures[-1].int() - made.int()).abs()[rest].max() <= 1


@pytest.mark.parametrize("kind", [*VARIANTS, "distilled"])
def test_pictures_change_no_bit_of_a_video(opened, photo, kind):
    """They are drawn by another thread, at any moment of a step."""
    model = opened(kind)
    values = model.complete(of_kind(kind))
    ends = []
    for is_drawn in (False, True):
        state = model.encode(photo, values)
        denoiser = model.denoiser(state, values)
        is_over = threading.Event()

        def draw(denoiser=denoiser, is_over=is_over):
            while not is_over.is_set():
                model.picture(denoiser)

        with ThreadPoolExecutor() as threads:
            drawing = threads.submit(draw) if is_drawn else None
            try:
                for index in range(values.steps):
                    state |= denoiser.step(state, index)
            finally:
                is_over.set()
            assert drawing is None or drawing.result() is None
        ends.append(state)
    plain, drawn = ends
    assert plain.keys() == drawn.keys()
    assert all(torch.equal(plain[name], drawn[name]) for name in plain)
