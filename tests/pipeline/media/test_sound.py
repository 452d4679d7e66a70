"""Sound as PCM: as long as its frames, joined without drift, and as a WAV file."""

import av
import numpy as np
import pytest

from svdq.pipeline.media.sound import Sound
from svdq.pipeline.media.video import join_mp4, write_video

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


@pytest.mark.parametrize("fps", [7, 24, 30, 48])
def test_links_of_a_chain_join_without_drift(fps):
    own = tone(3.0)
    whole = own.during(0, 17, fps)
    for link in range(1, 9):
        whole = own.during(1, 16, fps).after(whole, 17 + 16 * (link - 1), fps)
        assert abs(len(whole.pcm) - (17 + 16 * link) * RATE / fps) <= 1 + link


def test_what_is_missing_is_silent():
    sound = tone(0.5).during(0, 24, 24)
    assert len(sound.pcm) == RATE
    assert not sound.pcm[RATE // 2 :].any()
    assert not tone(0.1).during(10, 5, 10).pcm.any()


def test_an_mp4_has_one_aac_track_and_the_same_bytes_each_time(tmp_path):
    frames = np.random.default_rng(0).integers(0, 256, (25, 64, 64, 3), dtype=np.uint8)
    paths = [tmp_path / f"{name}.mp4" for name in "abc"]
    for path in paths[:2]:
        write_video(frames, path, "mp4", 25, "note", sound=tone(1.0))
    assert paths[0].read_bytes() == paths[1].read_bytes()
    join_mp4({paths[0]: 25, paths[1]: 25}, paths[2], 25, "note", sound=tone(2.0))
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
