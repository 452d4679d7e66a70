"""MagCache in Wan: diffusers' steps and bits, wherever a video is cut before a computed step."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.compute import options as compute_options
from svdq.pipeline.models.compute.options import ComputeOptions
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.model_file import StepCacheEntry, read_model_file
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.svd.family import FAMILY as SVD
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.models.wan.experts import experts_of
from svdq.pipeline.models.wan.family import FAMILY, MODELS, PUBLISHED, WanParameters, curve_of, skipped
from svdq.pipeline.models.wan.layout import HIGH_NOISE, LOW_NOISE
from svdq.pipeline.models.wan.step_cache import Curve
from svdq.pipeline.planning.binding import step_costs
from tests.pipeline.rendering import denoise, diffusers_frames

CPU = torch.device("cpu")


def marks_of(values: WanParameters, facts: Any = PUBLISHED) -> str:
    """Return the steps of a video: X for a computed one, a dot for a skipped one, | where the expert changes."""
    segments = FAMILY.unit_costs(FAMILY.complete(values, facts), facts).segments
    return "|".join("".join(".X"[cost > 0] for cost in step_costs([each])) for each in segments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("threshold", "retention", "expected"),
    [
        (0.03, 0.2, "XXX..X..X..X..X|XXXXX.X.X.X.X.X.XXXXXXXXX"),
        (0.06, 0.2, "XXX..X..X..X..X|XXXXX..X..X..X.X.X.XXXXXX"),
        (0.12, 0.1, "XX..X..X..X..X.|XXX..X..X..X..X..X.X.X.XX"),
    ],
)
def test_the_published_curve_skips_the_steps_that_it_should(threshold: float, retention: float, expected: str) -> None:
    facts = PUBLISHED | {"step_cache": StepCacheEntry(retention=retention).model_dump(exclude_none=True)}
    assert marks_of(WanParameters(seed=1, step_cache=threshold), facts) == expected


def test_without_a_threshold_nothing_is_skipped_and_the_job_is_as_before() -> None:
    assert FAMILY.unit_costs(FAMILY.complete(WanParameters(seed=1), PUBLISHED), PUBLISHED).segments[0].costs == ()
    assert "step_cache" not in WanParameters(seed=1).model_dump_json()


@given(
    ratios=st.lists(st.floats(0.5, 1.5, width=32), min_size=1, max_size=60),
    num_steps=st.integers(1, 60),
    threshold=st.floats(0, 0.5),
    max_skip=st.integers(1, 5),
    retention=st.floats(0, 1),
)
@settings(max_examples=150, deadline=None)
@pytest.mark.slow
def test_the_steps_that_diffusers_skips_are_skipped(
    ratios: list[float], num_steps: int, threshold: float, max_skip: int, retention: float
) -> None:
    curve = Curve(ratios={HIGH_NOISE: tuple(ratios)}, max_skip=max_skip, retention=retention)
    ours = curve.skipped([HIGH_NOISE] * num_steps, threshold)
    assert ours == diffusers_skips(ratios, num_steps, threshold, max_skip, retention)


@pytest.mark.slow
def test_with_a_single_block_diffusers_does_not_count_skipped_steps() -> None:
    """Why such a tiny model differs, as docs/step-cache.md says; if this fails, diffusers counts them."""
    ratios = [1.0, *(0.99 - step / 500 for step in range(19))]
    ours = Curve(ratios={HIGH_NOISE: tuple(ratios)}).skipped([HIGH_NOISE] * 20, 0.06)
    assert ours == diffusers_skips(ratios, 20, 0.06, max_skip=2, retention=0.2)
    assert ours != diffusers_skips(ratios, 20, 0.06, max_skip=2, retention=0.2, num_blocks=1)


def diffusers_skips(
    ratios: list[float], num_steps: int, threshold: float, max_skip: int, retention: float, num_blocks: int = 2
) -> list[bool]:
    """Have diffusers' hooks skip the blocks of a transformer that only counts."""
    from diffusers import WanTransformer3DModel
    from diffusers.hooks import MagCacheConfig, apply_mag_cache

    sizes = {"num_attention_heads": 1, "attention_head_dim": 12, "ffn_dim": 4, "text_dim": 4, "freq_dim": 4}
    transformer = WanTransformer3DModel(in_channels=4, out_channels=4, num_layers=num_blocks, **sizes)
    computed = []
    transformer.blocks[0].forward = lambda hidden_states, *_: hidden_states
    transformer.blocks[-1].forward = lambda hidden_states, *_: computed.append(step) or hidden_states
    config = {"threshold": threshold, "max_skip_steps": max_skip, "retention_ratio": retention}
    apply_mag_cache(transformer, MagCacheConfig(num_inference_steps=num_steps, mag_ratios=ratios, **config))
    with torch.inference_mode(), transformer.cache_context("cond"):
        for step in range(num_steps):  # noqa: B007 - the block reads it
            transformer(torch.zeros(1, 4, 1, 2, 2), torch.ones(1), torch.zeros(1, 1, 4), return_dict=False)
    return [step not in computed for step in range(num_steps)]


