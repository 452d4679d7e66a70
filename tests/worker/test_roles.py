"""Which rank loads which expert: by the memory that ranks have, and as the user says."""

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from svdq.pipeline.models.compute.memory import WORKSPACE_BYTES
from svdq.pipeline.models.compute.options import ComputeOptions
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.transport.topology import Topology
from svdq.worker.memory_plan import RankInfo
from svdq.worker.roles import Experts, choose_weights
from tests.pipeline.models.wan_files import save_fp8_scaled

HIGH, LOW = frozenset({"transformer"}), frozenset({"transformer_2"})
#: Bytes that suffice for anything, and for nothing.
ROOM, NO_ROOM = 10**13, 1


def experts_of(name: str, device: str = "cpu") -> Experts | None:
    return Experts.of(resolve(name), ComputeOptions(), torch.float32, torch.device(device))


@pytest.fixture
def experts(tiny_wan: Path) -> Experts:
    found = experts_of(str(tiny_wan))
    assert found is not None
    return found


def assign(experts: Experts, capacities, mode="auto"):
    return experts.assign(capacities, mode)


def test_models_with_one_component_have_no_experts(tiny_model: Path) -> None:
    for name in (str(tiny_model), "preview", "simulated"):
        assert experts_of(name) is None


@pytest.mark.parametrize("capacities", [[None] * 7, [ROOM] * 7])
def test_ranks_with_room_load_all_experts(experts: Experts, capacities) -> None:
    assert assign(experts, capacities) == [None] * 7


def test_a_rank_alone_without_room_works_in_rounds(experts: Experts) -> None:
    assert experts.in_rounds(None, "auto") is experts.in_rounds(ROOM, "auto") is None
    found = experts.in_rounds(NO_ROOM, "auto")
    assert found is not None
    assert found == experts.in_rounds(None, "rounds")
    assert not experts.in_rounds(NO_ROOM, "resident")


