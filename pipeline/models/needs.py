"""How much memory a rank needs for a video, by which components of the model it holds at a time. Without torch.

A rank does the phases of a video one after the other: it embeds the prompt, encodes the photo, does the steps of each
denoising component, and decodes. So it needs what the largest phase needs; in rounds it holds only the phase's weights,
and elsewhere the rank that encodes can do without the text encoder between embeds.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from svdq.pipeline.models.compute.memory import ITEM_BYTES, WORKSPACE_BYTES, Activity, Leaves, Phase, shape_for
from svdq.pipeline.models.compute.options import DEFAULTS, STREAMED_BLOCKS, ComputeOptions
from svdq.pipeline.models.families import FAMILIES, family_named, layout_of
from svdq.pipeline.models.family import FolderLayout, PublishedModel
from svdq.pipeline.models.known_model import KnownModel
from svdq.pipeline.models.resolved_model import ResolvedModel
from svdq.pipeline.models.weights.model_folder import DTYPES, EMBEDDINGS, WEIGHTS, is_rounded, loaded_files, weights_in
from svdq.pipeline.video_parameters import VideoParameters

#: What a rank holds: all of the model, one denoising component and the others, or what the present phase needs.
Residency = Literal["resident", "bound", "rounds"]
#: Bytes of a weight in int8, with its share of the scales and of the layers that stay as they are, where the files of a
#: model are not here: 1.02 to 1.03 of published transformers.
INT8_BYTES = 1.05
_IN_BLOCKS = re.compile(r"(^|[._])blocks\.\d+\.")  # names of weights in repeated blocks


def bytes_by_phase(
    model: KnownModel,
    dtype: str,
    video: VideoParameters,
    activities: Iterable[Activity],
    held: Callable[[Phase], int],
    *,
    workspace: int = WORKSPACE_BYTES,
    has_decoder: bool = True,
) -> dict[Phase, int]:
    """Return the bytes that a rank needs in each phase of its activities; an encode begins with an embed.

    `dtype` is torch's name of the dtype computed in, `held` returns the bytes of the weights in a phase, and
    `has_decoder` says whether the encoding rank also has the decoder.
    """
    peaks: dict[Phase, int] = {}
    for each in activities:
        shape = shape_for(each, video)
        peaks[each] = model.family.memory(each, shape, dtype, model.facts, has_decoder=has_decoder)
    if "encode" in peaks:
        peaks["embed"] = 0
    return {phase: held(phase) + peak + workspace for phase, peak in peaks.items()}


@dataclass(frozen=True, kw_only=True)
class SizedModel(KnownModel):
    """A model that is known, with the sizes that decide what a GPU holds."""

    layout: FolderLayout
    num_weights: Mapping[str, float]  # number of weights of each component that the model has
    dtype: str  # torch's name of the dtype computed in
    int8: bool = False  # whether the denoising components are quantized to int8 as they are loaded
    in_int8: Mapping[str, float] = field(default_factory=dict)  # bytes of these if so, where they are known
    streamed: bool = False  # whether the blocks of the denoising components come from host memory one by one
    #: Bytes of components as their files store them, LoRAs included, where that is less than in the dtype.
    stored: Mapping[str, float] = field(default_factory=dict)
    kept: bool = False  # whether they stay so: each layer makes its weight when it uses it
    published: PublishedModel | None = None  # what is known of it without its files
    download_bytes: int = 0  # 0: its files are here
    unsized_files: int = 0  # files of the hub that are to be fetched, too, and whose sizes are not known
    missing_files: int = 0  # paths that a model file names, and at which nothing is

    @classmethod
    def of(cls, model: ResolvedModel, dtype: str, compute: ComputeOptions = DEFAULTS) -> "SizedModel":
        """Return a model with a folder, sized by the headers of its files; `dtype` is torch's name of its dtype.

        No rank opens files that it does not load: the sizes of files stand for all experts but the first.
        """
        assert model.folder is not None
        assert model.family is not None
        layout, found = layout_of(model), dict[str, float]()
        stored, in_int8 = dict[str, float](), dict[str, float]()
        first, first_bytes = "", 1  # the first expert, and the bytes of its files
        for component in layout.weighted:
            files = [each for each in loaded_files(model.folder, component, WEIGHTS[dtype]) if each.is_file()]
            num_bytes = sum(file.stat().st_size for file in files)
            is_expert = component in layout.denoisers and component not in model.weights
            if is_expert and first:
                for each in (found, stored, in_int8):
                    if first in each:
                        each[component] = each[first] * num_bytes / first_bytes
                continue
            if component in model.weights:
                files = layout.weights_files(model.weights, component)
            sizes = sizes_of(files, layout, dtype, component)
            found[component] = sizes.number
            if component in layout.denoisers:
                in_int8[component] = sizes.in_int8
            if component in model.weights or (is_expert and is_rounded(files)):
                stored[component] = sizes.stored
            if is_expert:
                first, first_bytes = component, max(1, num_bytes)
        for lora in model.loras:
            if lora.component in stored:
                stored[lora.component] += lora.file.stat().st_size
        return cls(
            name=model.name,
            family=family_named(model.family),
            facts=model.facts,
            layout=layout,
            num_weights={name: number for name, number in found.items() if number},
            dtype=dtype,
            int8=compute.quantizes,
            in_int8=in_int8,
            streamed=compute.offload == "blocks",
            stored={each: size for each, size in stored.items() if size < found.get(each, 0) * ITEM_BYTES[dtype]},
            kept=compute.weights == "stored",
        )

    @property
    def has_blocks(self) -> bool:
        """Whether its denoising components are transformers, whose files may be quantized and blocks streamed."""
        return self.family.num_blocks(self.facts) is not None

    @property
    def has_text(self) -> bool:
        """Whether it has components that encode prompts, and can take turns with the others."""
        return bool(self.layout.of_phases("embed") & self.num_weights.keys())

    @property
    def has_experts(self) -> bool:
        """Whether it has two denoising components."""
        return len(self.layout.denoisers & self.num_weights.keys()) > 1

    def video(self, shape: str | None = None) -> VideoParameters:
        """Return the usual video, or one of a shape such as 1280x720x81, decoded a frame at a time or in tiles."""
        given = dict[str, int | None]()
        if shape:
            of_shape = self.family.parameters.of_shape(shape)
            given = {"width": of_shape.width, "height": of_shape.height, "frames": of_shape.frames}
        return self.family.usual(self.facts, **given).model_copy(update={"decode_chunk_size": 1})

    def weights(self, component: str) -> int:
        """Return the bytes of a component's weights on the GPU."""
        num_weights = self.num_weights[component]
        if component not in self.layout.denoisers:
            in_dtype = num_weights * ITEM_BYTES[self.layout.dtype_of(component, self.dtype)]
            return int(self.stored.get(component, in_dtype) if self.kept else in_dtype)
        if self.int8:
            num_bytes = self.in_int8.get(component, num_weights * INT8_BYTES)
        else:
            num_bytes = num_weights * ITEM_BYTES[self.dtype]
            num_bytes = self.stored.get(component, num_bytes) if self.kept else num_bytes
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
        is_only = residency == "bound" or not self.has_experts
        choices: list[Leaves] = ["nothing", "text"]
        if is_only and not alone and not self.streamed:
            choices.append("experts")
        for choice in choices:
            if self.peak(video, residency, decodes=alone, leaves=choice, workspace=workspace) <= room:
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
        done: dict[Activity, bool] = {"encode": encodes, "step": True, "decode": decodes}
        held = partial(self.held, residency=residency, encodes=encodes, leaves=leaves)
        activities = [each for each, is_done in done.items() if is_done]
        return bytes_by_phase(self, self.dtype, video, activities, held, workspace=workspace)

    def peak(self, video: VideoParameters, residency: Residency, **rank: Any) -> int:
        """Return the bytes of the largest phase of a rank, which is as of `phases`."""
        return max(self.phases(video, residency, **rank).values())

    def least(self, video: VideoParameters, residency: Residency, num_ranks: int) -> int:
        """Return the peak bytes of the busiest rank, with all offloaded that can be."""
        if residency == "rounds":
            return self.peak(video, residency)
        alone = num_ranks == 1
        first = self.peak(video, residency, decodes=alone, leaves=self.leaves(0, video, residency, alone=alone))
        return first if alone else max(first, self.peak(video, residency, encodes=False))


