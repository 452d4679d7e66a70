"""Sound as PCM: as long as its frames, joined without drift, in an mp4 and as a WAV file."""

from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import av
import numpy as np
import pytest

from svdq.pipeline.media.mp4 import ChainSoFar
from svdq.pipeline.media.sound import Sound
from svdq.pipeline.media.video import write_video

RATE = 48000


def tone(seconds: float, hertz: float = 440.0) -> Sound:
    times = np.arange(round(seconds * RATE)) / RATE
    return Sound.of(np.stack([0.5 * np.sin(2 * np.pi * hertz * times)] * 2).astype(np.float32), RATE)


def test_a_wav_file_is_read_as_it_was_and_anything_else_refused():
    sound = Sound.of(np.array([[0, 0.5, -2], [1, -1, 2]], np.float32), RATE)
    assert sound.pcm.tolist() == [[0, 32767], [16384, -32767], [-32767, 32767]]
    again = Sound.parse(sound.wav)
    assert np.array_equal(again.pcm, sound.pcm)
    assert again.rate == RATE
    for data in (b"", b"RIFF", sound.wav[4:]):
        with pytest.raises(ValueError, match="no sound that svdq has written"):
            Sound.parse(data)


def test_what_is_missing_is_silent():
    sound = tone(0.5).lasting(24, 24)
    assert len(sound.pcm) == RATE
    assert not sound.pcm[RATE // 2 :].any()


def shown_times(path: Path) -> tuple[list[Fraction], Fraction, Fraction]:
    """Return when a player shows each frame of an mp4, and when its first and its last sample are heard."""
    with av.open(str(path)) as container:
        video, audio = container.streams
        assert video.average_rate == video.base_rate
        frames = [frame.pts * frame.time_base for frame in container.decode(video)]
        heard = audio.start_time * audio.time_base
        return frames, heard, heard + audio.duration * audio.time_base


@pytest.mark.parametrize("fps", [24, *(pytest.param(fps, marks=pytest.mark.slow) for fps in (16, 25, 30, 48))])
def test_picture_and_sound_of_each_link_begin_together_and_last_as_long(tmp_path: Path, fps: int) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (9, 64, 64, 3), dtype=np.uint8)
    own, num_frames, chain = tone(9 / fps), 9, None
    whole = own.lasting(num_frames, fps)
    for link in range(1, 9):
        path = tmp_path / f"{link}.mp4"
        if chain is not None:  # the first frame of a link is the last one of the link before
            num_frames += 8
            whole = own.after(whole, chain.num_frames, fps).lasting(num_frames, fps)
        write_video(frames[min(link - 1, 1) :], path, "mp4", fps, "", sound=whole, chain=chain)
        chain = ChainSoFar(path=path, num_frames=num_frames)
        shown, heard, ends = shown_times(path)
        assert (shown[0], heard, len(shown)) == (0, 0, num_frames)
        assert {after - before for before, after in pairwise(shown)} == {Fraction(1, fps)}
        assert ends == Fraction(num_frames, fps)  # to a sample
    # All links sound as each alone does, without a click where they meet.
    assert np.array_equal(whole.pcm[-8 * RATE // fps :], own.pcm[RATE // fps :])


def test_an_mp4_has_one_aac_track_and_the_same_bytes_each_time(tmp_path):
    frames = np.random.default_rng(0).integers(0, 256, (25, 64, 64, 3), dtype=np.uint8)
    paths = [tmp_path / f"{name}.mp4" for name in "abc"]
    for path in paths[:2]:
        write_video(frames, path, "mp4", 25, "note", sound=tone(1.0))
    assert paths[0].read_bytes() == paths[1].read_bytes()
    chain = ChainSoFar(path=paths[0], num_frames=25)
    write_video(frames, paths[2], "mp4", 25, "note", sound=tone(2.0), chain=chain)
    for path, seconds in zip(paths, (1, 1, 2), strict=True):
        with av.open(str(path)) as container:
            video, audio = container.streams
            assert (video.codec_context.name, audio.codec_context.name) == ("h264", "aac")
            assert container.metadata["comment"] == "note"
            for stream in (video, audio):
                assert float(stream.duration * stream.time_base) == pytest.approx(seconds, abs=0.025)
        with av.open(str(path)) as container:
            samples = np.concatenate([each.to_ndarray() for each in container.decode(audio=0)], axis=1)
        spectrum = np.abs(np.fft.rfft(samples[0][: RATE // 2]))
        assert np.argmax(spectrum) * 2 == pytest.approx(440, abs=4)
    write_video(frames, tmp_path / "a.gif", "gif", 25, "note", sound=tone(1.0))
