"""What a model takes in memory, told without computing: the same as a meter sees when the same is computed."""

import itertools
from pathlib import Path

import pytest
import torch
from PIL import Image

from svdq.pipeline.errors import UnavailableError
from svdq.pipeline.models.compute import DEFAULTS, ComputeOptions, apply, stored_bytes
from svdq.pipeline.models.memory import MemoryEstimator, StorageMeter
from svdq.pipeline.models.memory_process import EstimatorProcess
from svdq.pipeline.models.model import Part
from svdq.pipeline.models.svd import SvdModel
from svdq.pipeline.models.svd_folder import SvdFolder
from svdq.pipeline.parameters import VideoParameters

ALL = Part.ENCODER | Part.DENOISER | Part.DECODER
CPU = torch.device("cpu")
#: Bytes of a scheduler's tables, which are made when a number of steps is first met, here or there.
TABLES = 20_000


def estimator(model: Path, dtype: torch.dtype = torch.float32, device: str = "cpu", **options) -> MemoryEstimator:
    return MemoryEstimator(str(model), dtype, device, ComputeOptions(**options))


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> SvdModel:
    return SvdModel(str(tiny_model), ALL, CPU, torch.float32)


@pytest.fixture(scope="module")
def estimates(tiny_model: Path) -> MemoryEstimator:
    return estimator(tiny_model)


def metered(run) -> int:
    meter = StorageMeter(("cpu",))
    with torch.inference_mode(), meter:
        run()
    return meter.peak


@pytest.mark.parametrize("guided", [True, False])
def test_a_step_takes_what_was_estimated(model: SvdModel, estimates: MemoryEstimator, guided: bool) -> None:
    scale = 3.0 if guided else 1.0
    parameters = VideoParameters(seed=1, frames=3, width=128, height=64, max_guidance_scale=scale)

    def step() -> None:
        tensors = {
            "latents": torch.ones(1, 3, 4, 8, 16),
            "image_latents": torch.ones(1, 4, 8, 16),
            "image_embedding": torch.ones(1, 1, model.pipeline.unet.config.cross_attention_dim),
        }
        model.denoiser(tensors, parameters).step(tensors["latents"], 0)

    assert estimates.step(128, 64, 3, guided) == pytest.approx(metered(step), abs=TABLES)


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_a_decode_takes_what_was_estimated(model: SvdModel, estimates: MemoryEstimator, chunk: int) -> None:
    parameters = VideoParameters(seed=1, frames=5, width=128, height=64)
    taken = metered(lambda: model.decode({"latents": torch.ones(1, 5, 4, 8, 16)}, parameters, chunk))
    assert estimates.decode(128, 64, 5, chunk) == taken


def test_an_encode_takes_what_was_estimated(model: SvdModel, estimates: MemoryEstimator) -> None:
    parameters = VideoParameters(seed=1, frames=1, width=128, height=64)
    taken = metered(lambda: model.encode(Image.new("RGB", (128, 64)), parameters))
    assert estimates.encode(ALL, 128, 64) == pytest.approx(taken, abs=TABLES)


@pytest.mark.parametrize("parts", [Part.of_rank(rank, 3) for rank in range(3)] + [ALL])
def test_weights_are_those_of_the_ranks_own_components(
    tiny_model: Path, estimates: MemoryEstimator, parts: Part
) -> None:
    components = SvdModel(str(tiny_model), parts, CPU, torch.float32).pipeline.components.values()
    modules = [component for component in components if isinstance(component, torch.nn.Module)]
    assert estimates.weights(parts) == sum(
        tensor.nbytes for module in modules for tensor in [*module.parameters(), *module.buffers()]
    )


def test_more_takes_more(estimates: MemoryEstimator) -> None:
    def rising(values: list[int]) -> bool:
        return all(low < high for low, high in itertools.pairwise(values))

    assert rising([estimates.step(64, 64, frames, True) for frames in (1, 2, 5)])
    assert rising([estimates.step(side, 64, 2, True) for side in (64, 128, 256)])
    assert rising([estimates.decode(64, 64, 9, chunk) for chunk in (1, 4, 9)])
    assert rising([estimates.decode(64, 64, frames, 2) for frames in (4, 9)])
    assert rising([estimates.encode(ALL, side, side) for side in (64, 128)])


def test_the_way_of_computing_counts(tiny_model: Path, estimates: MemoryEstimator) -> None:
    full = estimates.step(128, 128, 4, True)
    assert estimator(tiny_model, torch.bfloat16).step(128, 128, 4, True) < 0.6 * full


