"""Finding a StableVideoDiffusionPipeline and loading only some of its components. Knows nothing of videos.

Weights are read from safetensors only, never from pickles, and nothing here causes network traffic.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.compute import DTYPES, WEIGHTS
from svdq.pipeline.models.folder_check import check_folder, variants
from svdq.pipeline.models.hub import find_folder
from svdq.pipeline.models.model import Part
from svdq.pipeline.models.model_index import COMPONENTS, read_json


@dataclass(frozen=True, kw_only=True)
class SvdFolder:
    """A diffusers folder that holds a StableVideoDiffusionPipeline with all its components."""

    #: The folder itself, or the hub cache's snapshot of it.
    path: Path
    #: The name it was asked for by, for messages.
    name: str

    @classmethod
    def find(cls, name: str, dtype: torch.dtype) -> Self:
        """Find the folder of a model on this machine and check what it holds.

        Raises:
            InputError: there is no such model here, or it is not a whole StableVideoDiffusionPipeline.
        """
        path = find_folder(name)
        check_folder(path, name, half=acceptable(dtype))
        return cls(path=path, name=name)

    def config(self, component: str) -> dict[str, Any]:
        """Read a model component's configuration without loading its weights.

        Raises:
            InputError: it cannot be read.
        """
        return read_json(self.path / component / "config.json", self.name)

    def load_pipeline(self, parts: Part, dtype: torch.dtype, device: torch.device) -> Any:
        """Load a StableVideoDiffusionPipeline whose other components are None, on its device.

        Weights are mapped from their files. For a GPU they go there one by one; on a CPU, weights that have the dtype
        already stay mapped, so that all ranks of a host share their pages.

        Raises:
            InputError: a component cannot be loaded.
        """
        be_quiet()
        import diffusers
        from safetensors import SafetensorError

        encoder, decoder = Part.ENCODER in parts, Part.DECODER in parts
        arguments: dict[str, Any] = {}
        try:
            arguments["unet"] = self._load("unet", dtype, device) if Part.DENOISER in parts else None
            arguments["vae"] = self._load("vae", dtype, device) if encoder or decoder else None
            arguments["image_encoder"] = self._load("image_encoder", dtype, device) if encoder else None
            if not encoder:
                arguments["feature_extractor"] = None
            pipeline = diffusers.StableVideoDiffusionPipeline.from_pretrained(
                self.path, local_files_only=True, **arguments
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise InputError(
                f"The model {self.name} cannot be loaded ({_first_line(error)}); "
                "it must be a whole StableVideoDiffusionPipeline folder with safetensors weights."
            ) from error
        if pipeline.vae is not None:
            if not encoder:
                pipeline.vae.encoder = pipeline.vae.quant_conv = None
            if not decoder:
                pipeline.vae.decoder = None
        return pipeline.to(device)

    def _load(self, component: str, dtype: torch.dtype, device: torch.device) -> Any:
        """Load one component that has weights.

        Raises:
            InputError: the files lack a weight; diffusers would make one up.
        """
        import diffusers
        import transformers

        half = variants(self.path, component)
        variant = "fp16" if next(kind for kind in acceptable(dtype) if kind in half) else None
        arguments: dict[str, Any] = {"variant": variant, "use_safetensors": True, "local_files_only": True}
        if device.type != "cpu":
            arguments["device_map"] = {"": device}
        library: Any = transformers if component == "image_encoder" else diffusers
        # Both libraries renamed the argument and warn of the old name.
        renamed = hasattr(diffusers.utils, "_resolve_dtype")
        if library is transformers:
            renamed = int(transformers.__version__.partition(".")[0]) >= 5
        arguments["dtype" if renamed else "torch_dtype"] = dtype
        model, loading = getattr(library, COMPONENTS[component]).from_pretrained(
            self.path / component, output_loading_info=True, **arguments
        )
        if missing := sorted(loading["missing_keys"]):
            raise InputError(
                f"The {component} of the model {self.name} lacks {len(missing)} of its weights, such as {missing[0]}; "
                "get the model again, or one whose files belong to its config."
            )
        return model


def acceptable(dtype: torch.dtype) -> tuple[bool, ...]:
    """Give the weights that do for a dtype, the best first: True for half precision ones, False for the full ones."""
    name = str(dtype).removeprefix("torch.")
    return WEIGHTS[next(short for short, long in DTYPES.items() if long == name)]


def be_quiet() -> None:
    """Keep the libraries' progress bars and advice (such as to install torchvision) out of a worker's log."""
    import diffusers.utils.logging
    import transformers.utils.logging

    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
    # Where torchao is installed, diffusers imports it: it tells of each of its parts for GPUs that does not fit.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _first_line(error: Exception) -> str:
    line = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
    return line if len(line) <= 160 else f"{line[:160]}…"
