"""What svdq knows of ComfyUI's nodes for toys: a sampler of their own, and the node that encodes the photo."""

from collections.abc import Sequence

from svdq.pipeline.models.comfyui.graph import Encoder, Graph, NodeTypes, Stage
from svdq.pipeline.models.comfyui.model_chain import model_chain
from svdq.pipeline.models.comfyui.recipe import Recipe, WorkflowReader, defaults_of, find_encoder
from svdq.pipeline.models.comfyui.source import source_of
from svdq.pipeline.models.comfyui.stages import plain_sampler
from svdq.pipeline.models.comfyui.values import whole_of
from toy.family import BLOCK, FINE, LAYOUT

_ENCODERS = {"ToyPhoto": Encoder(width="wide", height="high", frames="count", photo="picture")}


def read(graph: Graph, stages: Sequence[Stage]) -> Recipe:
    """Read a toy's video, whose loader names the file of the fine expert."""
    stage = stages[0]
    encoder = find_encoder(graph, stage, _ENCODERS, {"ToyText": "makes a video from text alone"})
    model = model_chain(graph, stage.model, stage.node)
    source = source_of(graph, encoder, None, None, multiple=BLOCK, frame_step=1)
    defaults = defaults_of(source, steps=stage.schedule.steps, sparkle=whole_of(graph, encoder, "glitter"))
    return Recipe(base=LAYOUT.example, weights={FINE: model.file}, defaults=defaults, source=source, seed=stage.seed)


READER = WorkflowReader(
    nodes="Toy",
    types=NodeTypes(
        widgets={"ToyPhoto": "wide high count glitter", "ToySampler": "seed control_after_generate steps"},
        samplers={"ToySampler": plain_sampler},
        encoders=_ENCODERS,
    ),
    read=read,
)
