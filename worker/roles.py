"""Decides on rank 0, before weights are read, which of a model's experts each rank loads."""

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Self

import torch

from svdq.pipeline.errors import InputError, how_to_install
from svdq.pipeline.models.compute.memory import WORKSPACE_BYTES, Leaves, Phase, size_text
from svdq.pipeline.models.compute.options import ComputeOptions, Weights
from svdq.pipeline.models.families import family_named, layout_of
from svdq.pipeline.models.known_model import KnownModel
from svdq.pipeline.models.needs import Residency, SizedModel
from svdq.pipeline.models.resolved_model import ResolvedModel
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.models.weights.components import name_of
from svdq.pipeline.models.weights.kitchen import native_formats
from svdq.pipeline.models.weights.model_folder import WEIGHTS, is_rounded, loaded_files
from svdq.pipeline.planning.binding import Components, Segment, bind
from svdq.pipeline.planning.capacity import VideoCosts
from svdq.pipeline.planning.costs import Costs
from svdq.pipeline.planning.rounds import LOAD_SHARE
from svdq.pipeline.transport.topology import Topology
from svdq.worker.config import ExpertsMode
from svdq.worker.device import name_of as name_of_device

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PhaseWeights:
    """The bytes of the weights that a rank holds whose components come and go."""

    by_phase: Mapping[Phase, int]
    streamed: int | None  # in steps with `--offload blocks`

    @classmethod
    def of(cls, size: SizedModel, residency: Residency, leaves: Leaves = "nothing") -> Self:
        """Return what the rank that encodes holds of a model."""
        streamed = replace(size, streamed=True).held("step", residency, leaves=leaves)
        return cls(by_phase=size.phase_weights(residency, leaves), streamed=streamed)


class Experts:
    """The experts of a model that has several, or one and a text encoder."""

    def __init__(self, model: ResolvedModel, compute: ComputeOptions, dtype: torch.dtype, workspace: int = 0) -> None:
        self._model = model
        self._compute = compute
        self._dtype = dtype
        self._workspace = workspace
        if (timings := model.timings) is not None:
            self.segments, self._prior = timings.segments_of(sum(timings.segments or [1])), timings.prior
            costs = Costs(step_s=(1.0,), encode_s=self._prior.encode_steps, decode_s=self._prior.decode_steps)
            self._costs = VideoCosts.of(self.segments, costs)
            return
        assert model.family is not None
        known = KnownModel(name=model.name, family=family_named(model.family), facts=model.facts)
        self.segments, self._prior = known.unit_costs(known.usual).segments, known.family.prior(known.facts)
        self._costs = known.video_costs(known.usual)

    @classmethod
    def of(
        cls, model: ResolvedModel, compute: ComputeOptions, dtype: torch.dtype, device: torch.device
    ) -> "Experts | None":
        """Return the experts of a model; None if nothing comes and goes, or it cannot be opened: that fails later."""
        if model.family is None and model.timings is None:
            return None
        try:
            experts = cls(model, compute, dtype, WORKSPACE_BYTES if device.type == "cuda" else 0)
            comes_and_goes = experts.are_several or (experts.size is not None and experts.size.has_text)
        except Exception:  # noqa: BLE001 - of an unusual config, diffusers raises many types
            return None
        return experts if comes_and_goes else None

    @cached_property
    def size(self) -> SizedModel | None:
        """The model in the smallest way that the options allow; None: a simulated one.

        Ranks that need no sizes open no file for them.
        """
        if self._model.timings is not None:
            return None
        return replace(SizedModel.of(self._model, name_of(self._dtype), self._compute), kept=self._compute.may_keep)

    @property
    def are_several(self) -> bool:
        """Whether the model has more than one."""
        return len(self.segments) > 1

    def in_rounds(self, capacity: int | None, mode: ExpertsMode) -> PhaseWeights | None:
        """Return what a rank alone, of so many bytes (None: no limit), holds in rounds; None: it holds all.

        Where a model has one expert, text encoder, transformer and VAE take turns if this is asked for.
        """
        if mode != "rounds":
            if mode != "auto" or capacity is None or not self.are_several:
                return None
            # Streamed experts take host memory, both twice as much.
            if self._compute.offload == "off" and self._need(0, 1) <= capacity:
                return None
        if self.size is None:
            return PhaseWeights(by_phase={}, streamed=None)
        logger.info(
            "All of %s takes %s; this rank holds one expert at a time, in rounds over many videos.",
            self.size.name,
            size_text(self._need(0, 1)),
        )
        return PhaseWeights.of(self.size, "rounds")

    def leaves(
        self, capacity: int | None, components: Components, num_ranks: int
    ) -> tuple[Leaves, PhaseWeights | None]:
        """Return what leaves rank 0, of so many bytes and with these components, between uses, and what it holds."""
        if capacity is None or self.size is None:
            return "nothing", None
        size, residency = self.size, _residency_of(components)
        found = size.leaves(capacity, size.video(), residency, alone=num_ranks == 1, workspace=self._workspace)
        if found == "nothing":
            return found, None
        logger.info(
            "Rank 0 has no room for the text encoder beside the rest: it is loaded for prompts that are new%s.",
            ", and the transformer leaves for each encode" if found == "experts" else "",
        )
        return found, PhaseWeights.of(size, residency, found)

    def assign(self, capacities: Sequence[int | None], mode: ExpertsMode) -> list[Components]:
        """Return the components of each rank of so many bytes (None: no limit)."""
        if mode == "resident":
            return [None for _ in capacities]
        needs = [self._need(rank, len(capacities)) for rank in range(len(capacities))]
        has_room = [
            mode == "auto" and (capacity is None or need <= capacity)
            for need, capacity in zip(needs, capacities, strict=True)
        ]
        components = bind(self.segments, has_room, self._prior)
        if any(components):
            logger.info("%s", _described(components, self.segments, max(needs)))
            faster = self._costs.faster_in_rounds(len(capacities))
            if faster > LOAD_SHARE:
                logger.info(
                    "Groups of one rank in rounds would be about %.0f%% faster: `svdq worker --experts rounds --groups "
                    "%d --ranks 1`.", 100 * faster, len(capacities),
                )  # fmt: skip
        return components

    def _need(self, rank: int, num_ranks: int) -> int:
        """Return the bytes of a typical video with all experts, the text encoder not beside them."""
        if self.size is None:
            return 0
        return self.size.peak(
            self.size.video(),
            "resident",
            encodes=rank == 0,
            decodes=rank == num_ranks - 1,
            leaves="text",
            workspace=self._workspace,
        )


