"""Keeps what a denoising component predicts while a step is measured; the states come from the model itself."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from svdq.pipeline.models.base import FolderModel


@contextlib.contextmanager
def keep_predictions(model: FolderModel, component: str, keep: Callable[[Tensor], None]) -> Iterator[None]:
    """Call a function with what a UNet or transformer of a model predicts, while in the context."""

    def after(_module: Any, _arguments: Any, predicted: Any) -> None:
        keep(predicted[0])

    with getattr(model.pipeline, component).register_forward_hook(after):
        yield
