"""Converts decoded videos to frames."""

import torch
from torch import Tensor


def to_uint8(video: Tensor) -> Tensor:
    """Convert a decoded video (3, F, H, W), float32, -1 to 1, to frames (F, H, W, 3) on its device, in place.

    These are the operations of VideoProcessor.postprocess_video for PIL images, each rounded to float32 as there, on
    the video's device: on a CPU they would take as long as several steps of a GPU.
    """
    video = video.mul_(0.5).add_(0.5).clamp_(0, 1).mul_(255).round_()
    return video.to(torch.uint8).permute(1, 2, 3, 0).contiguous()
