"""Stable Video Diffusion XT's UNet in full size, in bfloat16 on processors: two ranks give the bits of one.

Takes 3 GB of disk, as much memory (the ranks share the file's pages) and some minutes: SVDQ_FULL_SIZE_MODEL names a
folder to keep the model in between runs.
"""

import json
import os
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from gpu_checks.full_size import write_full_size_model
from PIL import Image

from svdq.pipeline.loop.protocols import Report, Request, Sink, Surroundings
from svdq.pipeline.loop.stage import Stage
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.svd.family import SvdParameters
from svdq.pipeline.models.svd.model import SvdModel
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.transport.topology import Links, Topology
from svdq.worker.bench.loop_runs import exit_when_lost, spawn_ranks
from tests.pipeline.fakes import ListPlanner, ListSource

#: Free memory for the weights, which are in it twice while they are written, and for three processes.
NEEDED_BYTES = 10 * 2**30
#: The smallest picture: its latents are 8x8. Without guidance, which would double the time.
SMALL = SvdParameters(seed=5, frames=2, steps=2, width=64, height=64, max_guidance_scale=1.0)


class KeepingModel(SvdModel):
    """Writes down the bits of the final latents and the frames."""

    folder: Path

    def decode(self, tensors, parameters, decode_chunk_size):
        frames = super().decode(tensors, parameters, decode_chunk_size)
        np.save(self.folder / "latents.npy", tensors["latents"].view(torch.int16).numpy())
        np.save(self.folder / "frames.npy", frames.numpy())
        return frames


class StagesSink(Sink):
    """Writes down which rank did how many steps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def deliver(self, sample, frames, report) -> None:
        stages = [(rank, steps) for rank, steps, _ in sample.stages]
        (self._folder / "stages.json").write_text(json.dumps(stages))
        report(Report.of(sample))


def rank_main(topology: Topology, links: Links, name: str, folder: str, photo: str) -> None:
    device = torch.device("cpu")
    model = KeepingModel(resolve(name), Role.of_rank(topology.rank), device, torch.bfloat16)
    model.folder = Path(folder)
    image = Image.open(photo)
    # By its own plan, a group gives both steps of a single video to rank 1: nothing would be handed over.
    num_ranks = topology.num_ranks
    boundaries = (0, *(1 + rank * SMALL.steps // num_ranks for rank in range(1, num_ranks)), SMALL.steps + 2)
    planner = ListPlanner(num_ranks, [boundaries])
    requests = [Request(job_id="video", parameters=SMALL, photo=image)]
    surroundings = Surroundings(
        on_lost=exit_when_lost,
        source=ListSource(requests) if topology.first else None,
        sink=StagesSink(Path(folder)) if topology.last else None,
    )
    Stage(topology, links, model, surroundings, planner=planner).run()


@pytest.fixture(scope="module")
def full_size_model(tmp_path_factory) -> Path:
    free = psutil.virtual_memory().available
    if free < NEEDED_BYTES:
        pytest.skip(f"needs 10 GiB of free memory, and there are {free / 2**30:.1f}")
    kept = os.environ.get("SVDQ_FULL_SIZE_MODEL")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("models") / "full"
    if not (folder / "model_index.json").exists():
        write_full_size_model(folder)
    return folder


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_two_ranks_give_the_bits_of_one(full_size_model, tmp_path) -> None:
    Image.effect_mandelbrot((64, 64), (-2, -1, 1, 1), 90).convert("RGB").save(tmp_path / "photo.png")
    for num_ranks in (1, 2):
        folder = tmp_path / str(num_ranks)
        folder.mkdir()
        spawn_ranks(num_ranks, rank_main, str(full_size_model), str(folder), str(tmp_path / "photo.png"))
    assert json.loads((tmp_path / "2" / "stages.json").read_text()) == [[0, 1], [1, 1]]
    alone, together = (np.load(tmp_path / ranks / "latents.npy") for ranks in ("1", "2"))
    assert alone.shape == (1, 2, 4, 8, 8)
    assert len(np.unique(alone)) > 100
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_array_equal(np.load(tmp_path / "2" / "frames.npy"), np.load(tmp_path / "1" / "frames.npy"))
