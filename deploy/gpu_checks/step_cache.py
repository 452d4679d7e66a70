"""Section that skips steps of Wan: seconds a video, and its difference to the one whose steps are all computed."""

from functools import partial
from typing import Any

import numpy as np

from gpu_checks.check import Check, frames_of
from gpu_checks.parts import wan_shape_on_cpu, wide_wan
from gpu_checks.wan import LAYERS

THRESHOLDS = (0.0, 0.03, 0.06, 0.12)


def step_cache(check: Check) -> None:
    """Render a video of Wan 2.2 I2V-A14B at its full width, with few layers and random weights, at each threshold."""
    folder = wide_wan(check, LAYERS[0])
    video = ["--prompt", "A wave breaks.", "--steps", 40, *([] if check.on_gpu else wan_shape_on_cpu(check))]
    whole: dict[str, Any] | None = None
    for threshold in THRESHOLDS:
        what = f"Wan with --step-cache {threshold:g}: seconds of its steps, over those of 0, PSNR to 0 in dB"
        options = [*video, "--step-cache", threshold]
        made = check.attempt(what, partial(_render, check, f"step-cache-{threshold:g}", options, str(folder)))
        if made is None:
            continue
        whole = whole or made
        seconds, of_whole = made["seconds"]["denoise"], whole["seconds"]["denoise"]
        check.report.judge(what, f"{seconds:.2f}, {seconds / of_whole:.3f}, {_psnr(whole, made):.1f}", "", None)


def _render(check: Check, name: str, options: list[object], model: str) -> dict[str, Any]:
    [made] = check.render(name, [check.options.photo], options, "--ranks", 1, model=model).values()
    return made


def _psnr(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the peak signal-to-noise ratio of all frames, 10 log10(255^2 / MSE); infinite for equal ones."""
    error = float(np.mean((frames_of(one).astype(float) - frames_of(other)) ** 2))
    return 10 * float(np.log10(255**2 / error)) if error else float("inf")
