"""Advice on runs whose problem is known: what ranks waited for, what would help, and how much."""

import contextlib
import json
from pathlib import Path

import pytest

from svdq.pipeline.costs import Costs
from svdq.pipeline.errors import InputError
from svdq.pipeline.planning.advice import advise
from svdq.pipeline.planning.capacity import VideoCosts
from svdq.pipeline.planning.recordings import Profile, RankTime, from_spans, read_profile
from svdq.pipeline.trace import Span


def span(name: str, job: str, start_s: float, end_s: float) -> Span:
    return Span(name=name, job_id=job, start_s=start_s, end_s=end_s, thread="MainThread")


def run(*, num_videos: int = 60, gap_s: float = 0.0, write_s: float = 0.0, slow: float = 1.0) -> list[list[Span]]:
    """Return the spans of two ranks that make videos of 12 steps of 1 s: rank 0 encodes and does 6, rank 1 the rest.

    Args:
        num_videos: number of videos.
        gap_s: seconds between the end of a video's first half and the next job.
        write_s: seconds that a write takes; both ranks wait while three videos are not written.
        slow: seconds of a step on rank 1.
    """
    spans: list[list[Span]] = [[], []]
    begun_s = 100.0
    free_s = [100.0, 100.0]
    written_s: list[float] = []
    for number in range(num_videos):
        job = f"job-{number}"
        now_s = max(begun_s, free_s[0])
        if write_s and number > 3:
            now_s = max(now_s, written_s[number - 4])
        spans[0] += [span("encode", job, now_s, now_s + 0.1), span("steps 0-5", job, now_s + 0.1, now_s + 6.1)]
        free_s[0] = now_s + 6.1
        begun_s = free_s[0] + gap_s
        now_s = max(free_s)
        if write_s and number > 2:
            now_s = max(now_s, written_s[number - 3])
        end_s = now_s + 6 * slow
        spans[1] += [span("steps 6-11", job, now_s, end_s), span("decode", job, end_s, end_s + 0.1)]
        free_s[1] = end_s + 0.1
        if write_s:
            start_s = max([free_s[1], *written_s[-1:]])
            written_s.append(start_s + write_s)
            spans[1].append(span("write", job, start_s, written_s[-1]))
    return spans


def test_costs_are_read_back() -> None:
    profile = from_spans(run(slow=2.0), "a run")
    assert profile.video.steps == 12
    assert profile.video.costs.step_s == pytest.approx((1.0, 2.0))
    assert (profile.video.costs.encode_s, profile.video.costs.decode_s) == pytest.approx((0.1, 0.1))


def test_an_encode_between_two_steps_counts_once() -> None:
    spans = [
        [span("encode", "a", 0.0, 1.0), span("steps 0-7", "a", 1.0, 10.0), span("encode", "b", 4.0, 5.0)],
        [span("steps 0-7", "b", 5.0, 9.0), span("decode", "b", 9.0, 10.0)],
    ]
    profile = from_spans(spans, "a run")
    assert (profile.ranks[0].encode, profile.ranks[0].steps) == pytest.approx((0.2, 0.8))
    assert profile.ranks[0].busy == pytest.approx(1.0)
    # Rank 1 was idle for 4 s with fewer than two videos in flight, and for 1 s while its video was encoded.
    assert profile.no_jobs == pytest.approx(4 / 20)


def test_a_busy_run_needs_cheaper_steps_or_gpus() -> None:
    profile = from_spans(run(num_videos=300), "a run")
    assert profile.busy > 0.99
    advice = advise(profile)
    assert advice.best.text.startswith("Halving the time of a step")
    assert advice.best.factor == pytest.approx(12.2 / 6.2)
    assert any(other.text == "One more GPU." and round(other.factor, 2) == 1.5 for other in advice.others)


def test_an_empty_queue() -> None:
    profile = from_spans(run(gap_s=6.1), "a run")
    assert profile.no_jobs == pytest.approx(0.5, abs=0.02)
    advice = advise(profile)
    assert advice.best.text.startswith("Keep the queue full")
    assert advice.best.factor == pytest.approx(2.0, abs=0.1)
    assert "idle 50% for want of jobs" in advice.time


