"""Finds a Wan model and loads only the components that a role needs. Never uses the network."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from svdq.pipeline.errors import InputError
from svdq.pipeline.installed import how_to_install
from svdq.pipeline.models.base import Role
from svdq.pipeline.models.components import Components, acceptable, be_quiet
from svdq.pipeline.models.files import read_json
from svdq.pipeline.models.folder_check import check_folder, class_in, pipeline_of
from svdq.pipeline.models.hub import find_folder
from svdq.pipeline.models.load_errors import in_a_sentence
from svdq.pipeline.models.wan.family import FAMILY
from svdq.pipeline.models.wan.layout import LAYOUT
from svdq.pipeline.models.wan.schedule import HIGH_NOISE, LOW_NOISE

#: The components of transformers, and the config class of each.
_TRANSFORMERS = {"text_encoder": "UMT5Config", "image_encoder": "CLIPVisionConfig"}
#: Components in float32 whatever the dtype, as diffusers' documentation recommends.
_FULL_PRECISION = ("vae", "image_encoder")


@dataclass(frozen=True, kw_only=True)
class WanFolder:
    """A diffusers folder with a Wan model that makes videos from photos."""

    #: The folder itself, or its snapshot in the hub's cache.
    path: Path
    #: The requested name, for messages.
    name: str
    #: The components with weights that the role needs.
    needed: tuple[str, ...]
    #: Loads them.
    components: Components

    @classmethod
    def find(cls, name: str, role: Role, dtype: torch.dtype) -> Self:
        """Find the folder of a model on this machine, and check it without opening the weights that the role lacks.

        Raises:
            InputError: the model does not exist here, or is no complete image-to-video model of Wan.
        """
        path = find_folder(name)
        layout = FAMILY.layouts.get(pipeline_of(path, name), LAYOUT)
        wanted = {
            HIGH_NOISE: role.has(HIGH_NOISE),
            LOW_NOISE: role.has(LOW_NOISE),
            "vae": role.encode or role.decode,
            "text_encoder": role.encode,
            "image_encoder": role.encode,
        }
        index = read_json(path, "model_index.json", name)
        needed = tuple(each for each in wanted if wanted[each] and class_in(index, each) is not None)
        for each in needed:
            half = acceptable(_dtype_of(each, dtype))
            check_folder(path, name, layout, half=half, components=(each,))
        if not needed:
            check_folder(path, name, layout, components=())
        components = Components(path=path, name=name, layout=layout, transformers=_TRANSFORMERS)
        return cls(path=path, name=name, needed=needed, components=components)

    def load_pipeline(self, role: Role, dtype: torch.dtype, device: torch.device, *, experts_on_host: bool) -> Any:
        """Load a WanImageToVideoPipeline whose other components are None, on its device.

        Weights are mapped from their files and copied to a GPU one by one. On a CPU, weights that already have the
        dtype stay mapped, so that all ranks of a host share their pages.

        Args:
            role: what the model is used for.
            dtype: of the transformers and the text encoder, except for their layers that must stay in float32.
            device: target device.
            experts_on_host: leave the transformers on the host, for the caller to move.

        Raises:
            InputError: a component cannot be loaded, for whatever reason.
        """
        if role.encode and importlib.util.find_spec("ftfy") is None:  # diffusers raises a NameError for each prompt
            raise InputError(f"Models of Wan need ftfy, which is not installed; {how_to_install('worker')}.")
        be_quiet()
        import diffusers

        def needed_bytes() -> int:
            return sum(self.components.weight_bytes(each, _dtype_of(each, dtype)) for each in self.needed)

        parts: dict[str, Any] = dict.fromkeys(("vae", "text_encoder", "tokenizer", "image_encoder", "image_processor"))
        for each in self.needed:
            place = torch.device("cpu") if each in (HIGH_NOISE, LOW_NOISE) and experts_on_host else device
            with in_a_sentence(f"The {each} of the model {self.name}", device, needed_bytes):
                parts[each] = self.components.load(each, _dtype_of(each, dtype), place)
        with in_a_sentence(f"The model {self.name}", device, needed_bytes):
            index = read_json(self.path, "model_index.json", self.name)
            kind = class_in(index, "scheduler")
            assert kind is not None
            parts["scheduler"] = getattr(diffusers, kind).from_pretrained(self.path / "scheduler")
            if role.encode:
                parts |= self._for_encoding(has_image=parts["image_encoder"] is not None)
            settings = {name: index[name] for name in ("boundary_ratio", "expand_timesteps") if name in index}
            pipeline: Any = diffusers.WanImageToVideoPipeline(**parts, **settings)
            if pipeline.vae is not None:
                if not role.encode:
                    pipeline.vae.encoder = pipeline.vae.quant_conv = None
                if not role.decode:
                    pipeline.vae.decoder = pipeline.vae.post_quant_conv = None
            return pipeline

    def _for_encoding(self, *, has_image: bool) -> dict[str, Any]:
        """Load the components without weights that encode the prompt and the photo."""
        from transformers import AutoTokenizer, CLIPImageProcessor

        parts: dict[str, Any] = {"tokenizer": AutoTokenizer.from_pretrained(self.path / "tokenizer")}
        if has_image:
            parts["image_processor"] = CLIPImageProcessor.from_pretrained(self.path / "image_processor")
        return parts


def _dtype_of(component: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if component in _FULL_PRECISION else dtype