class Sizes(NamedTuple):
    """How large the weights of a component are, by the headers of its files."""

    number: float  # a weight that stays in float32 counts by its bytes
    #: Bytes that layers hold if they keep what the files store; what is smaller in the dtype is held in that.
    stored: float
    in_int8: float  # bytes if matrices in blocks are quantized, with a scale for each row


def sizes_of(files: Iterable[Path], layout: FolderLayout, dtype: str, component: str) -> Sizes:
    """Return the sizes of a component's weights in files."""
    total = stored = in_int8 = 0.0
    for weight in (each for file in files for each in weights_in(file, layout.file_names.get(component))):
        is_exact = layout.keeps_float32(weight.name)
        in_dtype = weight.number * (4 if is_exact else ITEM_BYTES[dtype])
        is_quantized = not is_exact and weight.num_rows and _IN_BLOCKS.search(weight.name)
        total += in_dtype
        stored += in_dtype if is_exact or weight.name in EMBEDDINGS else min(weight.num_bytes, in_dtype)
        in_int8 += weight.number + 4 * weight.num_rows if is_quantized else in_dtype
    return Sizes(number=total / ITEM_BYTES[dtype], stored=stored, in_int8=in_int8)


def published(name: str) -> SizedModel | None:
    """Return a published model by its hub id; None if it is no known one."""
    for family in FAMILIES:
        if (found := family.models.get(hub_id := name.partition("@")[0])) is not None:
            return SizedModel(
                name=hub_id,
                family=family,
                facts=found.facts,
                layout=family.layouts[found.layout],
                num_weights=found.num_weights,
                dtype=DTYPES[family.half],
                published=found,
            )
    return None
