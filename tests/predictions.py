"""Predictions of the capacity law against `svdq bench`: prints the rows of the table in docs/internals/capacity.md.

    python -m tests.predictions            all rows, about 12 minutes, on a machine that does nothing else
    python -m tests.predictions --quick    a few rows, about 2 minutes

Nothing is fitted: predictions take the configured T, t, E, D and K. Two things are compared: the pace in steady
state, and the time of the whole run of N videos, from the first admission to the last file.
"""

import sys

from svdq.pipeline.planning.capacity import VideoCosts
from svdq.pipeline.planning.costs import Costs
from svdq.worker.bench.measure import BenchOptions, run_bench

STEP_MS = 50.0
#: (encode ms, decode ms): even, uneven, the proportions of an H100 (0.18 and 4.4 steps).
ENDS = ((0.0, 0.0), (150.0, 100.0), (10.0, 220.0))
RANKS = range(1, 8)
STEPS = (7, 25, 50)


def row(ranks: int, steps: int, encode_ms: float, decode_ms: float) -> tuple[float, float]:
    costs = Costs(step_s=(STEP_MS / 1000,), encode_s=encode_ms / 1000, decode_s=decode_ms / 1000)
    video = VideoCosts(steps=steps, costs=costs)
    pace_s = video.pace_s(ranks)
    warmup = 2 * ranks if ranks > 1 else 1
    # At least four rounds of the ranks in the steady part, whole rounds (shares take turns over K), and 6 s of it.
    rounds = max(4, round(6 / pace_s / ranks)) if ranks > 1 else 6
    samples = 2 * warmup + rounds * ranks + 1
    report = run_bench(
        BenchOptions(
            model="simulated", ranks=ranks, steps=steps, step_ms=STEP_MS, encode_ms=encode_ms, decode_ms=decode_ms,
            samples=samples, warmup_samples=warmup, size="576x320", device="cpu", through="loop",
        )
    )  # fmt: skip
    run = report.runs[0]
    started_s = min(span.start_s for log in report.logs for span in log.spans if span.kind == "encode")
    whole_s = max(time_s for log in report.logs for time_s in log.finished_s) - started_s
    predicted_s = video.time_s(ranks, samples)
    pace_off, run_off = pace_s / run.per_sample_mean_s - 1, predicted_s / whole_s - 1
    print(
        f"| {ranks} | {steps} | {encode_ms:g} | {decode_ms:g} | {samples} "
        f"| {pace_s * 1000:.1f} | {run.per_sample_mean_s * 1000:.1f} | {pace_off:+.1%} "
        f"| {predicted_s:.2f} | {whole_s:.2f} | {run_off:+.1%} |",
        flush=True,
    )
    return abs(pace_off), abs(run_off)


def main() -> None:
    quick = "--quick" in sys.argv
    print(
        "| K | T | E (ms) | D (ms) | videos | pace: prediction (ms) | measured (ms) | difference "
        "| run: prediction (s) | measured (s) | difference |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    off = [
        row(ranks, steps, encode_ms, decode_ms)
        for steps in STEPS
        for encode_ms, decode_ms in ENDS
        for ranks in RANKS
        if encode_ms or ranks in (4, 7)
        if not quick or (encode_ms and (steps, ranks) in ((25, 4), (25, 7), (7, 7)))
    ]
    pace_off, run_off = map(max, zip(*off, strict=True))
    print(f"\nlargest difference of the pace {pace_off:.1%}, of the run {run_off:.1%}")


if __name__ == "__main__":
    main()
