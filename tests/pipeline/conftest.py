"""Fixtures of the pipeline's tests: one torch thread, the demo photo, every kind of untrained model."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from PIL.Image import Image

from svdq.pipeline.media.image import load_photo, prepare_photo
from svdq.pipeline.models.ltx.tiny import VARIANTS as LTX_VARIANTS
from svdq.pipeline.models.ltx.tiny import write_tiny_ltx
from svdq.pipeline.models.wan.tiny import write_tiny_wan
from tests.pipeline.rendering import one_thread

DEMO_PHOTO = Path(__file__).parents[2] / "docs" / "demo" / "photo.jpg"


def pytest_collection_modifyitems(items):
    # diffusers 0.42 hands torch tensors to np.array, of which numpy 2 warns.
    marker = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(marker)


@pytest.fixture(autouse=True)
def single_thread():
    with one_thread():
        yield


@pytest.fixture(scope="session")
def photo_bytes() -> bytes:
    """A real photograph, 600 x 360 pixels."""
    return DEMO_PHOTO.read_bytes()


@pytest.fixture(scope="session")
def image(photo_bytes: bytes) -> Image:
    """That photograph as a model of 64 x 64 pixels gets it."""
    return prepare_photo(load_photo(photo_bytes, 10**8), 64, 64, "crop")


@pytest.fixture(scope="session")
def photo(image: Image) -> Image:
    return image


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory, tiny_model: Path, tiny_wan: Path) -> Callable[[str], Path]:
    """Give the folder of an untrained model: SVD, Wan or LTX-2 by variant, or Wan with distilled models' scheduler."""

    @cache
    def write(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        if kind == "distilled":
            write_tiny_wan(folder, scheduler="FlowMatchEulerDiscreteScheduler")
        elif kind in LTX_VARIANTS:
            write_tiny_ltx(folder, kind)
        else:
            write_tiny_wan(folder, kind)
        return folder

    return lambda kind: {"svd": tiny_model, "i2v-a14b": tiny_wan}.get(kind) or write(kind)
