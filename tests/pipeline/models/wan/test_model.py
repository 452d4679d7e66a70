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
from PIL import Image
from safetensors.torch import load, save

from svdq.pipeline.errors import SampleError
from svdq.pipeline.loop.sample import Sample
from svdq.pipeline.loop.work import Decoder
from svdq.pipeline.media.image import prepare_photo
from svdq.pipeline.models.compute.options import ComputeOptions
from svdq.pipeline.models.latent_rgb import rgb_of_latents
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.svd.family import SvdParameters
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.models.wan.family import WanParameters
from svdq.pipeline.models.wan.tiny import VARIANTS
from svdq.pipeline.planning.binding import step_costs
from tests.pipeline.rendering import denoise, diffusers_frames

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
EVERYTHING = Role(embed=True, encode=True, decode=True)
#: What each rank has: the expert of the noisy steps and the encoder, then that of the others and the decoder.
HIGH = Role(embed=True, encode=True, components=frozenset({"transformer"}))
LOW = Role(components=frozenset({"transformer_2"}), decode=True)


@pytest.fixture(scope="module")
def opened(folder_of):
    """Open a kind of model for a role, once."""
    return cache(lambda kind, role=EVERYTHING: open_model(resolve(str(folder_of(kind))), role, CPU, torch.float32))


@pytest.fixture(scope="module")
def reference(folder_of):
    """Render with diffusers' pipeline, called as its users do."""
    return lambda kind, *video, **more: diffusers_frames(folder_of(kind), *video, **more)


def parameters(**changes) -> WanParameters:
    defaults = {"prompt": "A dog runs.", "negative_prompt": "slow", "frames": 5, "steps": 5, "width": 64, "height": 64}
    return WanParameters(**(defaults | {"seed": 11} | changes))


def of_kind(kind, **changes) -> WanParameters:
    """The parameters of a kind of model: FLF2V needs a last photo, which the first may be."""
    return parameters(**changes, **({"loop": True} if kind == "flf2v-14b" else {}))


def render(encoder, ranks, photo, values, last_photo=None):
    """Carry one video through the ranks step by step; each gets nothing but the bytes of the state that it needs."""
    state = encoder.encode(photo, values, last_photo)
    for index, rank in enumerate(ranks):
        state = load(save({name: tensor.contiguous() for name, tensor in state.items()}))
        state |= rank.denoiser(state, values).step(state, index)
    state = load(save({name: state[name].contiguous() for name in ranks[-1].decoded}))
    return ranks[-1].decode(state, values, values.num_frames).numpy()


@pytest.mark.parametrize("kind", [*VARIANTS, "distilled"])
@pytest.mark.parametrize(
    ("guidance_scale", "steps"), [pytest.param(4.5, 1, marks=pytest.mark.long), (1.0, 4), (4.5, 7)]
)
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
@pytest.mark.parametrize(("scale", "scale_2"), [(5.0, 2.0), (1.0, 1.0), (1.0, 4.0), (0.0, 7.0)])
def test_same_bits_on_ranks_with_one_expert_each(opened, reference, photo, kind, scale, scale_2):
    high, low = opened(kind, HIGH), opened(kind, LOW)
    values = high.complete(parameters(guidance_scale=scale, guidance_scale_2=scale_2))
    first, second = high.segments(values)
    assert (first.component, second.component) == ("transformer", "transformer_2")
    ranks = [high] * first.stop + [low] * (second.stop - second.start)
    assert np.array_equal(render(high, ranks, photo, values), reference(kind, photo, values))


