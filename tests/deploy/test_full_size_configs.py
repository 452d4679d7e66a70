"""The published sizes: as many parameters as the published weights, and a folder that opens like any model."""

from pathlib import Path

import pytest
import torch
from gpu_checks import full_size

from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.svd.model import SvdModel
from svdq.pipeline.models.video_model import Role

pytestmark = pytest.mark.nightly


def test_components_have_the_published_numbers_of_parameters() -> None:
    from diffusers import AutoencoderKLTemporalDecoder, UNetSpatioTemporalConditionModel
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    with torch.device("meta"):
        models = [
            UNetSpatioTemporalConditionModel(**full_size.UNET_CONFIG),
            AutoencoderKLTemporalDecoder(**full_size.VAE_CONFIG),
            CLIPVisionModelWithProjection(CLIPVisionConfig(**full_size.IMAGE_ENCODER_CONFIG)),
        ]
    sizes = [sum(weight.numel() for weight in model.parameters()) for model in models]
    # The files in half precision have two bytes of each: 3.05 GB, 196 MB and 1.26 GB.
    assert sizes == [1_524_623_082, 97_742_847, 632_076_800]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_do_not_depend_on_the_dtype_but_for_rounding(tmp_path: Path, dtype: torch.dtype) -> None:
    # No component in full size: the stand-in for the UNet, with everything else tiny.
    full_size.write_full_size_model(tmp_path / "model", dtype, components=())
    unet = SvdModel(resolve(str(tmp_path / "model")), Role(), torch.device("cpu"), torch.float32).pipeline.unet
    exact = full_size.with_random_weights(lambda: type(unet).from_config(unet.config), torch.float32)
    wanted = {name: weight.to(dtype).float() for name, weight in exact.named_parameters()}
    assert all(torch.equal(weight, wanted[name]) for name, weight in unet.named_parameters())
    assert unet.conv_in.weight.unique().numel() > 1000
