"""Finding a StableVideoDiffusionPipeline and loading only some of its components. Knows nothing of videos.

Weights are read from safetensors only, never from pickles, and a local folder never causes network traffic.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from svdq.pipeline.errors import InputError
from svdq.pipeline.model import Part

#: The components of the pipeline and the classes that this package's arithmetic is written for.
COMPONENTS = {
    "unet": "UNetSpatioTemporalConditionModel",
    "vae": "AutoencoderKLTemporalDecoder",
    "image_encoder": "CLIPVisionModelWithProjection",
    "feature_extractor": "CLIPImageProcessor",
    "scheduler": "EulerDiscreteScheduler",
}

#: Other names of the feature extractor's class: old models', and that of transformers without torchvision.
_IMAGE_PROCESSORS = {"CLIPFeatureExtractor", "CLIPImageProcessor", "CLIPImageProcessorFast", "CLIPImageProcessorPil"}

#: The form of a hub id: organisation/model.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


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
            if not _HUB_ID.fullmatch(name):
                raise InputError(
                    f"There is no model folder {name!r}; give a diffusers folder, a hub id such as "
                    "stabilityai/stable-video-diffusion-img2vid-xt, or preview."
                )
            path = _fetch(name, dtype)
        _check(path, name)
        half = dtype == torch.float16 and any(path.glob("*/*.fp16*.safetensors"))
        return cls(path=path, name=name, variant="fp16" if half else None)

    def config(self, component: str) -> dict[str, Any]:
        """Read a model component's configuration without loading its weights.

        Raises:
            InputError: it cannot be read.
        """
        return _read_json(self.path / component / "config.json", self.name)

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


def _check(path: Path, name: str) -> None:
    """Check that the index names the pipeline, and all its components by the right classes, and that they are there."""
    index = _read_json(path / "model_index.json", name)
    pipeline_class = index.get("_class_name")
    if pipeline_class != "StableVideoDiffusionPipeline":
        raise InputError(
            f"The model {name} is a {pipeline_class}; svdq needs a StableVideoDiffusionPipeline such as "
            "stabilityai/stable-video-diffusion-img2vid-xt."
        )
    for component, expected in COMPONENTS.items():
        entry = index.get(component)  # [library, class], or null for what the pipeline does without
        found = entry[1] if isinstance(entry, list) and len(entry) == 2 else None
        if found is None or not (path / component).is_dir():
            raise InputError(f"The model {name} has no {component}; it must be a whole StableVideoDiffusionPipeline.")
        accepted = _IMAGE_PROCESSORS if component == "feature_extractor" else {expected}
        if found not in accepted:
            raise InputError(f"The {component} of the model {name} is a {found}; svdq works with {expected} only.")


def _read_json(path: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"The model {name} has no readable {path.parent.name}/{path.name}; "
            "give a folder that diffusers' save_pretrained has written."
        ) from error
    if not isinstance(content, dict):
        raise InputError(f"The model {name} has a {path.name} that is not a JSON object.")
    return content


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
