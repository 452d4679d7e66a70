"""The base of all families' models: a diffusers folder whose components are opened for a role."""

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, ClassVar

import PIL.Image
import torch
from torch import Tensor

from svdq.pipeline.errors import InputError, SampleError
from svdq.pipeline.models.compute.failures import in_a_sentence
from svdq.pipeline.models.compute.memory import ACTIVITIES, Activity, MemoryShape, Phase, shape_for
from svdq.pipeline.models.compute.options import DEFAULTS, ComputeOptions, weight_bytes
from svdq.pipeline.models.compute.residency import Residency, read_ahead
from svdq.pipeline.models.family import Family
from svdq.pipeline.models.lora_folder import NO_LORAS, LoraFolder
from svdq.pipeline.models.resolved_model import ResolvedModel
from svdq.pipeline.models.video_model import Role, State, VideoModel, all_finite, nan_advice
from svdq.pipeline.models.weights.components import ComponentLoader
from svdq.pipeline.models.weights.job_loras import JobLoras
from svdq.pipeline.models.weights.made_weights import MadeWeight
from svdq.pipeline.planning.binding import step_costs
from svdq.pipeline.planning.rounds import DECODER, ENCODERS, REST, TEXT_ENCODER
from svdq.pipeline.video_parameters import VideoParameters

logger = logging.getLogger(__name__)


class MemoryMeter:
    """Measures encode, step and decode once for each shape on a GPU, and nothing on a CPU. Use it from one thread.

    It counts the bytes that PyTorch's allocator reserves, since other processes cannot use fragmented or cached blocks.
    CPUs have no such counter: Linux reports the peak of all resident memory, including the mapped files of weights.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._measured: dict[tuple[str, MemoryShape], int] = {}

    def begin(self, activity: Activity, shape: MemoryShape) -> Callable[[], None]:
        """Measure `shape_for`'s shape, unless it is known; return a function to call at a successful end."""
        if self._device.type != "cuda" or (activity, shape) in self._measured:
            return lambda: None
        torch.cuda.empty_cache()  # blocks cached by an earlier activity would hide the memory of this one
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_reserved(self._device)

        def end() -> None:
            self._measured[activity, shape] = torch.cuda.max_memory_reserved(self._device) - before

        return end

    @contextmanager
    def measuring(self, activity: Activity, shape: MemoryShape) -> Iterator[None]:
        """Measure a block; see `begin`."""
        end = self.begin(activity, shape)
        yield
        end()

    def measured(self, parameters: VideoParameters) -> Mapping[str, int]:
        """Return the measured bytes of each activity for a shape of video, besides weights."""
        return {
            activity: self._measured[what]
            for activity in ACTIVITIES
            if (what := (activity, shape_for(activity, parameters))) in self._measured
        }


