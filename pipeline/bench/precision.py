"""What precision and size cost on one device, and what follows for a second GPU.

Measures step, encode and decode for every size in every type, then compares what each change brings with what the
capacity model says of a second GPU. Knows no terminal; `conclusions` is pure and says only what the figures hold.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from svdq.pipeline.bench.ends import folder_of
from svdq.pipeline.bench.ends_parts import NAMES, PartFigures, measure_parts
from svdq.pipeline.bench.measure import break_even
from svdq.pipeline.bench.unet import relative_difference
from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.partition import Costs
from svdq.pipeline.planning.capacity import Limit, VideoCosts, Way, limit

#: Gains within this of each other count as equal: measurements are no better.
_EQUAL_WITHIN = 0.03
#: Names of types as they are given.
SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True, kw_only=True)
class HandOver:
    """What handing a video over from one GPU to the next costs: X and H of the capacity model, in seconds."""

    #: Until it has arrived, and what each rank spends on it. As ranks on two cores measured it over loopback, for
    #: latents of 323 kB.
    transfer_s: float = 0.004
    overhead_s: float = 0.002


@dataclass(frozen=True, kw_only=True)
class Case:
    """What was measured of one size in one type."""

    width: int
    height: int
    dtype: str
    #: Seconds; None where it could not be measured.
    step_s: float | None
    encode_s: float | None
    decode_s: float | None
    #: Largest difference of what the UNet predicts to float32's, over float32's largest value; None where not known.
    difference: float | None = None

    @property
    def size(self) -> str:
        """The size as it is written."""
        return f"{self.width}x{self.height}"

    @property
    def pixels(self) -> int:
        """How large it is."""
        return self.width * self.height

    @classmethod
    def of(cls, figures: Sequence[PartFigures]) -> Self:
        """Take the case from the figures of its parts; of several decodes the first that could be measured counts."""
        done = {one.part: one for one in reversed(figures) if not one.failure}
        seconds = {part: done[part].seconds if part in done else None for part in NAMES.values()}
        return cls(
            width=figures[0].width,
            height=figures[0].height,
            dtype=SHORT[figures[0].dtype],
            step_s=seconds["step"],
            encode_s=seconds["encode"],
            decode_s=seconds["decode"],
            difference=done["step"].difference if "step" in done else None,
        )


def measure_precision(
    model: str | None,
    videos: Sequence[VideoParameters],
    *,
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    repeats: int,
) -> Iterator[PartFigures]:
    """Measure each part of the model with each size in each type.

    A decode is of all frames at a time, and where memory does not suffice of half as many, as in a worker.

    Args:
        model: a folder or hub id; None for the published sizes with random weights.
        videos: whose shapes are measured.
        device: where to compute.
        dtypes: of weights and activations; results are compared with float32's where that comes first.
        repeats: how often each is measured.

    Raises:
        InputError: there is no such model.
    """
    exact: dict[tuple[str, int, int], Tensor] = {}
    with folder_of(model) as folder:
        for dtype in dtypes:
            for figures, result in measure_parts(
                folder, list(NAMES), videos, device=device, dtype=dtype, chunk_sizes=None, repeats=repeats
            ):
                key = (figures.part, figures.width, figures.height)
                if result is not None and dtype == torch.float32:
                    exact[key] = result
                if result is not None and key in exact:
                    yield replace(figures, difference=relative_difference(result, exact[key]))
                else:
                    yield figures


def cases_of(figures: Sequence[PartFigures]) -> list[Case]:
    """Put the figures of parts together to one case for each size and type, in the order in which they came."""
    groups: dict[tuple[int, int, str], list[PartFigures]] = {}
    for one in figures:
        groups.setdefault((one.width, one.height, one.dtype), []).append(one)
    return [Case.of(group) for group in groups.values()]


def conclusions(cases: Sequence[Case], steps: int, hand_over: HandOver) -> list[str]:
    """Say what follows from the figures.

    Args:
        cases: what was measured.
        steps: T of a video.
        hand_over: what a second GPU costs on the way.
    """
    known = {(case.size, case.dtype): video for case in cases if (video := _video(case, steps, hand_over))}
    sentences = []
    for size in dict.fromkeys(case.size for case in cases):
        here = [case for case in cases if case.size == size and (size, case.dtype) in known]
        for case in cases:
            if case.size == size and case not in here:
                sentences.append(_unknown(case))
        if not here:
            continue
        best = min(here, key=lambda case: known[size, case.dtype].way(1).pace_s)
        sentences += (
            _precision_sentence(size, case.dtype, best.dtype, known) for case in here if case.dtype != best.dtype
        )
        sentences.append(_second_gpu_sentence(size, best.dtype, known[size, best.dtype]))
        smaller = [case for case in cases if case.pixels < best.pixels and (case.size, best.dtype) in known]
        if smaller:
            next_size = max(smaller, key=lambda case: case.pixels).size
            sentences.append(_size_sentence(size, next_size, best.dtype, known))
    return [*sentences, *_difference_sentences(cases)]


def _video(case: Case, steps: int, hand_over: HandOver) -> VideoCosts | None:
    if case.step_s is None or case.encode_s is None or case.decode_s is None:
        return None
    costs = Costs(step_s=(case.step_s,), encode_s=case.encode_s, decode_s=case.decode_s)
    return VideoCosts(steps=steps, costs=costs, transfer_s=hand_over.transfer_s, overhead_s=hand_over.overhead_s)


def _gain(before: Way, after: Way) -> float:
    return before.pace_s / after.pace_s


def _second_gain(video: VideoCosts) -> float:
    return _gain(video.way(1), video.way(2))


def _unknown(case: Case) -> str:
    parts = {"step": case.step_s, "encode": case.encode_s, "decode": case.decode_s}
    missing = " and no ".join(name for name, seconds in parts.items() if seconds is None)
    return (
        f"What a second GPU brings at {case.size} in {case.dtype} is not known, since no {missing} could be measured."
    )


def _precision_sentence(size: str, dtype: str, best: str, known: dict[tuple[str, str], VideoCosts]) -> str:
    slow, fast = known[size, dtype], known[size, best]
    gain, second = _gain(slow.way(1), fast.way(1)), _second_gain(slow)
    step = slow.costs.step_s[0] / fast.costs.step_s[0]
    if gain < 1 + _EQUAL_WITHIN:
        return f"At {size} {best} and {dtype} make about as many videos an hour."
    return (
        f"At {size} {best} makes {gain:.2f} times as many videos an hour as {dtype} (a step is {step:.2f} times as "
        f"fast): {_against(gain, second)} a second GPU brings in {dtype} ({second:.2f} times)."
    )


def _second_gpu_sentence(size: str, dtype: str, video: VideoCosts) -> str:
    one, two = video.way(1), video.way(2)
    gain = _gain(one, two)
    since = break_even(two.first_s, two.pace_s, one.first_s, one.pace_s)
    where = f"At {size} in {dtype}, the fastest type measured,"
    if since is None or gain < 1 + _EQUAL_WITHIN:
        return f"{where} a second GPU does not pay: it makes {gain:.2f} times as many videos an hour."
    text = f"{where} a second GPU pays from {since:.2f} videos on: it makes {gain:.2f} times as many an hour"
    why = {
        Limit.DECODE: "the decode alone fills it",
        Limit.ENCODE: "the encode alone fills one of them",
        Limit.TRANSFER: "the link between them is always busy",
    }.get(limit(video, 2))
    return f"{text}, and no more since {why}." if why else f"{text}."


def _size_sentence(size: str, smaller: str, dtype: str, known: dict[tuple[str, str], VideoCosts]) -> str:
    large = known[size, dtype]
    gain, second = _gain(large.way(1), known[smaller, dtype].way(1)), _second_gain(large)
    if gain < 1 + _EQUAL_WITHIN:
        return f"Going down from {size} to {smaller} makes no more videos an hour in {dtype}."
    return (
        f"Going down from {size} to {smaller} makes {gain:.2f} times as many videos an hour in {dtype}, smaller ones: "
        f"{_against(gain, second)} a second GPU brings ({second:.2f} times)."
    )


def _against(gain: float, second: float) -> str:
    if abs(gain / second - 1) < _EQUAL_WITHIN:
        return "about what"
    return "more than" if gain > second else "less than"


def _difference_sentences(cases: Sequence[Case]) -> Iterator[str]:
    for dtype in dict.fromkeys(case.dtype for case in cases if case.dtype != "fp32"):
        of = [case for case in cases if case.dtype == dtype and case.difference is not None]
        if of:
            worst = max(of, key=lambda case: case.difference or 0.0)
            yield (
                f"What the UNet predicts in {dtype} differs from fp32 by up to {worst.difference:.1e} of its largest "
                f"value (at {worst.size})."
            )
