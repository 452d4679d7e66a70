"""Which rank loads which expert: by the memory that ranks have, and as the user says."""

import logging
import re
from pathlib import Path

import pytest
import torch

from svdq.pipeline.models.compute_options import ComputeOptions
from svdq.pipeline.models.model_names import resolve
from svdq.worker.intake.memory_plan import RankInfo
from svdq.worker.roles import Experts

HIGH, LOW = frozenset({"transformer"}), frozenset({"transformer_2"})
#: Bytes that suffice for anything, and for nothing.
ROOM, NO_ROOM = 10**13, 1


def experts_of(name: str) -> Experts | None:
    return Experts.of(resolve(name), ComputeOptions(), torch.float32)


@pytest.fixture
def experts(tiny_wan: Path) -> Experts:
    found = experts_of(str(tiny_wan))
    assert found is not None
    return found


def assign(experts: Experts, capacities, mode="auto", **options):
    return experts.assign(capacities, mode, **options)


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


def test_a_rank_that_only_encodes_loads_no_expert(experts: Experts) -> None:
    assert assign(experts, [None] * 3, encoder_rank=True) == [frozenset(), None, None]
    assert assign(experts, [NO_ROOM] * 8, encoder_rank=True) == [frozenset()] + [HIGH] * 3 + [LOW] * 4
    assert assign(experts, [NO_ROOM] * 2, "resident", encoder_rank=True) == [frozenset(), None]


@pytest.mark.parametrize("encoder_rank", [False, True])
def test_all_experts_fit_with_the_largest_activations_of_a_rank(experts: Experts, tiny_wan: Path, encoder_rank) -> None:
    weights = sum(path.stat().st_size for path in tiny_wan.glob("transformer*/*.safetensors"))

    def has_room(num_bytes: int) -> bool:
        return assign(experts, [num_bytes] * 3, encoder_rank=encoder_rank)[1:] == [None, None]

    low, high = 1, ROOM
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if has_room(middle) else (middle, high)
    assert weights < high


@pytest.mark.parametrize("components", [frozenset(), HIGH, None, HIGH | LOW])
def test_the_report_of_a_rank_survives_json(components) -> None:
    info = RankInfo(capacity=None, weights=1, device="cpu", components=components, compute={"dtype": "float16"})
    assert RankInfo.model_validate_json(info.model_dump_json()) == info


def test_ranks_of_a_simulated_model_are_bound_when_asked() -> None:
    experts = experts_of("simulated:segments=15+25")
    assert experts.assign([None] * 7, "auto") == [None] * 7
    first, second = {"simulated"}, {"simulated_2"}
    assert experts.assign([None] * 7, "bound") == [first] * 3 + [second] * 4
    assert experts.assign([None] * 8, "bound", encoder_rank=True) == [set()] + [first] * 3 + [second] * 4
