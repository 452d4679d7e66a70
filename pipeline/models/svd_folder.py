"""Finding a StableVideoDiffusionPipeline and loading only some of its components. Knows nothing of videos.

Weights are read from safetensors only, never from pickles, and a local folder never causes network traffic.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.model import Part
from svdq.pipeline.models.model_index import HUB_ID, check_index, read_json


@dataclass(frozen=True, kw_only=True)
class SvdFolder:
    """A diffusers folder that holds a StableVideoDiffusionPipeline with all its components."""

    #: The folder itself, or the hub cache's snapshot of it.
    path: Path
    #: The name it was asked for by, for messages.
    name: str
    #: "fp16" when half precision was asked for and the folder has such weights, else None.
    variant: str | None

    @classmethod
    def find(cls, name: str, dtype: torch.dtype) -> Self:
        """Find the folder of a model, fetching it when it is a hub id, and check what it holds.

        Raises:
            InputError: there is no such model, or it is not a whole StableVideoDiffusionPipeline.
        """
        path = Path(name).expanduser()
        if not name or not path.is_dir():
            if not HUB_ID.fullmatch(name):
                raise InputError(
                    f"There is no model folder {name!r}; give a diffusers folder, a hub id such as "
                    "stabilityai/stable-video-diffusion-img2vid-xt, or preview."
                )
            path = _fetch(name, dtype)
        check_index(path, name)
        half = dtype == torch.float16 and any(path.glob("*/*.fp16*.safetensors"))
        return cls(path=path, name=name, variant="fp16" if half else None)

    def config(self, component: str) -> dict[str, Any]:
        """Read a model component's configuration without loading its weights.

        Raises:
            InputError: it cannot be read.
        """
        return read_json(self.path / component / "config.json", self.name)

    def load_pipeline(self, parts: Part, dtype: torch.dtype) -> Any:
        """Load a StableVideoDiffusionPipeline whose other components are None.

        Raises:
            InputError: a component cannot be loaded.
        """
        be_quiet()
        import diffusers.utils
        from safetensors import SafetensorError

        encoder, decoder = Part.ENCODER in parts, Part.DECODER in parts
        wanted = {
            "unet": Part.DENOISER in parts,
            "vae": encoder or decoder,
            "image_encoder": encoder,
            "feature_extractor": encoder,
        }
        arguments: dict[str, Any] = {component: None for component, is_wanted in wanted.items() if not is_wanted}
        # diffusers renamed the argument and warns of the old name.
        arguments["dtype" if hasattr(diffusers.utils, "_resolve_dtype") else "torch_dtype"] = dtype
        try:
            pipeline = diffusers.StableVideoDiffusionPipeline.from_pretrained(
                self.path, variant=self.variant, use_safetensors=True, local_files_only=True, **arguments
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
            raise InputError(
                f"The model {self.name} cannot be loaded ({_first_line(error)}); "
                "it must be a whole StableVideoDiffusionPipeline folder with safetensors weights."
            ) from error
        if pipeline.vae is not None:
            if not encoder:
                pipeline.vae.encoder = pipeline.vae.quant_conv = None
            if not decoder:
                pipeline.vae.decoder = None
        return pipeline


def _fetch(name: str, dtype: torch.dtype) -> Path:
    """Fetch a model from the hub, or find it in the cache, preferring half precision weights for float16."""
    be_quiet()
    from diffusers import StableVideoDiffusionPipeline

    # A model without fp16 weights raises ValueError, and is fetched as it is.
    variants = ("fp16", None) if dtype == torch.float16 else (None,)
    failure: Exception | None = None
    for variant in variants:
        try:
            return Path(StableVideoDiffusionPipeline.download(name, variant=variant, use_safetensors=True))
        except Exception as error:  # noqa: BLE001  (the hub's clients, requests or httpx, have errors of their own)
            failure = error
    assert failure is not None
    raise InputError(
        f"The model {name} is neither a folder nor can it be fetched from the hub ({_first_line(failure)}); "
        "give a folder, or check the id and the network."
    ) from failure


def be_quiet() -> None:
    """Keep the libraries' progress bars and advice (such as to install torchvision) out of a worker's log."""
    import diffusers.utils.logging
    import transformers.utils.logging

    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.set_verbosity_error()
        library.disable_progress_bar()


def _first_line(error: Exception) -> str:
    line = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
    return line if len(line) <= 160 else f"{line[:160]}…"
