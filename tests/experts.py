"""Ranks that hold one of two experts each against replicas that swap them: the table in docs/internals/capacity.md.

    python -m tests.experts        about ten seconds; computes, so it does not matter what else the machine does

The replicas are the strongest alternative where a GPU holds only one expert: each loads the first one, does the noisy
steps of all its videos and keeps their latents in the host's memory, loads the second one, once, and does the rest.
The pipeline's times are those of the plan that a worker follows, in a simulation of its ranks.
"""

import math
from collections.abc import Iterator

from svdq.pipeline.planning.binding import Segment, bind, bounds_of
from svdq.pipeline.planning.costs import CostPrior, Costs
from svdq.pipeline.planning.planner import Planner
from tests.pipeline.chain import Chain, Video

#: The experts of Wan 2.2 at 40 steps and shift 5.
SEGMENTS = (Segment(component="high", start=0, stop=15), Segment(component="low", start=15, stop=40))
STEPS = 40
STEP_S, ENCODE_S, DECODE_S = 5.0, 1.0, 5.0
WHOLE_S = STEPS * STEP_S + ENCODE_S + DECODE_S
SWAPS_S = (10, 30, 60)  # seconds in which a replica replaces one expert by the other
RANKS = (2, 4, 7)
VIDEOS = (1, 2, 7, 8, 50, 500)


def pipeline_s(ranks: int, num_videos: int, *, one_holds_both: bool = False) -> float:
    """Return the seconds that bound ranks take for videos that all wait, as planned."""
    prior = CostPrior(encode_steps=ENCODE_S / STEP_S, decode_steps=DECODE_S / STEP_S)
    bindings = [bind(SEGMENTS, [False] * ranks, prior)]
    if one_holds_both:
        rooms = [[rank == roomy for rank in range(ranks)] for roomy in range(ranks)]
        bindings = [held for room in rooms if None in (held := bind(SEGMENTS, room, prior))] or bindings
    costs = Costs(step_s=(STEP_S,) * ranks, encode_s=ENCODE_S, decode_s=DECODE_S)
    bounds = bounds_of(SEGMENTS, bindings[0], range(ranks), range(ranks))
    videos = [Video(costs=costs, num_steps=STEPS, bounds=bounds) for _ in range(num_videos)]
    return Chain(Planner(ranks), ranks).run(videos)


def replicas_s(ranks: int, num_videos: int, swap_s: float) -> float:
    """Return the seconds that as many replicas take, which swap experts once."""
    return math.ceil(num_videos / ranks) * WHOLE_S + swap_s


def rows() -> Iterator[str]:
    """Yield the lines of the table."""
    swaps = [f"replicas, swap {swap_s} s" for swap_s in SWAPS_S]
    head = ["GPUs", "videos", "bound pipeline (s)", "one rank with both (s)", *swaps]
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for ranks in RANKS:
        for num_videos in VIDEOS:
            others = [replicas_s(ranks, num_videos, swap_s) for swap_s in SWAPS_S]
            bound_s = pipeline_s(ranks, num_videos)
            ours = [f"{bound_s:.0f}", f"{pipeline_s(ranks, num_videos, one_holds_both=True):.0f}"]
            theirs = [f"{other:.0f} ({bound_s / other:.2f})" for other in others]
            yield f"| {' | '.join([str(ranks), str(num_videos), *ours, *theirs])} |"


if __name__ == "__main__":
    print(*rows(), sep="\n")
