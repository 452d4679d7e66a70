"""The base of models with a text encoder: what it made of the last texts is kept."""

import contextlib
from abc import abstractmethod
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from svdq.pipeline.models.diffusers_model import DiffusersModel
from svdq.pipeline.planning.rounds import TEXT_ENCODER
from svdq.pipeline.video_parameters import VideoParameters

#: Number of groups of texts whose embeddings are kept, in host memory: each has at most 25 MB in half precision.
CACHED_TEXTS = 64

Texts = tuple[str, ...]  # texts that are encoded together


class PromptedModel(DiffusersModel):
    """A `DiffusersModel` that encodes prompts."""

    #: Names in the state of what the texts of a video become, in the order of `_texts_of` and `_embed_texts`.
    embedded: ClassVar[tuple[str, ...]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._texts: dict[Texts, tuple[Tensor, ...]] = {}  # embeddings by texts, the latest last
        self._asked: set[Texts] = set()  # texts that were asked for without the text encoder

    @torch.inference_mode()
    def embed(self, parameters: VideoParameters) -> dict[str, Tensor] | None:
        """Encode the prompts, or take what was made of the same texts before; see `VideoModel`.

        None for other texts while the text encoder is not there; they are encoded with the next ones that it comes for.
        """
        wanted = self._texts_of(parameters)
        with self._holding:
            if self._of_set and self._held != TEXT_ENCODER and (unknown := {*wanted} - self._texts.keys()):
                self._asked |= unknown if not self.sets else set()
                return None
            while self._asked:
                with contextlib.suppress(Exception):  # raised again for the video that asks for it
                    self._embed(self._asked.pop())
            tensors = chain.from_iterable([self._embed(texts) for texts in wanted])
            # Copies, because two texts may be the same, and safetensors refuses tensors that share memory.
            return {name: each.to(self._device, copy=True) for name, each in zip(self.embedded, tensors, strict=False)}

    def _embed(self, texts: Texts) -> tuple[Tensor, ...]:
        found = self._texts.pop(texts, None)
        if found is None:
            found = tuple(each.to("cpu") for each in self._embed_texts(texts))
        self._texts[texts] = found
        if len(self._texts) > CACHED_TEXTS:
            del self._texts[next(iter(self._texts))]
        return found

    @abstractmethod
    def _texts_of(self, parameters: VideoParameters) -> list[Texts]:
        """Return the texts of a video, in groups that are encoded together."""

    @abstractmethod
    def _embed_texts(self, texts: Texts) -> tuple[Tensor, ...]:
        """Encode texts together."""
