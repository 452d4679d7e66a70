"""Boomerangs, loops and interpolated frames: numbers of frames, their times, and what is between them."""

import errno
import itertools
from pathlib import Path

import numpy as np
import pytest

from svdq.pipeline.errors import SampleError
from svdq.pipeline.media.video import change_motion

ROUNDING = 2  # how far given frames may be from themselves after the conversions of colors


def video(num_frames: int, width: int = 128, height: int = 64) -> np.ndarray:
    """A pattern that moves to the right by 4 pixels a frame."""
    x = np.arange(width)[None, None, :] - 4 * np.arange(num_frames)[:, None, None]
    y = np.arange(height)[None, :, None]
    planes = [128 + 100 * np.sin(x / 9 + 0 * y), 128 + 90 * np.sin(y / 7 + x / 13), 120 + 0 * x + 2 * y]
    return np.stack(planes, axis=-1).astype(np.uint8)


def distance(one: np.ndarray, other: np.ndarray) -> int:
    return int(np.abs(one.astype(int) - other.astype(int)).max())


@pytest.mark.parametrize(
    ("num_frames", "order"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2, 1]), (5, [0, 1, 2, 3, 4, 3, 2, 1])]
)
def test_a_boomerang_repeats_neither_end(tmp_path: Path, num_frames: int, order: list[int]) -> None:
    frames = video(num_frames)
    shown = change_motion(frames, 7, tmp_path, boomerang=True, interpolate=None)
    assert np.array_equal(shown, frames[order])


def test_a_loop_leaves_out_the_last_frame_and_interpolates_to_the_first(tmp_path: Path) -> None:
    frames = video(5)
    frames[4] = frames[0]
    shown = change_motion(frames, 7, tmp_path, boomerang=False, interpolate=None, loop=True)
    assert np.array_equal(shown, frames[:4])
    shown = change_motion(frames, 7, tmp_path, boomerang=False, interpolate=14, loop=True)
    assert len(shown) == 8
    assert max(distance(shown[2 * number], frames[number]) for number in range(4)) <= ROUNDING
    assert distance(shown[7], frames[3]) > ROUNDING, "the last one leads back to the first"


def test_nothing_asked_for_changes_nothing(tmp_path: Path) -> None:
    frames = video(3)
    assert change_motion(frames, 7, tmp_path, boomerang=False, interpolate=None) is frames
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("num_frames", "fps", "to_fps"),
    [(25, 7, 24), (14, 7, 30), (1, 7, 24), (2, 7, 8), (3, 24, 25), (9, 16, 32), (4, 7, 14), (130, 119, 120)],
)
@pytest.mark.parametrize("boomerang", [False, True])
def test_interpolation_keeps_duration_and_given_frames(
    tmp_path: Path, num_frames: int, fps: int, to_fps: int, boomerang: bool
) -> None:
    frames = video(num_frames, width=64)
    shown = change_motion(frames, fps, tmp_path, boomerang=boomerang, interpolate=to_fps)
    given = change_motion(frames, fps, tmp_path, boomerang=boomerang, interpolate=None)
    assert shown.shape == (round(len(given) * to_fps / fps), 64, 64, 3)
    assert abs(len(shown) / to_fps - len(given) / fps) <= 0.5 / to_fps
    assert not list(tmp_path.iterdir())
    both = [(n, n * fps // to_fps) for n in range(len(shown)) if n * fps % to_fps == 0]
    assert len(both) >= len(given) // to_fps
    for number, original in both:
        assert distance(shown[number], given[original]) <= ROUNDING


@pytest.mark.parametrize(("width", "height"), [(16, 16), (16, 64), (64, 16), (24, 40)])
def test_small_pictures_are_interpolated(tmp_path: Path, width: int, height: int) -> None:
    """ffmpeg's minterpolate refuses sides below 32 pixels, and Wan's may have 16."""
    frames = video(3, width=width, height=height)
    shown = change_motion(frames, 8, tmp_path, boomerang=False, interpolate=16)
    assert shown.shape == (6, height, width, 3)
    assert distance(shown[::2], frames) <= ROUNDING


def test_frames_between_are_between(tmp_path: Path) -> None:
    """The pattern moves on by half as much; neither frame is repeated, and they are not blended."""
    fine = video(17)
    coarse = fine[::2]
    shown = change_motion(coarse, 10, tmp_path, boomerang=False, interpolate=20)
    inside = np.s_[8:-8, 24:-24]
    for number in range(1, 16, 2):
        error = np.abs(shown[number].astype(int) - fine[number])[inside].mean()
        repeated = np.abs(shown[number - 1].astype(int) - fine[number])[inside].mean()
        blended = np.abs((coarse[number // 2].astype(int) + coarse[number // 2 + 1]) / 2 - fine[number])[inside].mean()
        assert error < 0.5 * repeated
        assert error < blended + 1


def test_a_loop_goes_on_without_a_halt(tmp_path: Path) -> None:
    """The last interpolated frames lead back to the first one."""
    shown = change_motion(video(6), 7, tmp_path, boomerang=True, interpolate=21).astype(int)
    steps = [np.abs(one - other).mean() for one, other in itertools.pairwise([*shown, shown[0]])]
    assert min(steps) > 0.3 * np.median(steps)


def test_a_full_disk_is_an_os_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "frames.rgb").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        change_motion(video(3), 7, tmp_path, boomerang=False, interpolate=24)
    assert caught.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())


def test_no_ffmpeg_fails_the_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / "none"))
    with pytest.raises(SampleError, match="ffmpeg cannot be started"):
        change_motion(video(3), 7, tmp_path, boomerang=False, interpolate=24)
