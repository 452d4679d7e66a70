"""Fixtures of the pipeline's tests: one torch thread, the demo photo."""

from pathlib import Path

import pytest
import torch
from PIL.Image import Image

from svdq.pipeline.media.image import load_photo, prepare_photo

DEMO_PHOTO = Path(__file__).parents[2] / "docs" / "demo" / "photo.jpg"


def pytest_collection_modifyitems(items):
    # diffusers 0.42 hands torch tensors to np.array, of which numpy 2 warns.
    marker = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(marker)


@pytest.fixture(autouse=True)
def one_thread():
    """A rank computes with one thread, and float32 bits depend on the number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def photo_bytes() -> bytes:
    """A real photograph, 600 x 360 pixels."""
    return DEMO_PHOTO.read_bytes()


@pytest.fixture(scope="session")
def image(photo_bytes: bytes) -> Image:
    """That photograph as a model of 64 x 64 pixels gets it."""
    return prepare_photo(load_photo(photo_bytes, 10**8), 64, 64, "crop")
