"""Sound beside frames: PCM of 16 bits that lasts as long as they do, and WAV files of it. Does not import torch."""

import io
import wave
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Sound:
    """The sound of a video."""

    pcm: NDArray[np.int16]  # (N, channels)
    rate: int  # samples a second

    @classmethod
    def of(cls, waveform: NDArray[np.float32], rate: int) -> Self:
        """Convert a waveform (channels, N), -1 to 1; louder samples are clipped."""
        return cls(pcm=np.round(np.clip(waveform.T, -1, 1) * 32767).astype(np.int16), rate=rate)

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read the bytes of `wav`; raises ValueError if they are something else."""
        try:
            with wave.open(io.BytesIO(data)) as file:
                pcm = np.frombuffer(file.readframes(file.getnframes()), np.int16)
                return cls(pcm=pcm.reshape(-1, file.getnchannels()), rate=file.getframerate())
        except (wave.Error, EOFError) as error:
            raise ValueError(f"no sound that svdq has written: {error}") from error

    @property
    def wav(self) -> bytes:
        """The same as a WAV file."""
        buffer = io.BytesIO()
        with wave.open(buffer, "wb") as file:
            file.setnchannels(self.pcm.shape[1])
            file.setsampwidth(2)
            file.setframerate(self.rate)
            file.writeframes(self.pcm.tobytes())
        return buffer.getvalue()

    def lasting(self, num_frames: int, fps: int) -> Self:
        """Return the sound of the first `num_frames` frames, with silence where there is none."""
        num_samples = round(num_frames * self.rate / fps)
        pcm = self.pcm[:num_samples]
        silence = np.zeros((num_samples - len(pcm), self.pcm.shape[1]), np.int16)
        return replace(self, pcm=np.concatenate([pcm, silence]))

    def after(self, before: Self, num_before: int, fps: int) -> Self:
        """Return the sound of a chain, which lasts `num_before` frames, and this one behind it.

        Our first frame is the last one of the chain, and is heard once.
        """
        begin = round(self.rate / fps)
        return replace(self, pcm=np.concatenate([before.lasting(num_before, fps).pcm, self.pcm[begin:]]))
