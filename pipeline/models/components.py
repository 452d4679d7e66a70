"""Loads single components of a diffusers folder, with errors that name the weight.

Weights are read only from safetensors, never from pickles. Never uses the network.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.files import Shapes, read_json, stored_shapes, variants
from svdq.pipeline.models.folder_check import Layout, another_model
from svdq.pipeline.models.options import DTYPES, WEIGHTS, stored_parts


@dataclass(frozen=True, kw_only=True)
class Components:
    """The components of a checked model folder."""

    #: The folder itself, or its snapshot in the hub's cache.
    path: Path
    #: The requested name, for messages.
    name: str
    #: Of the family.
    layout: Layout
    #: The components of transformers, and the config class of each; the others are of diffusers.
    transformers: Mapping[str, str]

    def config(self, component: str) -> dict[str, Any]:
        """Read a component's configuration without loading its weights.

        Raises:
            InputError: the configuration cannot be read.
        """
        return read_json(self.path, f"{component}/config.json", self.name)

    def weight_bytes(self, component: str, dtype: torch.dtype) -> int:
        """Return the bytes of a component's weights in a dtype."""
        return dtype.itemsize * sum(map(math.prod, self._stored(component, dtype).values()))

    def load(self, component: str, dtype: torch.dtype, device: torch.device) -> Any:
        """Load one component that has weights.

        Raises:
            InputError: its weights do not match its config.
        """
        try:
            return self._load(component, dtype, device)
        except (ValueError, RuntimeError) as error:
            # The libraries report a weight of another shape only in a log report or a page of advice.
            if misfit := self._misfit(component, dtype):
                raise InputError(f"{misfit}; get the model again, or one whose files belong to its config.") from error
            raise

    def _misfit(self, component: str, dtype: torch.dtype) -> str:
        """Describe a weight whose shape does not match the config; "" if there is none."""
        try:
            skeleton = self.without_weights(component)
        except Exception:  # noqa: BLE001 - the config is invalid, and the caller raises an error about it
            return ""
        found = self._stored(component, dtype)
        for weight, tensor in skeleton.state_dict().items():
            expected = list(tensor.shape)
            if found.get(weight, expected) != expected:
                return another_model(component, self.name, weight, found[weight], expected)
        return ""

    def without_weights(self, component: str) -> Any:
        """Create one component from its config on the meta device, without memory for weights."""
        import diffusers
        import transformers

        kind = self.layout.components[component][0]
        with torch.device("meta"):
            if component in self.transformers:
                config = getattr(transformers, self.transformers[component]).from_pretrained(self.path / component)
                return getattr(transformers, kind)._from_config(config)
            return getattr(diffusers, kind).from_config(self.config(component))

    def _stored(self, component: str, dtype: torch.dtype) -> Shapes:
        """Read the shapes of the weights that are loaded for a dtype."""
        return stored_shapes(self.path, component, half=self._is_half(component, dtype))

    def _is_half(self, component: str, dtype: torch.dtype) -> bool:
        """Return whether half precision weights of a component are loaded for a dtype."""
        there = variants(self.path, component)
        return next(kind for kind in acceptable(dtype) if kind in there)

    def _load(self, component: str, dtype: torch.dtype, device: torch.device) -> Any:
        """Load one component that has weights.

        Raises:
            InputError: the files lack a weight, for which diffusers would use random values.
        """
        import diffusers
        import transformers

        variant = "fp16" if self._is_half(component, dtype) else None
        arguments: dict[str, Any] = {"variant": variant, "use_safetensors": True, "local_files_only": True}
        if device.type != "cpu":
            arguments["device_map"] = {"": device}
        library: Any = transformers if component in self.transformers else diffusers
        # Both libraries renamed the argument and warn about the old name.
        renamed = hasattr(diffusers.utils, "_resolve_dtype")
        if library is transformers:
            renamed = int(transformers.__version__.partition(".")[0]) >= 5
        arguments["dtype" if renamed else "torch_dtype"] = dtype
        model, loading = getattr(library, self.layout.components[component][0]).from_pretrained(
            self.path / component, output_loading_info=True, **arguments
        )
        if missing := sorted(loading["missing_keys"]):
            raise InputError(
                f"The {component} of the model {self.name} lacks {len(missing)} of its weights, such as {missing[0]}; "
                "get the model again, or one whose files belong to its config."
            )
        return model


def acceptable(dtype: torch.dtype) -> tuple[bool, ...]:
    """Return the weights that suit a dtype, the best first: True for half precision, False for full."""
    name = str(dtype).removeprefix("torch.")
    return WEIGHTS[next(short for short, long in DTYPES.items() if long == name)]


def be_quiet() -> None:
    """Suppress the libraries' progress bars and advice (such as to install torchvision) in a worker's log."""
    import diffusers.utils.logging
    import transformers.utils.logging

    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
    # diffusers imports torchao if it is installed, which warns about each of its GPU parts that does not match.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def first_not_finite(pipeline: Any) -> str:
    """Name the first weight of a diffusers pipeline that is NaN or infinite, such as `unet (conv_in.weight)`, or ""."""
    for component, module in pipeline.components.items():
        weights = (module.named_parameters(), module.named_buffers()) if isinstance(module, torch.nn.Module) else ()
        for name, weight in chain(*weights):
            if not all(_is_finite(part) for part in stored_parts(weight)):
                return f"{component} ({name})"
    return ""


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    # aminmax propagates NaN.
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor.detach()))).all())