def choose_native(model: ResolvedModel, compute: ComputeOptions, device: torch.device) -> tuple[str, ...]:
    """Return the titles of the formats of a model's files that its layers multiply in.

    By `auto` those that the GPUs have kernels for; processors have none, and would be slower and less exact than with
    made weights. Raises InputError if they are asked for, and impossible.
    """
    if compute.quantizes and device.type == "cuda" and torch.cuda.get_device_capability(device) < (7, 5):
        raise InputError(
            f"--approximate int8 needs GPUs of compute capability 7.5 (RTX 20) or later, and {name_of_device(device)} "
            "is not; leave it out."
        )
    is_asked = compute.weights == "native"
    if compute.quantizes or not model.formats or not (is_asked or (compute.weights == "auto" and compute.may_keep)):
        return ()
    if importlib.util.find_spec("comfy_kitchen") is None:
        if is_asked:
            raise InputError(f"--weights native needs the package comfy-kitchen; {how_to_install('int8')}.")
        return ()
    if device.type == "cpu" and not is_asked:
        return ()
    # GPUs add no bias in float32 to products of fp8, and who asks for float32 compares with processors.
    in_float32 = device.type == "cuda" and compute.dtype == "fp32"
    found = tuple(each for each in model.formats if not in_float32 and each in native_formats(device))
    if is_asked and not found:
        where = f"{name_of_device(device)}{' with --dtype fp32' if in_float32 else ''}"
        raise InputError(
            f"--weights native does not work with {' and '.join(model.formats)} on {where}, which has no kernel for "
            "that; use --weights auto."
        )
    if found:
        logger.info("Layers multiply in %s, as their files store them.", " and ".join(found))
    return found


def choose_weights(
    model: ResolvedModel,
    compute: ComputeOptions,
    dtype: torch.dtype,
    role: Role,
    capacity: int | None,
    topology: Topology,
    device: torch.device,
    *,
    for_loras: bool,
) -> Weights:
    """Return whether the weights of a rank of so many bytes stay as their files store them: stored or made.

    They stay where layers multiply in their formats. Else they are made once where there is room for all that the rank
    holds, nothing comes and goes, and no job may add LoRAs.
    """
    if model.family is None or model.folder is None or not compute.may_keep:
        return "made"
    if compute.native:
        return "stored"
    if for_loras and model.loras:
        logger.info("Weights that LoRAs change stay as their files store them: jobs may add others.")
        return "stored"
    # No rank opens files that it does not load.
    denoisers, precisions = layout_of(model).denoisers, WEIGHTS[name_of(dtype)]
    mine = [loaded_files(model.folder, component, precisions) for component in denoisers if role.has(component)]
    if not model.weights and not any(map(is_rounded, mine)):
        return "made"
    size = SizedModel.of(model, name_of(dtype), compute)
    if not size.stored:
        return "made"
    is_forced = for_loras or compute.weights == "stored" or role.in_rounds or role.leaves != "nothing"
    if not is_forced:
        need = size.peak(
            size.video(),
            _residency_of(role.components),
            encodes=topology.first,
            decodes=topology.last,
            workspace=WORKSPACE_BYTES if device.type == "cuda" else 0,
        )
        if capacity is None or need <= capacity:
            return "made"
    logger.info("Weights stay as their files store them; layers make them when they use them.")
    return "stored"


def _residency_of(components: Components) -> Residency:
    return "resident" if components is None else "bound"


def _described(components: Sequence[Components], segments: Sequence[Segment], need: int) -> str:
    """Return text such as "ranks 0 to 2: transformer (steps 1 to 15 of 40)"."""
    texts = []
    for held, group in groupby(range(len(components)), lambda rank: components[rank]):
        first, *others = group
        ranks = f"ranks {first} to {others[-1]}" if others else f"rank {first}"
        mine = [segment for segment in segments if held is None or segment.component in held]
        names = " and ".join(segment.component for segment in mine)
        texts.append(f"{ranks}: {names} (steps {mine[0].start + 1} to {mine[-1].stop} of {segments[-1].stop})")
    return f"Each rank loads the experts of its steps (all of them take {size_text(need)}): {'; '.join(texts)}."
