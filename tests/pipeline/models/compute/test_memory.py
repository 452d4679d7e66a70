"""The memory that videos are estimated to take, and the chunk sizes that ran out of it."""

from pathlib import Path

import pytest
import torch

from svdq.pipeline.models.compute.memory import shape_for
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.svd.family import SvdParameters, memory
from svdq.pipeline.models.svd.model import SvdModel
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.models.wan.family import PUBLISHED, WanParameters
from svdq.pipeline.models.wan.family import memory as wan_memory

SMALL = SvdParameters(seed=1, frames=2, width=128, height=64, decode_chunk_size=1)


def test_skipped_steps_need_room_for_two_residuals() -> None:
    """2 x tokens x width of bfloat16: 32,760 tokens at 832x480 with 81 frames, 75,600 at 1280x720."""
    for width, height, expected in ((832, 480, 0.67), (1280, 720, 1.55)):
        values = WanParameters(seed=1, width=width, height=height, frames=81)
        plain, cached = (
            wan_memory("step", shape_for("step", each), "bfloat16", PUBLISHED, has_decoder=True)
            for each in (values, values.model_copy(update={"step_cache": 0.06}))
        )
        assert (cached - plain) / 1e9 == pytest.approx(expected, abs=0.005)


def estimate(activity, shape, dtype: str, *, has_decoder: bool = False) -> int:
    return memory(activity, shape, dtype, {}, has_decoder=has_decoder)


def gigabytes(activity, size: tuple[int, int], frames: int, *, chunk: int = 1, guided: bool = True) -> float:
    parameters = SvdParameters(
        seed=1,
        width=size[0],
        height=size[1],
        frames=frames,
        decode_chunk_size=chunk,
        max_guidance_scale=3.0 if guided else 1.0,
    )
    return estimate(activity, shape_for(activity, parameters), "float16") / 1e9


@pytest.mark.parametrize(
    ("size", "frames", "step", "all_at_once", "eight", "one", "encode"),
    [
        ((1024, 576), 25, 8.31, 42.28, 13.61, 1.82, 2.28),
        ((1024, 576), 14, 4.67, 23.67, 13.54, 1.76, 2.28),
        ((768, 448), 25, 4.85, 24.67, 7.94, 1.06, 1.39),
        ((576, 320), 25, 2.60, 13.22, 4.26, 0.57, 0.80),
        ((1920, 1088), 25, 29.43, 149.76, 48.22, 6.43, 7.69),
    ],
)
def test_estimates_are_those_of_the_table_in_the_documentation(
    size, frames, step, all_at_once, eight, one, encode
) -> None:
    """Taken from the published model, run on tensors without contents; those of its VAE times 1.4."""
    assert gigabytes("step", size, frames) == pytest.approx(step, rel=0.01)
    assert gigabytes("decode", size, frames, chunk=frames) == pytest.approx(all_at_once, rel=0.005)
    assert gigabytes("decode", size, frames, chunk=8) == pytest.approx(eight, rel=0.005)
    assert gigabytes("decode", size, frames, chunk=1) == pytest.approx(one, rel=0.01, abs=0.005)
    assert gigabytes("encode", size, frames) == pytest.approx(encode, rel=0.02, abs=0.005)


@pytest.mark.parametrize(
    ("size", "frames", "step", "decode", "encode"),
    [
        ((832, 480), 81, 3.74, 11.44, 8.99),
        ((1280, 720), 81, 8.61, 26.38, 20.75),
        ((832, 480), 41, 1.97, 11.16, 8.99),
        ((640, 352), 49, 1.32, 6.33, 5.07),
    ],
)
def test_estimates_of_wan_are_those_of_the_table_in_the_documentation(size, frames, step, decode, encode) -> None:
    """Counted on the published modules of I2V-A14B, run on tensors without contents; those of the VAE times 1.4."""

    def gigabytes(activity, shape) -> float:
        return wan_memory(activity, shape, "bfloat16", PUBLISHED, has_decoder=False) / 1e9

    assert gigabytes("step", (*size, frames, 2)) == pytest.approx(step, rel=0.02)
    assert gigabytes("decode", (*size, frames, frames)) == pytest.approx(decode, rel=0.01)
    assert gigabytes("encode", size) == pytest.approx(encode, rel=0.01)


def test_guidance_dtype_and_a_decoder_beside_the_encoder_count() -> None:
    assert gigabytes("step", (1024, 576), 25, guided=False) == pytest.approx(3.99, rel=0.01)
    step, size = (1024, 576, 25, 2), (1024, 576)
    assert estimate("step", step, "float32") == 2 * estimate("step", step, "bfloat16")
    assert estimate("step", step, "bfloat16") == estimate("step", step, "float16")
    # The VAE overflows in float16 alone.
    assert estimate("encode", size, "bfloat16") == pytest.approx(1.08e9, rel=0.01)
    decoder = estimate("encode", size, "float16", has_decoder=True) - estimate("encode", size, "float16")
    assert decoder == pytest.approx(2 * 0.127e9, rel=0.01)


@pytest.mark.parametrize("role", [Role(), Role(decode=True), Role(encode=True)])
def test_a_model_says_the_bytes_of_its_weights(tiny_model: Path, role: Role) -> None:
    model = SvdModel(resolve(str(tiny_model)), role, torch.device("cpu"), torch.float32)
    files = sum(file.stat().st_size for file in tiny_model.glob("unet/*.safetensors"))
    if role == Role():
        assert model.info.weight_bytes == pytest.approx(files, rel=0.02)  # the files have headers
    else:
        assert model.info.weight_bytes > files