def test_slow_storage() -> None:
    profile = from_spans(run(write_s=12.2), "a run")
    assert profile.writing > 0.4
    advice = advise(profile)
    assert advice.best.text.startswith("Make writing faster")
    assert advice.best.factor == pytest.approx(2.0, abs=0.25)


def test_a_slow_gpu() -> None:
    video = VideoCosts(steps=12, costs=Costs(step_s=(1.0, 2.0, 1.0, 1.0)))
    advice = advise(Profile(source="", video=video, ranks=(RankTime(steps=0.98),) * 4))
    assert advice.best.text.startswith("Check the GPU of rank 1: its steps take up to 2.00 times as long")
    assert advice.best.factor == pytest.approx(4 / 3.5)


def test_a_rank_that_only_encodes() -> None:
    video = VideoCosts(steps=3, costs=Costs(step_s=(1.0,) * 8, encode_s=1.0))
    advice = advise(Profile(source="", video=video, ranks=(RankTime(encode=1.0), *(RankTime(steps=0.4),) * 7)))
    assert "more than 4 ranks wait for it" in advice.best.text
    assert advice.best.factor == pytest.approx(2.0)


RUN = {"through": "loop", "ranks": 1, "per_sample_mean_s": 1.2, "steps": 2, "busy_share": [0.9]}
RUN |= {"step_ms": 500.0, "encode_ms": 50.0, "decode_ms": 100.0}
EVENT = {"ph": "X", "pid": 0, "tid": "main", "ts": 1e15, "dur": 1e6, "name": "decode", "args": {"job": "a"}}


@pytest.mark.parametrize(
    "document",
    [
        *(
            {"runs": [RUN | {name: value}]}
            for name in RUN
            if name != "through"
            for value in (0, None, -1, "x", 10**400)
        ),
        *({"runs": runs} for runs in (7, [7], [{}], "x")),
        *({"traceEvents": [EVENT | {name: 10**400}]} for name in ("ts", "dur", "name", "args")),
        *({"traceEvents": events} for events in (7, [7], [{}], [EVENT | {"name": "steps 0-x"}])),
    ],
    ids=lambda document: str(document)[:60],
)
def test_a_recording_that_svdq_did_not_write(tmp_path: Path, document: object) -> None:
    path = tmp_path / "recording.json"
    path.write_text(json.dumps({"runs": [RUN]}))
    assert read_profile(path).busy == 0.9
    path.write_text(json.dumps(document))
    with contextlib.suppress(InputError):  # what is left may be enough
        advise(read_profile(path))


@pytest.mark.parametrize("pid", [-1, 5000, 2**63, None, "x"])
def test_a_trace_of_more_ranks_than_there_are(tmp_path: Path, pid: object) -> None:
    path = tmp_path / "recording.json"
    path.write_text(json.dumps({"traceEvents": [EVENT | {"pid": pid}, EVENT | {"name": "steps 0-1"}]}))
    with pytest.raises(InputError, match="not a recording"):
        read_profile(path)


def test_a_recording_that_is_nested_deeply(tmp_path: Path) -> None:
    (path := tmp_path / "recording.json").write_text("[" * 2000 + "]" * 2000)
    with pytest.raises(InputError, match="cannot be read"):
        read_profile(path)


def test_uneven_experts_are_named_with_what_a_rank_with_both_would_gain(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    run = {"through": "loop", "ranks": 7, "steps": 40, "segments": [15, 25], "step_ms": 50, "encode_ms": 0}
    run |= {"decode_ms": 0, "per_sample_mean_s": 0.3125, "busy_share": [0.8] * 3 + [1.0] * 4}
    path.write_text(json.dumps({"runs": [run]}))
    best = advise(read_profile(path)).best
    assert "the 15 steps of the first expert on 3 ranks and the 25 of the second on 4 are uneven" in best.text
    assert best.factor == pytest.approx(7 * 25 / (4 * 40))
    path.write_text(json.dumps({"runs": [run | {"segments": None}]}))
    assert "expert" not in advise(read_profile(path)).best.text