class DiffusersModel(VideoModel):
    """A `VideoModel` from a diffusers folder."""

    family: ClassVar[Family]

    def __init__(
        self,
        model: ResolvedModel,
        role: Role,
        device: torch.device,
        dtype: torch.dtype,
        options: ComputeOptions = DEFAULTS,
        loras: LoraFolder = NO_LORAS,
    ) -> None:
        """Load the components that a role needs; raises InputError if one cannot be loaded."""
        started = time.perf_counter()
        assert model.layout is not None
        found = ComponentLoader(model=model, layout=self.family.layouts[model.layout], role=role, dtype=dtype)
        self._facts = model.facts
        self._role = role
        self._device = device
        self._dtype = dtype
        self._options = options
        #: The diffusers pipeline with the components of the role.
        self.pipeline = found.load_pipeline(next(iter(self.family.layouts)), device, options)
        #: The UNet or the transformers of the role, by component; in rounds, those that are in memory.
        self._denoisers: dict[str, Any] = {
            component: module
            for component in found.needed()
            if component in found.layout.denoisers and (module := getattr(self.pipeline, component)) is not None
        }
        self._found = found
        self._loras = JobLoras(found, self.family, loras, device)
        #: Held while components come and go, and while prompts are encoded.
        self._holding = threading.Lock()
        #: The components of each set, if they come and go, and the set that is there.
        self._of_set: dict[str, list[str]] = {}
        self._held = ""
        if role.in_rounds or role.leaves != "nothing":
            self._take_turns()
        self._meter = MemoryMeter(device)
        self.info = found.info(
            self.family,
            options,
            weight_bytes=self._weight_bytes(streamed=options.offload == "blocks"),
            streamed_bytes=self._weight_bytes(streamed=True),
        )
        logger.info("Loaded %s (%s) in %.1f s.", model.name, role, time.perf_counter() - started)

    def _take_turns(self) -> None:
        needed, denoisers = self._found.needed(), self._found.layout.denoisers

        def of(*phases: Phase) -> list[str]:
            return [each for each in needed if each in self._found.layout.of_phases(*phases)]

        texts, beside_steps = of("embed"), of("step")
        steps = [each for each in needed if each in denoisers]

        def load(component: str) -> Any:
            # The one that the pipeline was made with.
            there = getattr(self.pipeline, component)
            return there if there is not None else self._found.load_for(component, self._device, self._options)

        self._residency = Residency(self._device, self._role.host_bytes, load)
        if self._role.in_rounds:
            of_texts = {TEXT_ENCODER: texts} if texts else {}
            of_steps = {each: [each, *beside_steps] for each in steps}
            self._of_set = {**of_texts, ENCODERS: of("encode"), **of_steps, DECODER: of("decode")}
            self.sets = tuple(self._of_set)
        else:
            photos = of("encode", "step", "decode")
            beside = [] if self._role.leaves == "experts" else steps
            self._of_set = {TEXT_ENCODER: [*texts, *photos, *beside], ENCODERS: [*photos, *beside]}
            self._of_set[REST] = [*photos, *steps]
            self._residency.hold(self._of_set[REST], is_kept=lambda _: True)
            self._held = REST

    def lacks(self, components: str) -> bool:
        """Return whether a set must be loaded; see `VideoModel`."""
        there = self._of_set.get(self._held)
        return components in self._of_set and self._of_set[components] != there

    def hold(self, components: str) -> None:
        """Load a set of components in place of the one before; see `VideoModel`."""
        is_streamed = self._options.offload == "blocks"
        with self._holding, in_a_sentence(f"The {components} of the model {self.info.name}", self._device):
            self._held = ""
            self._put_back_all()
            # Streamed blocks are pinned in host memory, which has room for one component.
            wanted = self._of_set[components]
            changed = self._residency.hold(
                wanted,
                is_kept=lambda each: (
                    not (is_streamed and each in self._denoisers) and not self._found.is_streamed(each)
                ),
            )
            for component, module in changed.items():
                setattr(self.pipeline, component, module)
                if component not in self._found.layout.denoisers:
                    continue
                if module is None:
                    del self._denoisers[component]
                    if self._options.compiled != "off":
                        logger.warning(
                            "Host memory has no room for the %s, which is compiled again at each load; grant more with "
                            "--host-memory, or leave --compile out.", component,
                        )  # fmt: skip
                else:
                    self._denoisers[component] = module
            self._held = components
        sets = [*self._of_set]
        following = sets[(sets.index(components) + 1) % len(sets)]
        again = filter(self._residency.reads_again, self._of_set[following])
        read_ahead([file for component in again for file in self._found.files(component)])

    def _need(self, components: str) -> None:
        if self.lacks(components):
            self.hold(components)

    def complete(self, parameters: VideoParameters) -> VideoParameters:
        """Fill in the defaults of this model; see `VideoModel`."""
        completed = self.family.fill_in(parameters, self.info.name, self._facts)
        try:
            self._loras.check(completed.loras)
        except InputError as error:  # which concerns this video alone
            raise SampleError(str(error)) from error
        return completed

    def _denoiser_for(self, parameters: VideoParameters, component: str) -> Any:
        """Return a denoising component with the LoRAs of a video, until it is asked for by another one."""
        denoiser = self._denoisers[component]
        return (
            self._loras.applied(parameters.loras, component, denoiser)
            if parameters.loras or self._loras.on
            else denoiser
        )

    def _put_back_all(self) -> None:
        for component, denoiser in self._denoisers.items():
            self._loras.put_back(component, denoiser)

    def _measure_step(self, parameters: VideoParameters) -> Callable[[], None]:
        """Measure the step of a shape; of a video without LoRAs, which would count among what a step needs."""
        return (lambda: None) if parameters.loras else self._meter.begin("step", shape_for("step", parameters))

    def memory(self, parameters: VideoParameters) -> Mapping[str, int]:
        """Return the memory that was measured for a shape; see `VideoModel`."""
        return self._meter.measured(parameters)

    def _modules(self) -> dict[str, torch.nn.Module]:
        parts = ((name, getattr(self.pipeline, name)) for name in self._found.layout.weighted)
        return {name: part for name, part in parts if isinstance(part, torch.nn.Module)}

    def _weight_bytes(self, *, streamed: bool) -> int:
        modules = self._modules().items()
        blocks = self._found.layout.blocks
        return sum(
            weight_bytes(module, blocks if streamed and name in self._denoisers else ()) for name, module in modules
        )

    def broken_weights(self) -> str:
        """Return the name of the first weight that is not finite, such as `unet (conv_in.weight)`, or ""."""
        self._put_back_all()
        for component, module in self._modules().items():
            for name, weight in chain(module.named_parameters(), module.named_buffers()):
                if not all_finite([weight]):
                    return f"{component} ({name})"
            for name, layer in module.named_modules():
                if isinstance(layer, MadeWeight) and not all_finite([layer.weight]):
                    return f"{component} ({name}.weight)"
        return ""

    @abstractmethod
    def zeros(self, parameters: VideoParameters) -> dict[str, Tensor]:
        """Return a state of zeros, with all that a scheduler may keep."""

    @torch.inference_mode()
    def warm_up(self, parameters: VideoParameters) -> None:
        """Run each part of this rank once, for compiling and the choice of kernels; a CPU chooses none."""
        if self._device.type == "cpu" and self._options.compiled == "off":
            return
        if self._role.encode:
            self._need(ENCODERS)
            gray = PIL.Image.new("RGB", (parameters.width, parameters.height), "gray")
            self.encode(gray, parameters, gray)
            self._need(REST)
        state = self.zeros(parameters)
        segments = self.segments(parameters)
        for segment in segments:
            if self._role.has(segment.component):
                self._need(segment.component)
                denoiser = self.denoiser(state, parameters, step_costs(segments))
                costs = segment.costs or (1.0,)
                for cost in filter(None, dict.fromkeys(costs)):  # steps that cost differently compute differently
                    denoiser.step(state, segment.start + costs.index(cost))
        if self._role.decode:
            self._need(DECODER)
            ended = self._after_steps(state, parameters)
            self.decode(ended, parameters, parameters.decode_chunk_size or parameters.num_frames)

    def _after_steps(self, zeros: State, parameters: VideoParameters) -> State:
        """Return a state of zeros as the last step leaves one: a second stage has other shapes."""
        return zeros

    @torch.inference_mode()
    def encode(
        self, photo: PIL.Image.Image | None, parameters: VideoParameters, last_photo: PIL.Image.Image | None = None
    ) -> dict[str, Tensor]:
        """Encode photos of exactly width x height and draw the initial noise; see `VideoModel`."""
        assert self._role.encode
        assert photo is not None
        assert all(each.size == (parameters.width, parameters.height) for each in (photo, last_photo or photo))
        with self._meter.measuring("encode", shape_for("encode", parameters)):
            return self._encode(photo, parameters, last_photo)

    @torch.inference_mode()
    def decode(self, state: State, parameters: VideoParameters, decode_chunk_size: int) -> Tensor:
        """Decode a state after the last step; see `VideoModel`."""
        assert self._role.decode
        as_decoded = parameters.model_copy(update={"decode_chunk_size": decode_chunk_size})
        with self._meter.measuring("decode", shape_for("decode", as_decoded)):
            video = self._decode(state, parameters, decode_chunk_size)
            if not all_finite([video]):
                raise SampleError(f"The decoded frames are not numbers (NaN or infinity){nan_advice(self)}")
            return to_uint8(video)

    @abstractmethod
    def _encode(
        self, photo: PIL.Image.Image, parameters: VideoParameters, last_photo: PIL.Image.Image | None
    ) -> dict[str, Tensor]:
        """Encode photos of the right size; see `encode`."""

    @abstractmethod
    def _decode(self, state: State, parameters: VideoParameters, decode_chunk_size: int) -> Tensor:
        """Decode to a video (3, F, H, W), float32, -1 to 1."""


def to_uint8(video: Tensor) -> Tensor:
    """Convert a decoded video (3, F, H, W), float32, -1 to 1, to frames (F, H, W, 3) on its device, in place.

    These are the operations of VideoProcessor.postprocess_video for PIL images, each rounded to float32 as there, on
    the video's device: on a CPU they would take as long as several steps of a GPU.
    """
    video = video.mul_(0.5).add_(0.5).clamp_(0, 1).mul_(255).round_()
    return video.to(torch.uint8).permute(1, 2, 3, 0).contiguous()
