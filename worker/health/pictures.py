"""Publishes how the videos in flight look so far, while somebody looks at the page of `svdq serve`."""

import io
import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

import redis
from PIL import Image
from torch import Tensor

from svdq.pipeline.loop.sample import Sample
from svdq.producer import keys

logger = logging.getLogger(__name__)

GROUP_S, RANK_S, TRY_S = 1.0, 2.0, 0.3  # seconds between pictures of a group, of this rank, and tries to have the turn
#: Size of a picture, and the qualities that are tried until it fits; after the last one both sides are halved.
MAX_BYTES, QUALITIES = 10_000, (50, 15)
MAX_SIDE = 160  # longest side in pixels


class _Offer(NamedTuple):
    sample: Sample
    step: int
    draw: Callable[[], Tensor | None]


class Pictures:
    """The pictures of one rank; a broken or slow one is left out."""

    def __init__(self, connection: redis.Redis, group: str) -> None:
        """Start the thread, which alone uses `connection`."""
        self._connection = connection
        self._turn = f"{keys.PICTURE_TURN}{group}"
        self._offer: _Offer | None = None
        self._news = threading.Event()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="pictures", daemon=True).start()

    def offer(self, sample: Sample, step: int, draw: Callable[[], Tensor | None]) -> None:
        """Take a picture in place of an older one, in the step loop."""
        self._offer = _Offer(sample, step, draw)
        self._news.set()

    def close(self) -> None:
        """End the thread after the present picture."""
        self._closed.set()
        self._news.set()

    def _run(self) -> None:
        wait_s = 0.0
        while not self._closed.wait(wait_s):
            self._news.wait()
            self._news.clear()
            wait_s = self._publish_newest()

    def _publish_newest(self) -> float:
        """Publish the newest picture if somebody looks; return the seconds until the next one."""
        offer = self._offer  # it holds the memory of a sample
        try:
            if offer is not None and self._connection.exists(keys.LOOKING):
                if not self._connection.set(self._turn, 1, nx=True, px=round(GROUP_S * 1000)):
                    self._news.set()  # with the newest by then
                    return TRY_S
                self._publish(offer)
        except Exception as error:  # noqa: BLE001 - a picture must not disturb a video
            logger.debug("There is no picture of %s: %s", offer and offer.sample.job_id, error)
        if self._offer is offer:
            self._offer = None
        return RANK_S

    def _publish(self, offer: _Offer) -> None:
        frames = offer.draw()
        if frames is None:
            return
        parameters = offer.sample.parameters
        data = animated(frames, parameters.num_frames / (parameters.fps or 1))
        key = f"{keys.PICTURE}{offer.sample.job_id}"
        with self._connection.pipeline() as pipeline:
            pipeline.hset(key, mapping={"step": offer.step, "webp": data})
            pipeline.expire(key, keys.PICTURE_TTL_S)
            pipeline.execute()


def animated(frames: Tensor, duration_s: float) -> bytes:
    """Encode frames (F, h, w, 3), uint8, as an endless animated WebP of at most `MAX_BYTES`."""
    images = [Image.fromarray(frame) for frame in frames.cpu().numpy()]
    side = MAX_SIDE
    while True:
        for image in images:
            image.thumbnail((side, side))
        for quality in QUALITIES:
            file = io.BytesIO()
            images[0].save(
                file,
                "WEBP",
                save_all=True,
                append_images=images[1:],
                duration=max(40, round(duration_s * 1000 / len(images))),
                loop=0,
                quality=quality,
                method=1,
            )
            if file.tell() <= MAX_BYTES:
                return file.getvalue()
        side = max(images[0].size) // 2
