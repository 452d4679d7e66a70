"""Photos that are decoded in a process of their own: the same as here, and within a time and memory."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from svdq.pipeline.errors import InputError, SampleError
from svdq.pipeline.media.image import prepare_photo
from svdq.producer.decoder import Decoder, StoppedError, TooSlowError, send
from svdq.producer.submitting.photos import check_data

pytestmark = pytest.mark.slow

MAX_PIXELS = 100_000_000
#: An ASCII PGM, which Pillow reads for some seconds.
SLOW = b"P2 2850 2850 255\n" + b"1 " * 2850**2


def test_it_decodes_what_this_process_would(photo: Path) -> None:
    data, notes = photo.read_bytes(), []
    decoder = Decoder()
    checked = decoder.check_data(data, photo, MAX_PIXELS)
    assert replace(checked, data=None) == check_data(data, photo, MAX_PIXELS)
    prepared = decoder.prepare(data, (128, 64), "pad", MAX_PIXELS, notes.append)
    expected = prepare_photo(data, 128, 64, "pad")
    assert (prepared.size, prepared.mode, prepared.tobytes()) == ((128, 64), "RGB", expected.tobytes())
    profile = BytesIO()
    Image.open(photo).save(profile, "PNG", icc_profile=b"no profile")
    decoder.prepare(profile.getvalue(), (64, 64), "crop", MAX_PIXELS, notes.append)
    assert len(notes) == 1
    with pytest.raises(SampleError):
        decoder.prepare(b"no photo", (64, 64), "crop", MAX_PIXELS, notes.append)


def test_what_takes_too_long_is_ended_and_the_next_photo_is_good(photo: Path) -> None:
    decoder = Decoder()
    with pytest.raises(TooSlowError):
        decoder.check_data(SLOW, Path("slow.pgm"), MAX_PIXELS, cpu_s=1)
    assert decoder.check_data(photo.read_bytes(), photo, MAX_PIXELS).extension == "jpg"


def test_a_stop_does_not_wait_for_a_photo() -> None:
    stop = threading.Event()
    decoder = Decoder(is_stopped=stop.is_set)
    threading.Timer(1, stop.set).start()
    begun_s = time.monotonic()
    with pytest.raises(StoppedError):
        decoder.check_data(SLOW, Path("slow.pgm"), MAX_PIXELS)
    assert time.monotonic() - begun_s < 5


def test_a_photo_that_needs_memory_without_saying_so_is_refused() -> None:
    """Pillow keeps each marker of a JPEG that has no length, gigabytes of them."""
    hidden = b"\xff\xd8" + b"\xff\xe1\x00\x02" * 15_000_000
    decoder = Decoder()
    with pytest.raises(InputError, match="segments"):
        decoder.check_data(hidden, Path("a.jpg"), MAX_PIXELS)


def test_a_killed_process_is_replaced(photo: Path) -> None:
    decoder = Decoder(reserve=lambda _: KillChildrenOnce())
    killed.clear()
    assert decoder.check_data(photo.read_bytes(), photo, MAX_PIXELS).extension == "jpg"
    assert len(killed) == 1


killed: list[int] = []


class KillChildrenOnce:
    def __enter__(self) -> None:
        if not killed:
            for task in Path("/proc/self/task").iterdir():
                for child in (task / "children").read_text().split():
                    if "decoder_process" in Path(f"/proc/{child}/cmdline").read_text():
                        killed.append(int(child))
                        os.kill(int(child), signal.SIGKILL)

    def __exit__(self, *_: object) -> None:
        pass


def test_a_process_whose_asker_has_ended_says_nothing(photo: Path) -> None:
    command = [sys.executable, "-m", "svdq.producer.decoder_process"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=photo.parent
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.close()
        wanted = {"path": str(photo), "max_pixels": 10**6}
        with photo.open("rb") as data:
            send(process.stdin, {"task": "check", "cpu_s": 20, "arguments": wanted}, data)
        said = process.stderr.read() if process.stderr is not None else b""
        assert (process.wait(60), said) == (0, b"")
