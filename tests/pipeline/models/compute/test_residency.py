"""Components that come and go: the same numbers, tied weights stay tied, and files are read only where memory lacks."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from svdq.pipeline.models.compute.residency import Residency, Uploader, copies_of, move_in, move_out
from svdq.pipeline.models.weights.comfy_quant import DATA
from svdq.pipeline.models.weights.formats import Stored
from svdq.pipeline.models.weights.made_weights import Keeping, Recipe, keep_stored

CPU = torch.device("cpu")


class Tied(nn.Module):
    """Two layers that share a weight, a buffer and an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.arange(8.0))
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.scale


def addresses(module: nn.Module) -> set[int]:
    return {weight.data_ptr() for weight in (*module.parameters(), *module.buffers()) if weight.numel()}


class Block(nn.Sequential):
    pass


def quantized() -> nn.Module:
    """Layers that multiply in int8."""
    module = Block(nn.Linear(32, 32), nn.Linear(32, 8))
    recipes = {
        name: Recipe(
            name=name,
            stored=Stored(num_elements=weight.numel(), read=partial(dict, {DATA: weight.detach()})),
            loras=(),
            shape=weight.shape,
            dtype=torch.float32,
        )
        for name, weight in nn.Sequential(module).named_parameters()
    }
    keeping = Keeping(blocks=["Block"], quantizes=True, device=CPU)
    assert len(keep_stored(nn.Sequential(module), recipes, keeping, torch.float32, CPU)) == 2
    return module


def test_a_component_computes_the_same_wherever_its_weights_have_been() -> None:
    with torch.no_grad():
        module, x = Tied(), torch.randn(3, 8)
        expected = module(x)
        # It is loaded onto the device, leaves it for the first time, comes back, and leaves it again.
        on_device = addresses(module)
        copies = copies_of(module)
        move_out(module, copies)
        in_host_memory = addresses(module)
        assert not on_device & in_host_memory
        for _ in range(2):
            copies = move_in(module, torch.clone)
            assert not addresses(module) & in_host_memory
            torch.testing.assert_close(module(x), expected, rtol=0, atol=0)
            move_out(module, copies)
            assert addresses(module) == in_host_memory, "it is copied to host memory once"
        torch.testing.assert_close(module(x), expected, rtol=0, atol=0)


def test_tied_weights_stay_tied() -> None:
    module = Tied()
    move_in(module, torch.clone)
    assert module.first.weight.data_ptr() == module.second.weight.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (5, 100), (1000,)])
def test_weights_arrive_whole_through_small_buffers(dtype, shape) -> None:
    source = (torch.rand(shape) * 100).to(dtype)
    assert torch.equal(Uploader(CPU, 64)(source), source)
    turned = source.reshape(-1, 1).expand(-1, 4).transpose(0, 1)
    assert torch.equal(Uploader(CPU, 64)(turned), turned)


@pytest.mark.slow
@pytest.mark.parametrize(("host_bytes", "expected"), [(10**9, "ab"), (0, "abab"), (4 * (64 + 16 + 8), "abb")])
def test_components_are_read_again_only_if_host_memory_has_no_room(host_bytes, expected) -> None:
    loaded = []
    modules = {name: Tied() for name in "ab"}

    def load(name: str) -> nn.Module:
        loaded.append(name)
        return copy.deepcopy(modules[name])

    residency = Residency(CPU, host_bytes, load)
    for wanted in ("a", "b", "a", "b", "b"):
        residency.hold(wanted, is_kept=lambda _: True)
        assert not residency.reads_again(wanted)
    assert "".join(loaded) == expected


@pytest.mark.slow
def test_what_must_not_stay_is_dropped_and_what_is_used_is_not_read_again() -> None:
    loaded = []
    residency = Residency(CPU, 10**9, lambda name: loaded.append(name) or nn.Linear(2, 2))
    assert list(residency.hold(["a", "b"], is_kept=lambda _: False)) == ["a", "b"]
    changed = residency.hold(["b", "c"], is_kept=lambda _: False)
    assert changed["a"] is None
    assert list(changed) == ["a", "c"]
    assert loaded == ["a", "b", "c"]


@pytest.mark.slow
def test_compiled_code_goes_on_with_weights_that_have_moved() -> None:
    module, x = quantized(), torch.randn(3, 32)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    with torch.no_grad():
        expected = module(x)
        module.compile(backend=backend)
        module(x)
        num_graphs = len(graphs)
        move_out(module, copies_of(module))
        move_in(module, torch.clone)
        torch.testing.assert_close(module(x), expected, rtol=0, atol=0)
    assert len(graphs) == num_graphs > 0
