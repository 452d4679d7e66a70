"""Finds a StableVideoDiffusionPipeline and loads only the requested components.

Weights are read only from safetensors, never from pickles. Never uses the network.
"""

import logging
import math
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.base import Role
from svdq.pipeline.models.files import Shapes, read_json, stored_shapes, variants
from svdq.pipeline.models.folder_check import another_model, check_folder
from svdq.pipeline.models.hub import find_folder
from svdq.pipeline.models.load_errors import in_a_sentence
from svdq.pipeline.models.options import DTYPES, WEIGHTS, stored_parts
from svdq.pipeline.models.svd.layout import LAYOUT


@dataclass(frozen=True, kw_only=True)
class SvdFolder:
    """A diffusers folder that contains a StableVideoDiffusionPipeline with all its components."""

    #: The folder itself, or its snapshot in the hub's cache.
    path: Path
    #: The requested name, for messages.
    name: str

    @classmethod
    def find(cls, name: str, dtype: torch.dtype) -> Self:
        """Find the folder of a model on this machine and check its content.

        Raises:
            InputError: the model does not exist here, or is not a complete StableVideoDiffusionPipeline.
        """
        path = find_folder(name)
        check_folder(path, name, LAYOUT, half=acceptable(dtype))
        return cls(path=path, name=name)

    def config(self, component: str) -> dict[str, Any]:
        """Read a component's configuration without loading its weights.

        Raises:
            InputError: the configuration cannot be read.
        """
        return read_json(self.path, f"{component}/config.json", self.name)

    def load_pipeline(self, role: Role, dtype: torch.dtype, device: torch.device, *, unet_on_host: bool = False) -> Any:
        """Load a StableVideoDiffusionPipeline whose other components are None, on its device.

        Weights are mapped from their files and copied to a GPU one by one. On a CPU, weights that already have the
        dtype stay mapped, so that all ranks of a host share their pages.

        Args:
            role: what the model is used for.
            dtype: dtype of the weights.
            device: target device.
            unet_on_host: leave the UNet on the host, for the caller to move.

        Raises:
            InputError: a component cannot be loaded, for whatever reason.
        """
        be_quiet()
        import diffusers

        encoder, decoder = role.encode, role.decode
        wanted = {"unet": role.has("unet"), "vae": encoder or decoder, "image_encoder": encoder}
        arguments: dict[str, Any] = {} if encoder else {"feature_extractor": None}

        def needed() -> int:
            return sum(self._bytes(component, dtype) for component in wanted if wanted[component])

        for component, is_wanted in wanted.items():
            place = torch.device("cpu") if component == "unet" and unet_on_host else device
            with in_a_sentence(f"The {component} of the model {self.name}", device, needed):
                arguments[component] = self._load_whole(component, dtype, place) if is_wanted else None
        with in_a_sentence(f"The model {self.name}", device, needed):
            pipeline: Any = diffusers.StableVideoDiffusionPipeline.from_pretrained(
                self.path, local_files_only=True, **arguments
            )
            if pipeline.vae is not None:
                if not encoder:
                    pipeline.vae.encoder = pipeline.vae.quant_conv = None
                if not decoder:
                    pipeline.vae.decoder = None
            return pipeline if unet_on_host else pipeline.to(device)

    def _load_whole(self, component: str, dtype: torch.dtype, device: torch.device) -> Any:
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
            skeleton = self._without_weights(component)
        except Exception:  # noqa: BLE001 - the config is invalid, and the caller raises an error about it
            return ""
        found = self._stored(component, dtype)
        for weight, tensor in skeleton.state_dict().items():
            expected = list(tensor.shape)
            if found.get(weight, expected) != expected:
                return another_model(component, self.name, weight, found[weight], expected)
        return ""

    def _without_weights(self, component: str) -> Any:
        """Create one component from its config on the meta device, without memory for weights."""
        import diffusers
        import transformers

        with torch.device("meta"):
            if component == "image_encoder":
                config = transformers.CLIPVisionConfig.from_pretrained(self.path / component)
                return transformers.CLIPVisionModelWithProjection._from_config(config)
            return getattr(diffusers, LAYOUT.components[component][0]).from_config(self.config(component))

    def _stored(self, component: str, dtype: torch.dtype) -> Shapes:
        """Read the shapes of the weights that are loaded for a dtype."""
        return stored_shapes(self.path, component, half=self._is_half(component, dtype))

    def _is_half(self, component: str, dtype: torch.dtype) -> bool:
        """Return whether half precision weights of a component are loaded for a dtype."""
        there = variants(self.path, component)
        return next(kind for kind in acceptable(dtype) if kind in there)

    def _bytes(self, component: str, dtype: torch.dtype) -> int:
        """Return the bytes of a component's weights in a dtype."""
        return dtype.itemsize * sum(map(math.prod, self._stored(component, dtype).values()))

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
        library: Any = transformers if component == "image_encoder" else diffusers
        # Both libraries renamed the argument and warn about the old name.
        renamed = hasattr(diffusers.utils, "_resolve_dtype")
        if library is transformers:
            renamed = int(transformers.__version__.partition(".")[0]) >= 5
        arguments["dtype" if renamed else "torch_dtype"] = dtype
        model, loading = getattr(library, LAYOUT.components[component][0]).from_pretrained(
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
