"""The editor's format: wires of all kinds end at the node or value that runs."""

from typing import Any

import pytest

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.comfyui.graph import Graph, Link
from svdq.pipeline.models.comfyui.workflow import read_graph

Nodes = dict[int, dict[str, Any]]


def editor(*nodes: dict[str, Any], links: list[list[Any]], **more: Any) -> dict[str, Any]:
    return {"last_node_id": 99, "nodes": list(nodes), "links": links, **more}


def made(number: int, kind: str, values: Any = None, *, mode: int = 0, **inputs: Any) -> dict[str, Any]:
    """A node whose inputs are links, by name; a tuple also has the type."""
    pairs = {name: each if isinstance(each, tuple) else (each, "MODEL") for name, each in inputs.items()}
    listed = [{"name": name, "link": link, "type": type_} for name, (link, type_) in pairs.items()]
    outputs = [{"name": "out", "type": "MODEL"}]
    return {"id": number, "type": kind, "mode": mode, "widgets_values": values, "inputs": listed, "outputs": outputs}


def model_of(workflow: dict[str, Any], node: str = "9", name: str = "model") -> Any:
    graph: Graph = read_graph(workflow)
    return graph.nodes[node].inputs.get(name)


LOADER = made(1, "UNETLoader", ["wan.safetensors", "default"])
TO_LOADER = Link(node="1", slot=0)


def test_widgets_have_names_with_and_without_the_control_of_a_seed() -> None:
    values = ["enable", 5, "randomize", 4, 1.0, "euler", "simple", 0, 2, "enable"]
    with_control = editor(made(9, "KSamplerAdvanced", values), links=[])
    without = editor(made(9, "KSamplerAdvanced", [*values[:2], *values[3:]]), links=[])
    for workflow in (with_control, without):
        inputs = read_graph(workflow).nodes["9"].inputs
        assert (inputs["noise_seed"], inputs["steps"], inputs["sampler_name"], inputs["end_at_step"]) == (
            5,
            4,
            "euler",
            2,
        )


SHIFT = made(9, "ModelSamplingSD3", [5.0], model=99)
OFF = made(4, "UNETLoader", ["off.safetensors", "default"], mode=2)
SET = made(2, "SetNode", ["my model"], MODEL=11)
LORA = ["a.safetensors", 1.0]
EVERYWHERE = {"downstream": 9, "downstream_slot": 0, "upstream": "1", "upstream_slot": 0, "controller": 7}


@pytest.mark.parametrize(
    ("nodes", "links", "found"),
    [
        ([made(2, "Reroute", unnamed=(11, "*"))], [(11, 1, 2), (99, 2, 9)], TO_LOADER),
        (
            [made(3, "LoraLoaderModelOnly", LORA, mode=4, clip=(None, "CLIP"), model=11)],
            [(11, 1, 3), (99, 3, 9)],
            TO_LOADER,
        ),
        ([made(3, "LoraLoaderModelOnly", LORA, mode=2, model=11)], [(11, 1, 3), (99, 3, 9)], None),
        ([SET, made(3, "GetNode", ["my model"])], [(11, 1, 2), (99, 3, 9)], TO_LOADER),
        ([SET], [(11, 1, 2), (99, 2, 9)], TO_LOADER),
        ([OFF, made(5, "Any Switch (rgthree)", any_01=11, any_02=12)], [(11, 4, 5), (12, 1, 5), (99, 5, 9)], TO_LOADER),
        ([made(2, "PrimitiveNode", [8.0, "fixed"])], [(99, 2, 9)], 8.0),
        ([made(7, "Anything Everywhere", anything=11)], [(11, 1, 7)], TO_LOADER),
    ],
    ids=["reroute", "bypassed", "muted", "get and set", "set passes on", "first that runs", "primitive", "everywhere"],
)
def test_wires_end_at_the_node_or_value_that_runs(nodes: list[Any], links: list[Any], found: Any) -> None:
    extra = {"ue_links": [EVERYWHERE] if nodes[0]["type"] == "Anything Everywhere" else []}
    wires = [[link, origin, 0, target, 0, "MODEL"] for link, origin, target in links]
    shift = SHIFT if any(link == 99 for link, *_ in links) else made(9, "ModelSamplingSD3", [5.0], model=None)
    workflow = editor(LOADER, *nodes, shift, links=wires, extra=extra)
    assert model_of(workflow) == found
    assert read_graph(workflow).nodes.keys() == {"1", "9"}


