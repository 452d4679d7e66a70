"""A model folder opened without weights: modules of the real classes on the meta device, which holds no memory.

What runs on them computes nothing and has the shapes of what a device would compute. Knows nothing of videos.
"""

from typing import Any, Self

import torch

from svdq.pipeline.models.hub import find_folder
from svdq.pipeline.models.model import Part
from svdq.pipeline.models.model_index import COMPONENTS
from svdq.pipeline.models.svd_folder import SvdFolder


class SkeletonFolder(SvdFolder):
    """A folder of which only the configs are read."""

    @classmethod
    def find(cls, name: str, dtype: torch.dtype) -> Self:
        """Find the folder of a model on this machine; whether its weights are whole is for others to check.

        Raises:
            InputError: there is no such model here.
        """
        return cls(path=find_folder(name), name=name)

    def load_pipeline(
        self, parts: Part, dtype: torch.dtype, device: torch.device, *, unet_on_host: bool = False
    ) -> Any:
        """Make a StableVideoDiffusionPipeline whose other components are None, without weights.

        Raises:
            InputError: a config cannot be used.
        """
        pipeline = super().load_pipeline(parts, dtype, device, unet_on_host=unet_on_host)
        from diffusers import EulerDiscreteScheduler

        class HostScheduler(EulerDiscreteScheduler):  # type: ignore[misc]
            """Keeps its few numbers on the host: they are made from one another's values."""

            def set_timesteps(self, num_inference_steps: int, device: Any = None) -> None:
                super().set_timesteps(num_inference_steps, device="cpu")

        pipeline.scheduler = HostScheduler.from_config(pipeline.scheduler.config)
        return pipeline

    def _load(self, component: str, dtype: torch.dtype, device: torch.device) -> Any:
        """Make one component as its config has it."""
        import diffusers
        import transformers

        with torch.device("meta"):
            if component == "image_encoder":
                config = transformers.CLIPVisionConfig.from_pretrained(self.path / component)
                model: Any = transformers.CLIPVisionModelWithProjection._from_config(config)
            else:
                model = getattr(diffusers, COMPONENTS[component]).from_config(self.config(component))
        # A few parameters are made by constructors that ask for no device.
        return model.to("meta", dtype).eval().requires_grad_(False)
