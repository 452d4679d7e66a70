"""Finds a StableVideoDiffusionPipeline and loads only the components that a role needs. Never uses the network."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from svdq.pipeline.models.base import Role
from svdq.pipeline.models.components import Components, acceptable, be_quiet
from svdq.pipeline.models.files import read_json
from svdq.pipeline.models.folder_check import check_folder
from svdq.pipeline.models.hub import find_folder
from svdq.pipeline.models.load_errors import in_a_sentence
from svdq.pipeline.models.svd.layout import LAYOUT

#: The component of transformers, and its config class.
_TRANSFORMERS = {"image_encoder": "CLIPVisionConfig"}


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

        components = Components(path=self.path, name=self.name, layout=LAYOUT, transformers=_TRANSFORMERS)
        encoder, decoder = role.encode, role.decode
        wanted = {"unet": role.has("unet"), "vae": encoder or decoder, "image_encoder": encoder}
        arguments: dict[str, Any] = {} if encoder else {"feature_extractor": None}

        def needed() -> int:
            return sum(components.weight_bytes(component, dtype) for component in wanted if wanted[component])

        for component, is_wanted in wanted.items():
            place = torch.device("cpu") if component == "unet" and unet_on_host else device
            with in_a_sentence(f"The {component} of the model {self.name}", device, needed):
                arguments[component] = components.load(component, dtype, place) if is_wanted else None
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
