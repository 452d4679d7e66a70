"""How much memory a rank needs for a video, by which components of the model it holds at a time. Without torch.

A rank does the phases of a video one after the other: it embeds the prompt, encodes the photo, does the steps of each
denoising component, and decodes. So it needs what the largest phase needs; in rounds it holds only the phase's weights,
and elsewhere the rank that encodes can do without the text encoder between embeds.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from svdq.pipeline.models.compute.memory import ITEM_BYTES, WORKSPACE_BYTES, Activity, Leaves, Phase, shape_for
from svdq.pipeline.models.compute.options import DEFAULTS, STREAMED_BLOCKS, ComputeOptions
from svdq.pipeline.models.families import FAMILIES, family_named, layout_of
from svdq.pipeline.models.family import Facts, Family, FolderLayout, PublishedModel
from svdq.pipeline.models.resolved_model import ResolvedModel
from svdq.pipeline.models.weights.model_folder import DTYPES, EMBEDDINGS, WEIGHTS, is_rounded, loaded_files, weights_in
from svdq.pipeline.video_parameters import VideoParameters

#: What a rank holds: all of the model, one denoising component and the others, or what the present phase needs.
Residency = Literal["resident", "bound", "rounds"]
INT8_BYTES = 1.05  # bytes of a weight in int8, with its share of the scales and of the layers that stay as they are


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A model, as far as it decides what a GPU holds."""

    family: Family
    layout: FolderLayout
    facts: Facts
    num_weights: Mapping[str, float]  # number of weights of each component that the model has
    dtype: str  # torch's name of the dtype computed in
    int8: bool = False  # whether the denoising components have int8 weights
    streamed: bool = False  # whether the blocks of the denoising components come from host memory one by one
    #: Bytes of components as their files store them, LoRAs included, where that is less than in the dtype.
    stored: Mapping[str, float] = field(default_factory=dict)
    kept: bool = False  # whether they stay so: each layer makes its weight when it uses it

    @classmethod
    def of(cls, model: ResolvedModel, dtype: str, compute: ComputeOptions = DEFAULTS) -> "ModelSize":
        """Return the size of a model with a folder, by the headers of its files; `dtype` is torch's name of it.

        No rank opens files that it does not load: the sizes of files stand for all experts but the first.
        """
        assert model.folder is not None
        assert model.family is not None
        layout, found, stored = layout_of(model), dict[str, float](), dict[str, float]()
        first, first_bytes = "", 1  # the first expert, and the bytes of its files
        for component in layout.weighted:
            files = [each for each in loaded_files(model.folder, component, WEIGHTS[dtype]) if each.is_file()]
            num_bytes = sum(file.stat().st_size for file in files)
            is_expert = component in layout.denoisers and component not in model.weights
            if is_expert and first:
                for each in (found, stored):
                    if first in each:
                        each[component] = each[first] * num_bytes / first_bytes
                continue
            if component in model.weights:
                files = layout.weights_files(model.weights, component)
            found[component] = num_weights(files, layout, dtype, component)
            if component in model.weights or (is_expert and is_rounded(files)):
                stored[component] = stored_bytes(files, layout, dtype, component)
            if is_expert:
                first, first_bytes = component, max(1, num_bytes)
        for lora in model.loras:
            if lora.component in stored:
                stored[lora.component] += lora.file.stat().st_size
        return cls(
            family=family_named(model.family),
            layout=layout,
            facts=model.facts,
            num_weights={name: number for name, number in found.items() if number},
            dtype=dtype,
            int8="int8" in compute.approximate,
            streamed=compute.offload == "blocks",
            stored={each: size for each, size in stored.items() if size < found.get(each, 0) * ITEM_BYTES[dtype]},
            kept=compute.weights == "stored",
        )

    @property
    def has_text(self) -> bool:
        """Whether it has components that encode prompts, and can take turns with the others."""
        return bool(self.layout.of_phases("embed") & self.num_weights.keys())

    def weights(self, component: str) -> int:
        """Return the bytes of a component's weights on the GPU."""
        num_weights = self.num_weights[component]
        if component not in self.layout.denoisers:
            in_dtype = num_weights * ITEM_BYTES[self.layout.dtype_of(component, self.dtype)]
            return int(self.stored.get(component, in_dtype) if self.kept else in_dtype)
        num_bytes = num_weights * (INT8_BYTES if self.int8 else ITEM_BYTES[self.dtype])
        if self.kept and not self.int8:
            num_bytes = self.stored.get(component, num_bytes)
        # Layers outside of blocks take less than one more.
        num_blocks = self.family.num_blocks(self.facts) if self.streamed else None
        return int(num_bytes if num_blocks is None else num_bytes * min(1.0, (STREAMED_BLOCKS + 1) / num_blocks))

    def held(self, phase: Phase, residency: Residency, *, encodes: bool = True, leaves: Leaves = "nothing") -> int:
        """Return the bytes of weights that a rank holds in a phase.

        If not in rounds, `encodes` says whether it has the encoders, and `leaves` what of them and the rest comes and
        goes.
        """
        if residency == "rounds":
            return self._others(phase, streams=True) + (self.denoisers(residency) if phase == "step" else 0)
        if not encodes:
            return self._others("step", "decode") + self.denoisers(residency)
        has_text = leaves == "nothing" or phase == "embed"
        has_experts = leaves != "experts" or phase in ("step", "decode")
        of_text: tuple[Phase, ...] = ("embed",) if has_text else ()
        others = self._others("encode", "step", "decode", *of_text, streams=leaves != "nothing")
        return others + self.denoisers(residency) * has_experts

    def _others(self, *phases: Phase, streams: bool = False) -> int:
        """Return the bytes of the weights that phases need besides the denoising components."""
        shares = self.layout.streamed if streams else {}
        components = self.layout.of_phases(*phases) & self.num_weights.keys()
        return sum(int(self.weights(each) * shares.get(each, 1)) for each in components)

    def denoisers(self, residency: Residency) -> int:
        """Return the bytes of the weights of the denoising components that a rank holds."""
        found = [self.weights(name) for name in self.num_weights if name in self.layout.denoisers]
        return sum(found) if residency == "resident" else max(found)

    def phase_weights(self, residency: Residency = "rounds", leaves: Leaves = "nothing") -> dict[Phase, int]:
        """Return the bytes of the weights that the rank which encodes holds in each phase."""
        return {phase: self.held(phase, residency, leaves=leaves) for phase in get_args(Phase)}

    def leaves(
        self, room: int, video: VideoParameters, residency: Residency, *, alone: bool, workspace: int = WORKSPACE_BYTES
    ) -> Leaves:
        """Return the smallest set of components to offload so that the rank that encodes fits into `room` bytes.

        An expert leaves only if it is the only one there, of a group of several ranks: else bound ranks or rounds are
        better. Streamed ones are small.
        """
        if not self.has_text:
            return "nothing"
        is_only = residency == "bound" or len(self.layout.denoisers & self.num_weights.keys()) == 1
        choices: list[Leaves] = ["nothing", "text"]
        if is_only and not alone and not self.streamed:
            choices.append("experts")
        for choice in choices:
            needs = self.phases(video, residency, decodes=alone, leaves=choice, workspace=workspace)
            if max(needs.values()) <= room:
                return choice
        return choices[-1]

    def phases(
        self,
        video: VideoParameters,
        residency: Residency,
        *,
        encodes: bool = True,
        decodes: bool = True,
        leaves: Leaves = "nothing",
        workspace: int = WORKSPACE_BYTES,
    ) -> dict[Phase, int]:
        """Return the bytes that a rank needs in each phase; `encodes`: if it is the first, `decodes`: if the last."""
        peaks: dict[Phase, int] = {"step": self._peak("step", video)}
        if encodes:
            peaks |= {"embed": 0, "encode": self._peak("encode", video)}
        if decodes:
            peaks["decode"] = self._peak("decode", video)
        return {
            each: self.held(each, residency, encodes=encodes, leaves=leaves) + peak + workspace
            for each, peak in peaks.items()
        }

    def _peak(self, activity: Activity, video: VideoParameters) -> int:
        return self.family.memory(activity, shape_for(activity, video), self.dtype, self.facts, has_decoder=True)


