"""Memory stays flat while a group renders a thousand videos."""

import gc
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable

import psutil
import pytest
import torch

from svdq.pipeline.loop.protocols import Report, Request, Sink, Source, Surroundings
from svdq.pipeline.loop.sample import Sample
from svdq.pipeline.loop.stage import Stage
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.model_names import resolve
from svdq.pipeline.models.svd.family import SvdParameters
from svdq.pipeline.models.video_model import Frames, Role
from svdq.pipeline.transport.channel import Channel
from svdq.pipeline.transport.topology import Links, Topology

RANKS = 3
CPU = torch.device("cpu")
#: Videos after which the memory is compared.
SETTLED, ALL = 200, 1000
MIB = 2**20


class MeasuringSource(Source):
    """Supplies all videos, and measures the memory when enough of them have ended and none is in flight."""

    def __init__(self) -> None:
        self._num_taken = self._num_ended = 0
        self._changed = threading.Condition()
        self.failures: list[str] = []
        #: Python's objects, and resident memory, in bytes.
        self.measured: list[tuple[int, int]] = []

    def take(self) -> Request | None:
        if self._num_taken in (SETTLED, ALL):
            with self._changed:
                assert self._changed.wait_for(lambda: self._num_ended == self._num_taken, 120)
            self._measure()
        if self._num_taken == ALL:
            return None
        self._num_taken += 1
        parameters = SvdParameters(seed=self._num_taken, steps=6, frames=14, width=320, height=192)
        num_waiting = ALL - self._num_taken
        return Request(job_id=f"job-{self._num_taken}", parameters=parameters, photo=None, num_waiting=num_waiting)

    def ended(self, report: Report) -> None:
        if report.failure is not None:
            self.failures.append(report.failure)
        with self._changed:
            self._num_ended += 1
            self._changed.notify()

    def _measure(self) -> None:
        time.sleep(0.2)  # until the last threads have let go
        gc.collect()
        self.measured.append((tracemalloc.get_traced_memory()[0], psutil.Process().memory_info().rss))


class DiscardingSink(Sink):
    def deliver(self, sample: Sample, frames: Frames, report: Callable[[Report], None]) -> None:
        report(Report.of(sample))


@pytest.mark.long
def test_a_thousand_videos_take_no_more_memory_than_two_hundred() -> None:
    pairs = [socket.socketpair() for _ in range(RANKS)]
    source, lost = MeasuringSource(), []
    threads = []
    for rank in range(RANKS):
        is_first, is_last = rank == 0, rank == RANKS - 1
        stage = Stage(
            Topology(rank=rank, num_ranks=RANKS, local_rank=rank),
            Links(incoming=Channel(pairs[rank - 1][1], CPU), outgoing=Channel(pairs[rank][0], CPU)),
            # A decode that is longer than the steps, so that every rank decodes and frames are passed on.
            open_model(resolve("simulated:step_ms=0.5,decode_ms=4"), Role.of_rank(rank), CPU, torch.float32),
            Surroundings(
                on_lost=lost.append,
                source=source if is_first else None,
                sink=DiscardingSink() if is_last else None,
            ),
        )
        threads.append(threading.Thread(target=stage.run, daemon=True))
    tracemalloc.start()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(200)
            assert not thread.is_alive()
    finally:
        tracemalloc.stop()
        for pair in pairs:
            for end in pair:
                end.close()
    assert (lost, source.failures) == ([], [])
    (objects, resident), (objects_at_end, resident_at_end) = source.measured
    # The latents of the 800 videos in between have 86 MB, their frames 2 GB. The JSON parser keeps some short texts.
    assert objects_at_end - objects < 0.25 * MIB
    assert resident_at_end - resident < 40 * MIB
