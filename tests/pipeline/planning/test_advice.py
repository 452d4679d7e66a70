"""Advice on runs whose trouble is known: what ranks waited for, what would help, and how much."""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from svdq.pipeline.errors import InputError
from svdq.pipeline.partition import Costs, Partitioner
from svdq.pipeline.planning.advice import advise
from svdq.pipeline.planning.capacity import VideoCosts
from svdq.pipeline.planning.occupancy import Cause, RankTime, occupancy
from svdq.pipeline.planning.recordings import Profile, from_spans, read_profile
from svdq.pipeline.trace import Span


def span(name: str, job: str, start_s: float, end_s: float) -> Span:
    return Span(name=name, job_id=job, start_s=start_s, end_s=end_s, thread="MainThread")


@dataclass(kw_only=True)
class Run:
    """A pipeline that is played through, with one thing wrong with it."""

    step_s: Sequence[float] = (1.0,) * 4
    steps: int = 12
    encode_s: float = 0.1
    decode_s: float = 0.1
    num_videos: int = 60
    #: Seconds between two jobs.
    job_every_s: float = 0.0
    transfer_s: float = 0.0
    #: Seconds that the disk takes for a video.
    write_s: float = 0.0
    #: What ranks are believed to cost when steps are shared out; None: what they do.
    shared_out_by: Sequence[float] | None = None

    def spans(self) -> list[list[Span]]:
        ranks = len(self.step_s)
        costs = Costs(step_s=tuple(self.shared_out_by or self.step_s), encode_s=self.encode_s, decode_s=self.decode_s)
        partitioner = Partitioner(ranks)
        spans: list[list[Span]] = [[] for _ in range(ranks)]
        begun_s: list[list[float]] = [[] for _ in range(ranks)]
        free_s = [100.0] * ranks
        written_s: list[float] = []
        for number in range(self.num_videos):
            job = f"job-{number}"
            boundaries = partitioner.split(0, self.steps, costs)
            now_s = 100.0 + number * self.job_every_s
            for rank in range(ranks):
                now_s = max(now_s, free_s[rank])
                begun_s[rank].append(now_s)
                if rank == 0:
                    spans[0].append(span("encode", job, now_s, now_s + self.encode_s))
                    now_s += self.encode_s
                first, last = boundaries[rank], boundaries[rank + 1]
                if last > first:
                    end_s = now_s + (last - first) * self.step_s[rank]
                    spans[rank].append(span(f"steps {first}-{last - 1}", job, now_s, end_s))
                    now_s = end_s
                if rank < ranks - 1:
                    # Two videos have room between ranks: a third stays until one of them is begun.
                    free_s[rank] = now_s if number < 2 else max(now_s, self._begun(begun_s, rank + 1, number - 2))
                    now_s += self.transfer_s
                    continue
                spans[rank].append(span("decode", job, now_s, now_s + self.decode_s))
                now_s += self.decode_s
                start_s = max([now_s, *written_s[-1:]])
                written_s.append(start_s + self.write_s)
                if self.write_s:
                    spans[rank].append(span("write", job, start_s, written_s[-1]))
                free_s[rank] = now_s if number < 2 else max(now_s, written_s[number - 2])
        return spans

    def _begun(self, begun_s: list[list[float]], rank: int, number: int) -> float:
        return begun_s[rank][number]

    def profile(self) -> Profile:
        return from_spans(self.spans(), "a run")


def test_costs_are_read_back() -> None:
    profile = Run(decode_s=1.5, step_s=(1.0, 1.0, 2.0, 1.0), transfer_s=0.05).profile()
    assert profile.video.steps == 12
    assert profile.video.costs.step_s == pytest.approx((1.0, 1.0, 2.0, 1.0))
    assert (profile.video.costs.encode_s, profile.video.costs.decode_s) == pytest.approx((0.1, 1.5))
    assert profile.pace_s == pytest.approx(profile.video.way(4).pace_s, rel=0.03)
    assert profile.videos == 60


@pytest.mark.parametrize(
    "run", [Run(), Run(job_every_s=9.0), Run(decode_s=8.0), Run(write_s=6.0), Run(steps=1, num_videos=3)]
)
def test_shares_of_the_time_add_up(run: Run) -> None:
    for rank in occupancy(run.spans()):
        assert rank.busy + rank.warm_up + sum(rank.waits.values()) == pytest.approx(1.0)
        assert all(share > 0 for share in rank.waits.values())


