"""Changes how the frames of a video move: forward and back, and with interpolated frames between them."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from svdq.pipeline.media.pipe import run_ffmpeg

#: Frames after the end that minterpolate needs for the last frames of a video.
NUM_AHEAD = 4

#: minterpolate follows the motion of blocks; there are no cuts to detect. It refuses sides below 32 pixels, which are
#: padded. Full range keeps the colors of given frames within 2 of 255.
_FILTERS = (
    "scale=out_color_matrix=bt709:out_range=pc:flags=lanczos+accurate_rnd+full_chroma_int",
    "format=yuv444p",
    r"pad=max(iw\,32):max(ih\,32)",
    "minterpolate=fps={fps}:mi_mode=mci:scd=none",
    "crop={width}:{height}:0:0",
    "scale=in_color_matrix=bt709:in_range=pc:flags=lanczos+accurate_rnd+full_chroma_int",
    "format=rgb24",
)


def change_motion(
    frames: NDArray[np.uint8], fps: int, folder: Path, *, boomerang: bool, interpolate: int | None
) -> NDArray[np.uint8]:
    """Return the frames of a video as they are to be shown.

    The result can be many times as large as the video, so it is in a file of `folder` and not in memory.

    Frames are (F, H, W, 3), uint8, RGB. A boomerang shows them forward and back; first and last are not repeated, so
    that a loop does not halt. `interpolate` adds frames up to this rate, above `fps`; None adds none.

    Raises:
        SampleError: ffmpeg refuses the frames, or cannot be started.
        OSError: a condition such as a full disk; the same call may succeed later.
    """
    last = len(frames) - 1
    order = [*range(len(frames)), *range(last - 1, 0, -1)] if boomerang else list(range(len(frames)))
    if interpolate is None:
        return frames[order] if boomerang else frames
    # A loop goes on with its first frames; otherwise the last frame stays.
    ahead = [order[index % len(order)] if boomerang else last for index in range(NUM_AHEAD)]
    num_frames = (2 * len(order) * interpolate + fps) // (2 * fps)  # of the same duration, rounded
    path = folder / "frames.rgb"
    _, height, width, _ = frames.shape
    filters = ",".join(_FILTERS).format(fps=interpolate, width=width, height=height)
    try:
        run_ffmpeg(
            frames[order + ahead], fps, ["-vf", filters, "-frames:v", str(num_frames), "-f", "rawvideo", f"file:{path}"]
        )
        return np.memmap(path, np.uint8, "r", shape=(num_frames, *frames.shape[1:]))
    finally:
        path.unlink(missing_ok=True)
