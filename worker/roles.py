"""Decides at the start of a group which of a model's experts each rank loads.

The ranks report to rank 0 how much memory they have, and rank 0 decides for all, before any weights are read. No rank
opens the weights of an expert that it does not load.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Literal

import torch

from svdq.pipeline.models.components import name_of
from svdq.pipeline.models.compute_options import ComputeOptions
from svdq.pipeline.models.families import family_named
from svdq.pipeline.models.family import Family
from svdq.pipeline.models.memory import Activity, shape_for, size_text
from svdq.pipeline.models.model_folder import WEIGHTS, loaded_files, stored_shapes
from svdq.pipeline.models.resolved_model import ResolvedModel
from svdq.pipeline.models.simulated import SimulatedModel
from svdq.pipeline.models.svd.family import SvdParameters
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.planning.binding import Components, Segment, bind

logger = logging.getLogger(__name__)

#: When ranks load one expert each: where a rank's memory does not hold all, always (if there is more than one rank), or
#: never.
Binding = Literal["auto", "always", "never"]
#: Bytes of a weight in int8, with its share of the scales and of the layers that stay as they are.
INT8_BYTES = 1.05


class Experts:
    """The experts of a model that has several."""

    def __init__(self, model: ResolvedModel, family: Family) -> None:
        """Compute what a typical video takes."""
        assert model.folder is not None
        assert model.layout is not None
        self._folder = model.folder
        self._name = model.name
        self._family = family
        self._layout = family.layouts[model.layout]
        self._facts = model.facts
        self._typical = family.complete(family.parameters.model_validate({"seed": 0}), model.facts)
        #: Of a video with the model's defaults.
        self.segments = family.segments(self._typical, model.facts)

    @classmethod
    def of(cls, model: ResolvedModel) -> "Experts | None":
        """Return the experts of a model, or None if it has only one, or cannot be opened: that raises errors later."""
        if model.family is None:
            return None
        try:
            experts = cls(model, family_named(model.family))
        except Exception:  # noqa: BLE001 - of an unusual config, diffusers raises many types
            return None
        return experts if len(experts.segments) > 1 else None

    def assign(
        self,
        capacities: Sequence[int | None],
        binding: Binding,
        compute: ComputeOptions,
        dtype: torch.dtype,
        *,
        encoder_rank: bool = False,
    ) -> list[Components]:
        """Return the components of each rank of so many bytes (None: no limit).

        With `encoder_rank`, rank 0 only encodes.
        """
        alone: list[Components] = [frozenset()] if encoder_rank else []
        ranks = range(len(alone), len(capacities))
        if binding == "never":
            return alone + [None for _ in ranks]
        needs = [self._need(rank, len(capacities), compute, dtype) for rank in ranks]
        has_room = [
            binding == "auto" and (capacity is None or need <= capacity)
            for need, capacity in zip(needs, capacities[len(alone) :], strict=True)
        ]
        if binding == "auto" and has_room == [False]:
            logger.warning(
                "The experts of %s need %s, and a single rank has to hold them all; start one more rank, on its own "
                "GPU, and each loads the expert of its steps.", self._name, size_text(needs[0]),
            )  # fmt: skip
        prior = self._family.prior(self._facts)
        components = alone + bind(self.segments, has_room, replace(prior, encode_steps=0.0) if alone else prior)
        if any(components[len(alone) :]):
            logger.info("%s", _described(components, self.segments, max(needs)))
        return components

    def _need(self, rank: int, num_ranks: int, compute: ComputeOptions, dtype: torch.dtype) -> int:
        """Return the bytes that a rank needs for a typical video with all experts."""
        per_weight = INT8_BYTES if "int8" in compute.approximate else dtype.itemsize
        weights = per_weight * self._num_expert_weights(dtype)
        encodes, decodes = rank == 0, rank == num_ranks - 1
        experts = {segment.component for segment in self.segments}
        others = [name for name in self._layout.weighted if name not in experts and (encodes or name == "vae")]
        weights += dtype.itemsize * sum(self._num_weights(name, dtype) for name in others)
        activities: list[Activity] = ["step", *["encode"] * encodes, *["decode"] * decodes]  # type: ignore[list-item]
        one_by_one = self._typical.model_copy(update={"decode_chunk_size": 1})
        peaks = [
            self._family.memory(each, shape_for(each, one_by_one), name_of(dtype), self._facts, has_decoder=True)
            for each in activities
        ]
        return int(weights) + max(peaks)

    def _num_expert_weights(self, dtype: torch.dtype) -> float:
        """Return the number of weights of all experts, from the sizes of their files and the header of the first."""
        sizes = [
            sum(file.stat().st_size for file in self._files(segment.component, dtype) if file.is_file())
            for segment in self.segments
        ]
        return self._num_weights(self.segments[0].component, dtype) * sum(sizes) / max(1, sizes[0])

    def _num_weights(self, component: str, dtype: torch.dtype) -> int:
        return sum(map(math.prod, stored_shapes(self._files(component, dtype)).values()))

    def _files(self, component: str, dtype: torch.dtype) -> list[Path]:
        """Return the weights files of a component that are loaded for a dtype."""
        return loaded_files(self._folder, component, WEIGHTS[name_of(dtype)])


def of_simulated(
    model: ResolvedModel, num_ranks: int, binding: Binding, *, encoder_rank: bool = False
) -> list[Components]:
    """Return the components of each rank of a simulated model with two experts; none for any other model.

    It takes no memory, so its ranks are bound only if they always are.
    """
    if model.timings is None or binding != "always":
        return []
    opened = SimulatedModel(model.timings, Role(), torch.device("cpu"))
    alone: list[Components] = [frozenset()] if encoder_rank else []
    return alone + bind(opened.segments(SvdParameters(seed=0)), [False] * (num_ranks - len(alone)), opened.info.prior)


def _described(components: Sequence[Components], segments: Sequence[Segment], need: int) -> str:
    """Describe which rank loads what, such as "ranks 0 to 2: transformer (steps 1 to 15 of 40)"."""
    texts = []
    for held, group in groupby(range(len(components)), lambda rank: components[rank]):
        first, *others = group
        ranks = f"ranks {first} to {others[-1]}" if others else f"rank {first}"
        mine = [segment for segment in segments if held is None or segment.component in held]
        if mine:
            names = " and ".join(segment.component for segment in mine)
            texts.append(f"{ranks}: {names} (steps {mine[0].start + 1} to {mine[-1].stop} of {segments[-1].stop})")
        else:
            texts.append(f"{ranks}: the encoders alone")
    return f"Each rank loads the experts of its steps (all of them take {size_text(need)}): {'; '.join(texts)}."