def test_a_run_that_is_busy_needs_cheaper_steps_or_gpus() -> None:
    advice = advise(Run(num_videos=300).profile())
    assert advice.best.text.startswith("Halving the time of a step")
    assert advice.best.factor == pytest.approx(1.97, abs=0.02)
    assert advice.idle == ("No rank idles more than 5% of the time.",)
    assert any(other.text == "One more GPU." and round(other.factor, 2) == 1.25 for other in advice.others)


def test_an_empty_queue() -> None:
    run = Run(job_every_s=6.1)  # twice the pace
    profile = run.profile()
    assert profile.ranks[0].waited(Cause.JOBS) == pytest.approx(0.48, abs=0.03)
    assert max(rank.waited(Cause.BEFORE, Cause.AFTER, Cause.TRANSFER) for rank in profile.ranks[1:]) < 0.6
    advice = advise(profile)
    assert advice.best.text.startswith("Keep the queue full")
    assert advice.best.factor == pytest.approx(2.0, abs=0.15)


def test_a_rank_that_only_decodes() -> None:
    run = Run(decode_s=9.0)
    advice = advise(run.profile())
    assert advice.best.text.startswith("Use 2 groups of 2 in place of one of 4: the last rank does nothing but decode")
    assert "--groups 2 --ranks 2" in advice.best.text
    assert advice.best.factor == pytest.approx(9.0 / (21.1 / 4), rel=0.05)
    assert advice.idle[0].startswith("Ranks 0, 1, 2 idle 5")
    assert advice.idle[0].endswith("because the last rank decodes all the time.")


def test_slow_storage() -> None:
    run = Run(write_s=6.0)  # twice the pace
    profile = run.profile()
    assert profile.ranks[-1].waited(Cause.WRITING) > 0.4
    advice = advise(profile)
    assert advice.best.text.startswith("Make writing faster")
    assert advice.best.factor == pytest.approx(2.0, abs=0.25)


def test_a_slow_gpu_and_the_ranks_that_wait_for_it() -> None:
    advice = advise(Run(step_s=(1.0, 2.0, 1.0, 1.0)).profile())
    assert advice.best.text.startswith("Check the GPU of rank 1: its steps take up to 2.00 times as long")
    assert advice.best.factor == pytest.approx(4 / 3.5, abs=0.02)
    # While shares are still equal, what follows waits for it, and what comes before has no room.
    ranks = occupancy(Run(step_s=(1.0, 2.0, 1.0, 1.0), shared_out_by=(1.0,) * 4).spans())
    assert ranks[0].waited(Cause.AFTER) > 0.3
    assert ranks[2].waited(Cause.BEFORE) > 0.3
    assert ranks[3].waited(Cause.BEFORE) > 0.3


def test_a_short_run() -> None:
    advice = advise(Run(num_videos=4).profile())
    assert advice.best.text.startswith("Make longer runs")


def test_slow_links() -> None:
    ranks = occupancy(Run(transfer_s=2.0, num_videos=40, job_every_s=12.2).spans())
    # Every video comes alone, so that rank 1 waits for its hand-over, the others for whoever has it.
    assert ranks[1].waited(Cause.TRANSFER) == pytest.approx(2.0 / 12.2, abs=0.02)
    video = VideoCosts(steps=12, costs=Costs(step_s=(1.0,) * 4), transfer_s=6.0)
    advice = advise(Profile(source="", video=video, pace_s=6.0, ranks=(RankTime(steps=0.5, waits={}),) * 4))
    assert advice.best.text.startswith("Use a faster link")
    assert advice.best.factor == pytest.approx(2.0)


def test_warming_up_is_none_of_the_run() -> None:
    spans = Run().spans()
    before = occupancy(spans)
    warmed = [[span("warm-up", "", 20.0, 90.0), *of] for of in spans]
    assert occupancy(warmed) == before


RUN = {"through": "loop", "ranks": 1, "per_sample_mean_s": 1.2, "efficiency": 0.9, "steps": 2, "steps_per_rank": [2.0]}
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
    assert read_profile(path).pace_s == 1.2
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
