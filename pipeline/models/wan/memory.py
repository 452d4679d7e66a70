"""Estimates the memory of Wan from the size of a video. Does not import torch."""

from svdq.pipeline.models.family import Facts
from svdq.pipeline.models.memory import Activity, Shape


def memory(activity: Activity, shape: Shape, dtype: str, facts: Facts, *, has_decoder: bool) -> int:
    """Estimate the peak bytes of an activity, besides the weights; see `family.EstimateMemory`."""
    return 0