def test_bound_ranks_say_where_rounds_would_be_faster(experts: Experts, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assign(experts, [NO_ROOM] * 2)
    assert re.search(r"would be about \d+% faster: `svdq worker --experts rounds --groups 2 --ranks 1`", caplog.text)
    caplog.clear()
    assign(experts, [NO_ROOM] * 8)  # 3 + 5 ranks share 15 + 25 steps evenly
    assert "faster" not in caplog.text


def test_ranks_without_room_load_the_expert_of_their_steps(experts: Experts, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert assign(experts, [NO_ROOM] * 7) == [HIGH] * 3 + [LOW] * 4
    assert (
        "ranks 0 to 2: transformer (steps 1 to 15 of 40); ranks 3 to 6: transformer_2 (steps 16 to 40 of 40)"
        in caplog.text
    )


def test_a_rank_with_room_at_the_boundary_loads_both(experts: Experts) -> None:
    assert assign(experts, [NO_ROOM] * 2 + [ROOM] + [NO_ROOM] * 4) == [HIGH] * 2 + [None] + [LOW] * 4


def test_the_option_overrides_the_memory(experts: Experts) -> None:
    assert assign(experts, [None] * 3, "bound") == [HIGH, LOW, LOW]
    assert assign(experts, [NO_ROOM] * 3, "resident") == [None] * 3
    assert assign(experts, [NO_ROOM], "bound") == [None], "a rank alone does all steps"


def smallest(fits) -> int:
    """Return the smallest number for which a condition holds, that goes on to hold."""
    low, high = 0, ROOM
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def test_all_experts_fit_with_the_largest_activations_of_a_rank(experts: Experts, tiny_wan: Path) -> None:
    weights = sum(path.stat().st_size for path in tiny_wan.glob("transformer*/*.safetensors"))
    assert weights < smallest(lambda num_bytes: assign(experts, [num_bytes] * 3) == [None] * 3)


def test_gpus_need_room_for_the_workspace_of_their_libraries_too(experts: Experts, tiny_wan: Path) -> None:
    on_gpus = experts_of(str(tiny_wan), "cuda")
    assert on_gpus is not None

    def alone(found: Experts) -> int:
        return smallest(lambda num_bytes: found.in_rounds(num_bytes, "auto") is None)

    def of_three(found: Experts) -> int:
        return smallest(lambda num_bytes: assign(found, [num_bytes] * 3) == [None] * 3)

    for need in (alone, of_three):
        assert need(on_gpus) == need(experts) + WORKSPACE_BYTES


def test_the_text_encoder_leaves_rank_0_where_it_has_no_room(experts: Experts, caplog) -> None:
    caplog.set_level(logging.INFO)
    for capacity, components, num_ranks in ((None, HIGH, 3), (ROOM, HIGH, 3), (ROOM, None, 1)):
        assert experts.leaves(capacity, components, num_ranks) == ("nothing", None)
    assert not caplog.text
    size = experts.size
    text, expert = size.weights("text_encoder"), size.weights("transformer")
    found, held = experts.leaves(NO_ROOM, HIGH, 3)
    assert found == "experts"
    assert held is not None
    assert held.by_phase["step"] == held.by_phase["encode"] + expert == held.by_phase["embed"] + expert - text
    assert "it is loaded for prompts that are new, and the transformer leaves for each encode" in caplog.text
    assert experts.leaves(NO_ROOM, None, 1)[0] == "text", "it could work in rounds"


@pytest.mark.parametrize("components", [frozenset(), HIGH, None, HIGH | LOW])
def test_the_report_of_a_rank_survives_json(components) -> None:
    info = RankInfo(capacity=None, weights=1, device="cpu", components=components, compute={"dtype": "float16"})
    assert RankInfo.model_validate_json(info.model_dump_json()) == info


def test_ranks_of_a_simulated_model_are_bound_when_asked() -> None:
    experts = experts_of("simulated:segments=15+25")
    assert experts.assign([None] * 7, "auto") == [None] * 7
    first, second = {"simulated"}, {"simulated_2"}
    assert experts.assign([None] * 7, "bound") == [first] * 3 + [second] * 4


def test_weights_stay_stored_where_made_ones_have_no_room(tiny_wan: Path, tmp_path: Path) -> None:
    for component in ("transformer", "transformer_2"):
        weights = load_file(next((tiny_wan / component).glob("*.safetensors")))
        save_fp8_scaled(tmp_path / f"{component}.safetensors", weights)
    files = "".join(f'{name} = "{name}.safetensors"\n' for name in ("transformer", "transformer_2"))
    (tmp_path / "fp8.toml").write_text(f'base = "{tiny_wan}"\n[weights]\n{files}')
    model, alone = resolve(str(tmp_path / "fp8.toml")), Topology(rank=0, num_ranks=1)

    def choose(capacity: int | None, role: Role, *, for_loras: bool = False, **options: Any) -> str:
        compute, device = ComputeOptions(**options), torch.device("cpu")
        return choose_weights(model, compute, torch.bfloat16, role, capacity, alone, device, for_loras=for_loras)

    everything = Role.of_rank(0)
    assert choose(None, everything) == choose(ROOM, everything) == "made"
    assert choose(ROOM, everything, for_loras=True) == "stored"
    least = smallest(lambda num_bytes: choose(num_bytes, everything) == "made")
    assert choose(least - 1, everything) == "stored"
    assert choose(None, replace(everything, in_rounds=True)) == "stored"
    assert choose(ROOM, everything, weights="stored") == "stored"
    assert choose(0, everything, weights="made") == choose(0, everything, compiled="blocks") == "made"

    found = Experts.of(model, ComputeOptions(), torch.bfloat16, torch.device("cpu"))
    made = Experts.of(model, ComputeOptions(weights="made"), torch.bfloat16, torch.device("cpu"))
    assert found is not None
    assert made is not None
    least = smallest(lambda num_bytes: made.in_rounds(num_bytes, "auto") is None)
    assert found.in_rounds(least - 1, "auto") is None, "both experts have room as they are stored"