def test_a_speedup_is_the_smallest_threshold_that_reaches_it() -> None:
    values = FAMILY.complete(WanParameters(seed=1), PUBLISHED)
    curve, experts = curve_of(values, PUBLISHED), experts_of(values.steps, values.flow_shift, PUBLISHED)
    for speedup in (1.2, 1.5, 1.75):
        threshold = curve.threshold_for(experts, speedup)
        assert curve.skipped(experts, threshold).count(False) <= 40 / speedup
        assert curve.skipped(experts, threshold - 0.01).count(False) > 40 / speedup
    with pytest.raises(InputError, match=r"4x is more than there is: at least .* of 40 steps are computed"):
        curve.threshold_for(experts, 4)


@pytest.mark.parametrize(
    ("facts", "changes", "words"),
    [
        (PUBLISHED, {"steps": 2}, "skips none of 2 steps of Wan 2.2 I2V-A14B"),
        (PUBLISHED, {"step_cache": 0.00001}, "skips none of 40 steps"),
        (PUBLISHED | {"sigmas": [1.0, 0.9, 0.8, 0.6]}, {}, "the 4 steps of a model file with sigmas"),
        (PUBLISHED | {"sigmas": "simple"}, {"steps": 4}, "all of which are needed: the curve was measured with 40"),
        (PUBLISHED | {"sigmas": "beta"}, {}, "no curve for the schedule beta"),
        (MODELS["Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers"].facts, {}, "a curve, which Wan 2.1 FLF2V-14B has none of"),
    ],
)
def test_what_skips_nothing_is_a_sentence(facts: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        FAMILY.complete(WanParameters(**{"seed": 1, "step_cache": 0.06} | changes), facts)


def test_a_schedule_of_comfyui_with_even_steps_skips_as_the_models_own() -> None:
    values = WanParameters(seed=1, step_cache=0.06, flow_shift=5.0)
    own = skipped(FAMILY.complete(values, PUBLISHED), PUBLISHED)
    simple = PUBLISHED | {"sigmas": "simple"}
    assert skipped(FAMILY.complete(values, simple), simple) == own
    assert own.count(False) == 23
    # A curve that was measured with a schedule is for that one, and for its number of steps.
    measured = PUBLISHED | {"sigmas": "beta", "step_cache": {"high": [1.0, 0.99], "low": [0.99] * 4}}
    assert any(skipped(FAMILY.complete(values.model_copy(update={"steps": 6}), measured), measured))


def test_the_curve_follows_the_size() -> None:
    facts = MODELS["Wan-AI/Wan2.1-I2V-14B-480P-Diffusers"].facts
    small, large = (
        curve_of(FAMILY.complete(WanParameters(seed=1, width=width, height=height), facts), facts)
        for width, height in ((832, 480), (1280, 720))
    )
    assert (small.ratios[HIGH_NOISE][1], large.ratios[HIGH_NOISE][1]) == (0.98783, 0.99428)


@pytest.mark.parametrize(
    ("text", "facts", "words"),
    [
        ("ratios = [1.0, 0.9]", PUBLISHED, "of a model with two experts needs high and low"),
        ("high = [1.0]\nlow = [1.0]", PUBLISHED | {"boundary_ratio": None}, "with one transformer needs ratios"),
        ("high = [1.0]", PUBLISHED, "give ratios, or both high and low"),
        ("ratios = [0.0]", PUBLISHED, "greater than 0"),
        ("curve = 1", PUBLISHED, "step_cache.curve: is no key of a model file"),
    ],
)
def test_a_model_file_with_a_wrong_curve_is_a_sentence(tmp_path: Path, text: str, facts: Any, words: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'base = "some/model"\n[step_cache]\n{text}\n')
    with pytest.raises(InputError, match=words):
        FAMILY.with_model_file(dict(facts), read_model_file(path), str(path))
    with pytest.raises(InputError, match=r"step_cache, which Stable Video Diffusion cannot use|cannot be used"):
        SVD.with_model_file({}, read_model_file(path), str(path))


# The bits.


@pytest.fixture(scope="module")
def opened(folder_of):
    role = Role(embed=True, encode=True, decode=True)
    return cache(lambda kind: open_model(resolve(str(folder_of(kind))), role, CPU, torch.float32))


def render_cut(model: Any, photo: Any, values: WanParameters, last_photo: Any = None) -> Any:
    """Make a video by a new denoiser from each computed step on, which gets nothing but the bytes of the state."""
    state = model.encode(photo, values, last_photo)
    costs = step_costs(model.segments(values))
    for index, cost in enumerate(costs):
        if cost:
            state = load(save({name: tensor.contiguous() for name, tensor in state.items()}))
            denoiser = model.denoiser(state, values, costs)
        state |= denoiser.step(state, index)
    return model.decode(load(save(state)), values, values.num_frames).numpy()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("i2v-a14b", {"steps": 12, "step_cache": 0.06}),
        ("i2v-a14b", {"steps": 14, "step_cache": 0.5, "guidance_scale": 1.0, "width": 96}),
        ("i2v-a14b", {"steps": 10, "step_cache": 0.2, "guidance_scale_2": 2.0, "loop": True, "frames": 9}),
        ("ti2v-5b", {"steps": 11, "step_cache": 0.06}),
        ("i2v-14b", {"steps": 9, "step_cache": 0.1, "flow_shift": 8.0}),
    ],
)
def test_same_bits_as_diffusers_when_cut_before_every_computed_step(opened, folder_of, photo, kind, changes) -> None:
    model = opened(kind)
    plain = {"prompt": "A dog runs.", "negative_prompt": "slow", "frames": 5, "width": 64, "height": 64, "seed": 11}
    values = model.complete(WanParameters(**plain | changes))
    costs = step_costs(model.segments(values))
    assert 0.0 in costs
    ours = render_cut(model, photo.resize((values.width, values.height)), values)
    theirs = diffusers_frames(folder_of(kind), photo.resize((values.width, values.height)), values)
    np.testing.assert_array_equal(ours, theirs)
    off = values.model_copy(update={"step_cache": 0.0})
    assert not np.array_equal(ours, render_cut(model, photo.resize((values.width, values.height)), off))


