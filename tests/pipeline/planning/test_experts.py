"""The comparison of bound ranks with replicas that swap experts."""

from pathlib import Path

import pytest

from svdq.pipeline.planning.capacity import VideoCosts
from svdq.pipeline.planning.costs import Costs
from tests import experts

DOCS = Path(__file__).parents[3] / "docs/internals/capacity.md"
LAW = VideoCosts(
    steps=experts.STEPS,
    costs=Costs(step_s=(experts.STEP_S,), encode_s=experts.ENCODE_S, decode_s=experts.DECODE_S),
    segments=(15, 25),
)


@pytest.mark.slow
def test_the_table_in_the_docs_is_what_the_script_prints() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert "\n".join(experts.rows()) in text


@pytest.mark.parametrize("ranks", [2, 4, 7])
@pytest.mark.parametrize(("num_videos", "within"), [(1, 0.001), (20, 0.07), (50, 0.03), (200, 0.01)])
def test_the_law_says_what_the_plan_takes(ranks: int, num_videos: int, within: float) -> None:
    planned_s = experts.pipeline_s(ranks, num_videos)
    law_s = LAW.time_s(ranks, num_videos)
    assert law_s - 1e-6 <= planned_s <= (1 + within) * law_s
