"""Warm-ups: the initialization for the first sample of a shape, done on all ranks at the same time."""

import logging

from svdq.pipeline.failures import describe_failure
from svdq.pipeline.models.base import VideoModel
from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.planning.costs import Shape
from svdq.pipeline.protocols import Request
from svdq.pipeline.trace import Tracer
from svdq.pipeline.transport.links import Sender
from svdq.pipeline.transport.message import Kind, Message

logger = logging.getLogger(__name__)


class Warmup:
    """Remembers the shapes that a rank is warm for."""

    def __init__(self, model: VideoModel, tracer: Tracer, downstream: Sender | None) -> None:
        self._model = model
        self._tracer = tracer
        self._downstream = downstream
        self._warm: set[Shape] = set()

    def run(self, parameters: VideoParameters) -> None:
        """Warm this rank up (kernels chosen, memory reserved), once for each shape.

        A failure here fails no rank: samples try smaller chunks, or report the error.
        """
        shape = Shape.of(parameters)
        if shape in self._warm:
            return
        self._warm.add(shape)
        with self._tracer.span("warm-up"):
            try:
                self._model.warm_up(parameters)
            except Exception as error:  # noqa: BLE001 - torch raises many types
                shape_text = f"{shape.width}x{shape.height}x{shape.frames}"
                logger.warning("%s", describe_failure(error, f"while this rank warmed up for {shape_text}"))

    def announce(self, parameters: VideoParameters, job_id: str = "", index: int = 0) -> None:
        """Make the following ranks warm up; `job_id` and `index` are of the first sample with this shape, if any."""
        if self._downstream is not None:
            body = {"job_id": job_id, "index": index, "parameters": parameters.model_dump(mode="json")}
            self._downstream.send(Message(kind=Kind.WARM, body=body))

    def announce_new(self, request: Request, index: int) -> None:
        """Make the following ranks warm up for a request of a new shape; on rank 0 its sample is the warm-up."""
        shape = Shape.of(request.parameters)
        if shape not in self._warm:
            self.announce(request.parameters, request.job_id, index)
        self._warm.add(shape)
