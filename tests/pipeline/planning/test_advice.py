"""Advice on runs whose problem is known: what ranks waited for, what would help, and how much."""

import contextlib
import json
from pathlib import Path

import pytest

from svdq.pipeline.costs import Costs
from svdq.pipeline.errors import InputError
from svdq.pipeline.planning.advice import advise
from svdq.pipeline.planning.capacity import VideoCosts
from svdq.pipeline.planning.recordings import Profile, read_profile

VIDEO = VideoCosts(steps=12, costs=Costs(step_s=(1.0, 1.0), encode_s=0.1, decode_s=0.1))


def test_a_busy_run_needs_cheaper_steps_or_gpus() -> None:
    advice = advise(Profile(source="", video=VIDEO, busy=(0.99, 1.0)))
    assert advice.time == "The ranks were busy 100% of the time (99% to 100%)."
    assert advice.best.text.startswith("Halving the time of a step")
    assert advice.best.factor == pytest.approx(12.2 / 6.2)
    assert any(other.text == "One more GPU." and round(other.factor, 2) == 1.5 for other in advice.others)


def test_an_empty_queue() -> None:
    advice = advise(Profile(source="", video=VIDEO, busy=(0.5, 0.5), no_jobs=0.5))
    assert advice.best.text.startswith("Keep the queue full")
    assert advice.best.factor == pytest.approx(2.0)
    assert "idle 50% for want of jobs" in advice.time


def test_slow_storage() -> None:
    advice = advise(Profile(source="", video=VIDEO, busy=(0.5, 0.5), writing=0.5))
    assert advice.best.text.startswith("Make writing faster")
    assert advice.best.factor == pytest.approx(2.0)


def test_a_slow_gpu() -> None:
    video = VideoCosts(steps=12, costs=Costs(step_s=(1.0, 2.0, 1.0, 1.0)))
    advice = advise(Profile(source="", video=video, busy=(0.98,) * 4))
    assert advice.best.text.startswith("Check the GPU of rank 1: its steps take up to 2.00 times as long")
    assert advice.best.factor == pytest.approx(4 / 3.5)


def test_a_rank_that_only_encodes() -> None:
    video = VideoCosts(steps=3, costs=Costs(step_s=(1.0,) * 8, encode_s=1.0))
    advice = advise(Profile(source="", video=video, busy=(1.0, *(0.4,) * 7)))
    assert "more than 4 ranks wait for it" in advice.best.text
    assert advice.best.factor == pytest.approx(2.0)


RUN = {"ranks": 1, "steps": 2, "busy_share": [0.9]}
RUN |= {"step_ms": 500.0, "encode_ms": 50.0, "decode_ms": 100.0}


@pytest.mark.parametrize(
    "document",
    [
        *({"runs": [RUN | {name: value}]} for name in RUN for value in (0, None, -1, "x", 10**400)),
        *({"runs": runs} for runs in (7, [7], [{}], "x")),
        {"traceEvents": []},
    ],
    ids=lambda document: str(document)[:60],
)
def test_a_recording_that_svdq_did_not_write(tmp_path: Path, document: object) -> None:
    path = tmp_path / "recording.json"
    path.write_text(json.dumps({"runs": [RUN]}))
    assert read_profile(path).busy == (0.9,)
    path.write_text(json.dumps(document))
    with contextlib.suppress(InputError):  # what is left may be enough
        advise(read_profile(path))


def test_a_recording_that_is_nested_deeply(tmp_path: Path) -> None:
    (path := tmp_path / "recording.json").write_text("[" * 2000 + "]" * 2000)
    with pytest.raises(InputError, match="Invalid JSON: recursion limit"):
        read_profile(path)


def test_uneven_experts_are_named_with_what_a_rank_with_both_would_gain(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    run = {"ranks": 7, "steps": 40, "segments": [15, 25], "step_ms": 50, "encode_ms": 0}
    run |= {"decode_ms": 0, "busy_share": [0.8] * 3 + [1.0] * 4}
    path.write_text(json.dumps({"runs": [run]}))
    best = advise(read_profile(path)).best
    assert "the 15 steps of the first expert on 3 ranks and the 25 of the second on 4 are uneven" in best.text
    assert best.factor == pytest.approx(7 * 25 / (4 * 40))
    path.write_text(json.dumps({"runs": [run | {"segments": None}]}))
    assert "expert" not in advise(read_profile(path)).best.text