def test_weights_in_int8_count_as_they_are_kept(tiny_model: Path, estimates: MemoryEstimator) -> None:
    pytest.importorskip("torchao", reason="comes with svdq[approximate]")
    options = ComputeOptions(approximate=("int8",))
    parts = Part.DENOISER | Part.DECODER
    model = SvdModel(str(tiny_model), parts, CPU, torch.float32, options)
    held = [*model.pipeline.unet.parameters(), *model.pipeline.vae.parameters(), *model.pipeline.vae.buffers()]
    found = estimator(tiny_model, approximate=("int8",))
    assert found.weights(parts) == sum(map(stored_bytes, held)) < 0.7 * estimates.weights(parts)
    assert found.step(128, 64, 3, True) == pytest.approx(estimates.step(128, 64, 3, True), rel=0.1)


def test_half_precision_encodes_in_full(tiny_model: Path) -> None:
    """The VAE overflows in float16, so all of it that a rank holds is converted for the time."""
    half = estimator(tiny_model, torch.float16, "cuda")
    decoder = half.weights(Part.DENOISER | Part.DECODER) - half.weights(Part.DENOISER)
    alone, with_decoder = (half.encode(parts, 64, 64) for parts in (Part.ENCODER, ALL))
    # Its weights in float32 are twice those in float16.
    assert with_decoder - alone == pytest.approx(2 * decoder, rel=0.05)


def test_the_meter_follows_what_is_alive() -> None:
    weight = torch.empty(1000, 10, device="meta")
    meter = StorageMeter(("meta",))
    with torch.inference_mode(), meter:
        column = torch.empty(500, 1000, device="meta") @ weight  # 2 MB and 20 kB, of which 20 kB stay
        assert (meter.live, meter.peak) == (20_000, 2_020_000)
        view = column.t()
        assert meter.live == 20_000
        weight.t()
        assert meter.live == 20_000
        del column
        assert meter.live == 20_000
        del view
        assert meter.live == 0
    assert meter.peak == 2_020_000


def test_a_device_never_holds_the_weights_that_are_quantised_for_it(tiny_model: Path) -> None:
    """The meta device stands for a GPU: both start without any of the weights."""
    pytest.importorskip("torchao", reason="comes with svdq[approximate]")
    meta, folder = torch.device("meta"), SvdFolder.find(str(tiny_model), torch.float32)
    unet = folder.load_pipeline(Part.DENOISER, torch.float32, meta, unet_on_host=True).unet
    full = sum(map(stored_bytes, unet.parameters()))
    layer = max(module.weight.nbytes for module in unet.modules() if isinstance(module, torch.nn.Linear))
    meter = StorageMeter(("meta",))
    with torch.inference_mode(), meter:
        apply(unet, ComputeOptions(approximate=("int8",)), meta)
    assert {weight.device for weight in unet.parameters()} == {meta}
    assert meter.live == sum(map(stored_bytes, unet.parameters()))
    assert meter.peak <= meter.live + 2 * layer < full


def test_attention_takes_no_square_of_the_tokens() -> None:
    meter = StorageMeter(("meta",))
    with torch.inference_mode(), meter:
        query = torch.empty(1, 1, 100_000, 8, device="meta")
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert meter.peak == 100_000 * (8 + 8 + 1) * 4


def test_a_kernel_that_needs_its_input_in_one_piece_copies_it() -> None:
    meter = StorageMeter(("meta",))
    norm = torch.nn.GroupNorm(2, 4, device="meta")
    with torch.inference_mode(), meter:
        pixels = torch.empty(4, 2, 100, 100, device="meta")
        norm(pixels.transpose(0, 1))
        assert meter.peak >= 3 * pixels.nbytes


@pytest.mark.long
def test_a_process_of_its_own_tells_the_same(tiny_model: Path, estimates: MemoryEstimator) -> None:
    apart = EstimatorProcess(str(tiny_model), torch.float32, "cpu", DEFAULTS)
    try:
        assert apart.weights(False, True) == estimates.weights(Part.DENOISER | Part.DECODER)
        assert apart.encode(True, 64, 128) == estimates.encode(ALL, 64, 128)
        assert apart.step(64, 128, 3, True) == pytest.approx(estimates.step(64, 128, 3, True), abs=TABLES)
        with pytest.raises(UnavailableError, match="cannot be estimated: ValidationError"):
            apart.decode(63, 64, 3, 1)
        assert apart.decode(64, 64, 3, 1) == estimates.decode(64, 64, 3, 1)
    finally:
        apart.close()