def test_same_bits_with_streamed_blocks(tiny_wan, reference, photo):
    """On a processor, diffusers' hooks move blocks to where they are already, and without a stream."""
    streaming = ComputeOptions(offload="blocks")
    model = open_model(resolve(str(tiny_wan)), EVERYTHING, CPU, torch.float32, streaming)
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
    assert set(step_costs([first])) == {1.0}
    assert set(step_costs([second])) == {0.5}
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
        *itertools.product(["i2v-a14b"], OTHERS),
        *(
            pytest.param(kind, changes, marks=pytest.mark.long)
            for kind, changes in itertools.product(["distilled", "ti2v-5b"], OTHERS)
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


def test_an_embedding_is_computed_once_for_each_text(opened, photo):
    model = opened("i2v-a14b")
    calls = []
    hook = model.pipeline.text_encoder.register_forward_hook(lambda *_: calls.append(1))
    values = model.complete(parameters(prompt="Once only.", negative_prompt="Never before."))
    first = model.encode(photo, values)
    assert len(calls) == 2
    again = model.encode(photo, values.model_copy(update={"seed": 4}))
    hook.remove()
    assert len(calls) == 2
    assert torch.equal(first["prompt_embeds"], again["prompt_embeds"])


def test_a_model_between_two_photos_needs_both(opened, photo):
    with pytest.raises(
        SampleError, match=r"^Wan 2\.1 FLF2V-14B makes videos between two photos; give a last photo, or"
    ):
        opened("flf2v-14b").encode(photo, opened("flf2v-14b").complete(parameters()))


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


def test_a_decode_that_runs_out_of_memory_falls_back_to_tiles_and_says_so(opened, photo_bytes):
    model = opened("ti2v-5b")
    values = model.complete(parameters(width=320, steps=1))
    state = dict(model.encode(prepare_photo(photo_bytes, 320, 64), values))
    state |= model.denoiser(state, values).step(state, 0)
    tiled = model.decode(state, values, 1).numpy()
    vae, tries = model.pipeline.vae, []

    def little_memory(*_):
        tries.append(vae.use_tiling)
        if not vae.use_tiling:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    hook = vae.post_quant_conv.register_forward_pre_hook(little_memory)
    decoder = Decoder(model)
    sample = Sample(job_id="a", parameters=values, boundaries=(0, 1), step=1, tensors=state, chunk_chosen=True)
    done, frames = decoder.decode(sample)
    assert frames is not None
    assert np.array_equal(frames.numpy(), tiled)
    assert done.parameters.decode_chunk_size == 1
    # The next one starts with tiles, unless its job wants otherwise.
    assert decoder.decode(replace(sample, job_id="b"))[0].parameters.decode_chunk_size == 1
    assert tries.count(False) == 1
    hook.remove()


@pytest.mark.parametrize("kind", ["i2v-a14b", "ti2v-5b"])
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


@pytest.mark.parametrize("kind", ["svd", *VARIANTS, "distilled"])
def test_pictures_change_with_the_steps_up_to_the_latents(opened, photo, kind):
    """After the last step the expected latents are those that are decoded."""
    model = opened(kind)
    shape = SvdParameters(frames=3, steps=4, width=64, height=64, seed=11)
    values = shape if kind == "svd" else model.complete(of_kind(kind))
    state = model.encode(photo, values)
    fresh = model.denoiser(state, values)
    assert model.picture(fresh) is None
    pictures = []
    state = denoise(model, state, values, lambda denoiser: pictures.append(model.picture(denoiser)))
    assert len({picture.numpy().tobytes() for picture in pictures}) == values.steps
    rest = slice(0 if getattr(fresh, "first_frame_mask", None) is None else 1, None)  # that of the photo is given
    latents = state["latents"][0] if kind == "svd" else state["latents"][0].transpose(0, 1)
    assert (pictures[-1].int() - rgb_of_latents(latents).int()).abs()[rest].max() <= (0 if kind == "svd" else 1)


@pytest.mark.parametrize("kind", [*VARIANTS, "distilled"])
def test_pictures_change_no_bit_of_a_video(opened, photo, kind):
    """They are drawn by another thread, at any moment of a step."""
    model = opened(kind)
    values = model.complete(of_kind(kind))
    state = model.encode(photo, values)
    plain = denoise(model, state, values)
    denoiser, is_over = model.denoiser(state, values), threading.Event()

    def draw() -> None:
        while not is_over.is_set():
            model.picture(denoiser)

    with ThreadPoolExecutor() as threads:
        drawing = threads.submit(draw)
        try:
            for index in range(values.steps):
                state = {**state, **denoiser.step(state, index)}
        finally:
            is_over.set()
        drawing.result()
    assert plain.keys() == state.keys()
    assert all(torch.equal(plain[name], state[name]) for name in plain)
