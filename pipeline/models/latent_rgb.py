"""Latents to small pictures by the linear maps of ComfyUI's comfy/latent_formats.py, without a decoder."""

import torch
from torch import Tensor

MAX_FRAMES = 8  # frames of a picture, at most: evenly chosen

#: By the number of channels: three factors for each (red, green, blue), then the three biases.
_FACTORS = {
    4: """.3512 .2297 .3227  .3250 .4974 .2350  -.2829 .1762 .2721  -.2120 -.2616 -.7177  0 0 0""",
    16: """
        -.1299 -.1692 .2932  .0671 .0406 .0442  .3568 .2548 .1747  .0372 .2344 .1420  .0313 .0189 -.0328
        .0296 -.0956 -.0665  -.3477 -.4059 -.2925  .0166 .1902 .1975  -.0412 .0267 -.1364  -.1293 .0740 .1636
        .0680 .3019 .1128  .0032 .0581 .0639  -.1251 .0927 .1699  .0060 -.0633 .0005  .3477 .2275 .2950
        .1984 .0913 .1861  -.1835 -.0868 -.3360
    """,
    48: """
        .0119 .0103 .0046  -.1062 -.0504 .0165  .0140 .0409 .0491  -.0813 -.0677 .0607  .0656 .0851 .0808
        .0264 .0463 .0912  .0295 .0326 .0590  -.0244 -.0270 .0025  .0443 -.0102 .0288  -.0465 -.0090 -.0205
        .0359 .0236 .0082  -.0776 .0854 .1048  .0564 .0264 .0561  .0006 .0594 .0418  -.0319 -.0542 -.0637
        -.0268 .0024 .0260  .0539 .0265 .0358  -.0359 -.0312 -.0287  -.0285 -.1032 -.1237  .1041 .0537 .0622
        -.0086 -.0374 -.0051  .0390 .0670 .2863  .0069 .0144 .0082  .0006 -.0167 .0079  .0313 -.0574 -.0232
        -.1454 -.0902 -.0481  .0714 .0827 .0447  -.0304 -.0574 -.0196  .0401 .0384 .0204  -.0758 -.0297 -.0014
        .0568 .1307 .1372  -.0055 -.0310 -.0380  .0239 -.0305 .0325  -.0663 -.0673 -.0140  -.0416 -.0047 -.0023
        .0166 .0112 -.0093  -.0211 .0011 .0331  .1833 .1466 .2250  -.0368 .0370 .0295  -.3441 -.3543 -.2008
        -.0479 -.0489 -.0420  -.0660 -.0153 .0800  -.0101 .0068 .0156  -.0690 -.0452 -.0927  -.0145 .0041 .0015
        .0421 .0451 .0373  .0504 -.0483 -.0356  -.0837 .0168 .0055  .0317 -.0878 -.1388
    """,
}


def some_frames(video: Tensor) -> Tensor:
    """Return at most `MAX_FRAMES` evenly chosen ones of (F, ...)."""
    num_frames = len(video)
    count = min(num_frames, MAX_FRAMES)
    return video[[round(index * (num_frames - 1) / max(1, count - 1)) for index in range(count)]]


def rgb_of_latents(latents: Tensor) -> Tensor | None:
    """Convert latents (F, C, h, w), as a model denoises them, to (F, h, w, 3), uint8; None for unknown ones."""
    text = _FACTORS.get(latents.shape[1])
    if text is None:
        return None
    table = torch.tensor([float(number) for number in text.split()], device=latents.device).view(-1, 3)
    rgb = torch.einsum("fchw,cr->fhwr", latents.float(), table[:-1]) + table[-1]
    return to_bytes(rgb)


def to_bytes(rgb: Tensor) -> Tensor:
    """Convert values from -1 to 1 to uint8."""
    return rgb.add(1).mul(255 / 2).clamp(0, 255).to(torch.uint8)