def num_weights(files: Iterable[Path], layout: FolderLayout, dtype: str, component: str = "") -> float:
    """Return the number of weights in files, of which each that stays in float32 counts by its bytes.

    With a `component`, files may have others, too.
    """
    found = (each for file in files for each in weights_in(file, layout.file_names.get(component)))
    item = ITEM_BYTES[dtype]
    return sum(number * (4 / item if layout.keeps_float32(name) else 1) for name, number, _ in found)


def stored_bytes(files: Iterable[Path], layout: FolderLayout, dtype: str, component: str = "") -> float:
    """Return the bytes of a component of weights files whose layers keep what is stored where that is smaller."""
    total, names = 0.0, layout.file_names.get(component)
    for name, number, num_bytes in (each for file in files for each in weights_in(file, names)):
        in_dtype = number * (4 if layout.keeps_float32(name) else ITEM_BYTES[dtype])
        is_made = layout.keeps_float32(name) or name in EMBEDDINGS
        total += in_dtype if is_made else min(num_bytes, in_dtype)
    return total


def published(name: str) -> tuple[PublishedModel, ModelSize] | None:
    """Return what is known of a published model by its hub id, and its size on GPUs; None if it is no known one."""
    for family in FAMILIES:
        if (found := family.models.get(name.partition("@")[0])) is not None:
            return found, ModelSize(
                family=family,
                layout=family.layouts[found.layout],
                facts=found.facts,
                num_weights=found.num_weights,
                dtype=DTYPES[family.half],
            )
    return None