@pytest.mark.slow
def test_a_skipped_step_computes_no_block(opened, photo) -> None:
    model = opened("i2v-a14b")
    values = model.complete(WanParameters(seed=1, steps=12, frames=5, width=64, height=64, step_cache=0.06))
    calls = []
    hooks = [
        getattr(model.pipeline, name).blocks[0].register_forward_hook(lambda *_: calls.append(1))
        for name in (HIGH_NOISE, LOW_NOISE)
    ]
    render_cut(model, photo.resize((64, 64)), values)
    for hook in hooks:
        hook.remove()
    computed = sum(map(bool, step_costs(model.segments(values))))
    assert len(calls) == 2 * computed < 2 * 12, "both predictions of guidance"


@pytest.mark.slow
def test_same_bits_with_streamed_blocks(opened, tiny_wan, photo) -> None:
    """On a processor, diffusers' hooks move blocks to where they are already, and without a stream."""
    role = Role(embed=True, encode=True, decode=True)
    streamed = open_model(resolve(str(tiny_wan)), role, CPU, torch.float32, ComputeOptions(offload="blocks"))
    values = streamed.complete(WanParameters(seed=1, steps=12, frames=5, width=64, height=64, step_cache=0.06))
    videos = [render_cut(model, photo.resize((64, 64)), values) for model in (streamed, opened("i2v-a14b"))]
    np.testing.assert_array_equal(*videos)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["blocks", "whole"])
def test_a_skipped_step_compiles_nothing(tiny_wan, photo, monkeypatch, compiled: str) -> None:
    """Blocks that are compiled one by one stay so; where all is compiled, only steps without residuals are."""
    num_compiled = 0

    def count(graph: Any, _: Any) -> Any:
        nonlocal num_compiled
        num_compiled += 1
        return graph.forward

    monkeypatch.setattr(compute_options, "BACKEND", count)
    role = Role(embed=True, encode=True, decode=True)
    model = open_model(resolve(str(tiny_wan)), role, CPU, torch.float32, ComputeOptions(compiled=compiled))
    values = model.complete(WanParameters(seed=1, steps=12, frames=5, width=64, height=64))
    state = model.encode(photo.resize((64, 64)), values)
    numbers = []
    for step_cache in (0.0, 0.06):
        denoise(model, state, values.model_copy(update={"step_cache": step_cache}))
        numbers.append(num_compiled)
    assert numbers[0] == numbers[1] > 0