def subgraph(instance: dict[str, Any]) -> dict[str, Any]:
    """A subgraph with a loader inside, whose name is a widget of its instance, and a sampler outside."""
    loader = made(5, "UNETLoader", ["inside.safetensors", "default"])
    loader["inputs"] = [{"name": "unet_name", "link": 1, "type": "COMBO", "widget": {"name": "unet_name"}}]
    inside = {
        "id": "abc",
        "name": "Load",
        "nodes": [loader],
        "inputs": [{"name": "unet_name", "linkIds": [1]}],
        "outputs": [{"name": "MODEL", "linkIds": [2]}],
        "links": [
            {"id": 1, "origin_id": -10, "origin_slot": 0, "target_id": 5, "target_slot": 0, "type": "COMBO"},
            {"id": 2, "origin_id": 5, "origin_slot": 0, "target_id": -20, "target_slot": 0, "type": "MODEL"},
        ],
    }
    sampler = made(9, "ModelSamplingSD3", [5.0], model=12)
    return editor(instance, sampler, links=[[12, 3, 0, 9, 0, "MODEL"]], definitions={"subgraphs": [inside]})


def test_subgraphs_have_the_values_of_their_instances() -> None:
    for values, file in ((["outside.safetensors"], "outside.safetensors"), ([], "inside.safetensors")):
        workflow = subgraph(made(3, "abc", values))
        assert model_of(workflow) == Link(node="3:5", slot=0)
        assert read_graph(workflow).nodes["3:5"].inputs["unet_name"] == file
    by_place = made(3, "abc", ["shown.safetensors"]) | {"properties": {"proxyWidgets": [["5", "unet_name"]]}}
    assert read_graph(subgraph(by_place)).nodes["3:5"].inputs["unet_name"] == "shown.safetensors"


def test_a_muted_subgraph_does_not_run() -> None:
    assert read_graph(subgraph(made(3, "abc", [], mode=2))).nodes.keys() == {"9"}


def test_widgets_by_name_are_read_of_any_node() -> None:
    stack = made(3, "A stack of mine", ["?", 1, 2]) | {
        "widgets_values_named": {"lora_1": "a.safetensors", "strength_1": 0.5, "fixed": "fixed"}
    }
    assert read_graph(editor(stack, links=[])).nodes["3"].inputs == {"lora_1": "a.safetensors", "strength_1": 0.5}


def prompts(*instances: dict[str, Any]) -> dict[str, Any]:
    """A workflow with instances of a subgraph of a text and a size, each an input of it."""
    text = {"id": 5, "type": "CLIPTextEncode", "widgets_values": ["inside"]}
    text["inputs"] = [{"name": "text", "link": 1, "type": "STRING", "widget": {"name": "text"}}]
    size = {"id": 6, "type": "PrimitiveInt", "widgets_values": [64, "fixed"]}
    size["inputs"] = [{"name": "value", "link": 2, "type": "INT", "widget": {"name": "value"}}]
    inside = {
        "id": "abc",
        "nodes": [text, size],
        "inputs": [{"name": "text", "linkIds": [1]}, {"name": "width", "linkIds": [2]}],
        "outputs": [],
        "links": [[1, -10, 0, 5, 0, "STRING"], [2, -10, 1, 6, 0, "INT"]],
    }
    return editor(*instances, links=[], definitions={"subgraphs": [inside]})


def test_each_instance_of_a_subgraph_has_its_values_in_its_own_order() -> None:
    first = made(3, "abc", ["first", 832])
    second = made(4, "abc", [640, "second"])
    second["properties"] = {"proxyWidgets": [["6", "value"], ["-1", "text"]]}
    third = made(7, "abc", [480, "third"])
    third["inputs"] = [{"name": name, "link": None, "widget": {"name": name}} for name in ("width", "text")]
    fourth = made(8, "abc", []) | {"widgets_values_named": {"width": 320, "text": "fourth"}}
    nodes = read_graph(prompts(first, second, third, fourth)).nodes
    found = [(nodes[f"{number}:5"].inputs["text"], nodes[f"{number}:6"].inputs["value"]) for number in (3, 4, 7, 8)]
    assert found == [("first", 832), ("second", 640), ("third", 480), ("fourth", 320)]


def test_subgraphs_that_multiply_are_a_sentence() -> None:
    defined = [
        {"id": f"g{level}", "nodes": [{"id": number, "type": f"g{level + 1}"} for number in range(4)], "links": []}
        for level in range(20)
    ]
    with pytest.raises(InputError, match="more than 10,000 nodes"):
        read_graph(editor({"id": 1, "type": "g0"}, links=[], definitions={"subgraphs": defined}))


def test_switches_that_multiply_are_followed_once() -> None:
    nodes = [made(1, "UNETLoader", ["off.safetensors"], mode=2)]
    nodes += [
        made(number, "Any Switch (rgthree)", **{f"any_{n}": 3 * number + n for n in range(3)})
        for number in range(2, 62)
    ]
    links = [[3 * number + n, number - 1, 0, number, n, "MODEL"] for number in range(2, 62) for n in range(3)]
    last = made(99, "ModelSamplingSD3", [5.0], model=999)
    assert model_of(editor(*nodes, last, links=[*links, [999, 61, 0, 99, 0, "MODEL"]]), node="99") is None
