"""The sections of the GPU check in which a worker renders jobs from the queue. Measures nothing itself."""

import argparse
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
from gpu_check_report import Report

from svdq.pipeline.models.memory import WORKSPACE_BYTES, Activity, estimate, shape_for
from svdq.pipeline.parameters import VideoParameters


class WorkerRuns:
    """The sections; each worker has a home and a queue of its own, so that nobody's are touched."""

    def __init__(self, report: Report, model: str, folder: Path, options: argparse.Namespace) -> None:
        self._report = report
        self._model = model
        self._folder = folder
        self._options = options
        self._on_gpu = options.device == "cuda"

    def burst(self) -> None:
        """Render two photos with compiled blocks, and again in the other order: what was compiled serves the next."""
        other = self._folder / "mirrored.png"
        with PIL.Image.open(self._options.photo) as photo:
            PIL.ImageOps.mirror(photo.convert("RGB")).save(other)
        photos = [self._options.photo, other]
        first = self._rendered("first", photos, "--compile", "blocks")
        second = self._rendered("second", photos[::-1], "--compile", "blocks")
        for which, photo in (("first", photos[0]), ("second", photos[1])):
            frames, again = (_frames(run[photo.stem]) for run in (first, second))
            same = frames.shape == again.shape
            difference = int(np.abs(frames.astype(int) - again).max()) if same else 255
            self._report.judge(
                f"Largest pixel difference of the {which} photo, compiled, between its turns as first and as second",
                str(difference),
                "0",
                difference == 0,
            )
        differ = not np.array_equal(_frames(first[photos[0].stem]), _frames(first[photos[1].stem]))
        self._report.judge("Two photos make two videos", "yes" if differ else "no", "yes", differ)

    def memory(self) -> None:
        """Render a video whose frames its worker has not the memory to decode at once: it decodes fewer at a time."""
        limit, weights = self._limit()
        (made,) = self._rendered("limited", [self._options.photo], "--memory-limit", limit).values()
        chunk = made["job"]["decode_chunk_size"]
        wanted = f"fewer than {self._options.frames}"
        self._report.judge("Frames decoded at a time under the limit", str(chunk), wanted, chunk < self._options.frames)
        if taken := made.get("memory_bytes"):
            most = weights + max(taken.values())
            self._report.judge(
                "Memory of its tensors with the weights, GB",
                f"{most / 1e9:.2f}",
                f"at most the limit of {limit / 1e9:.2f} and a tenth",
                most <= 1.1 * limit,
            )

    def _limit(self) -> tuple[int, int]:
        """Give a limit between what decoding all frames needs and what one at a time does, and the weights' bytes."""
        import torch

        from svdq.pipeline.models.compute import DEFAULTS, dtype_of
        from svdq.pipeline.models.model import Part, open_model

        device = torch.device(self._options.device)
        dtype = dtype_of(DEFAULTS, device)
        weights = open_model(self._model, Part.of_rank(0, 1), device, dtype).info.weight_bytes
        width, height = map(int, self._options.size.split("x"))
        frames = self._options.frames

        def need(chunk: int) -> int:
            video = VideoParameters(width=width, height=height, frames=frames, decode_chunk_size=chunk, seed=0)
            activities: tuple[Activity, ...] = ("encode", "step", "decode")
            name = str(dtype).removeprefix("torch.")
            peaks = [estimate(each, shape_for(each, video), name, has_decoder=True) for each in activities]
            return weights + max(peaks) + (WORKSPACE_BYTES if self._on_gpu else 0)

        all_of_it, least = need(frames), need(1)
        if all_of_it <= least:
            raise RuntimeError(f"{frames} frames need no more memory than one: give more --frames")
        return (all_of_it + least) // 2, weights

    def _rendered(
        self, name: str, photos: Sequence[Path], *worker: object, submit: Sequence[object] = ()
    ) -> dict[str, dict[str, Any]]:
        """Queue photos, have a worker render them, and give the account of each video by its photo's name."""
        options, home = self._options, self._folder / name
        # What a run that was killed has left is not rendered again.
        shutil.rmtree(home, ignore_errors=True)
        ours = {"SVDQ_HOME": str(home), "SVDQ_STORAGE": str(home / "storage"), "SVDQ_MODEL": self._model}
        ours["TORCHINDUCTOR_CACHE_DIR"] = str(self._folder / "compiled")
        # What the user has set is about other queues.
        environment = {name: text for name, text in os.environ.items() if not name.startswith("SVDQ_")} | ours
        video = ["--size", options.size, "--frames", options.frames, "--steps", options.worker_steps, "--seed", 1]
        try:
            self._report.run(
                *("svdq.cli", "submit", *photos, *video, "--format", "png", *submit), environment=environment
            )
            self._report.run(
                *("svdq.cli", "worker", "--burst", "--ranks", 1, "--device", options.device, *worker),
                environment=environment,
            )
        finally:
            self._report.run("svdq.cli", "redis", "stop", environment=environment)
        accounts = [json.loads(path.read_text(encoding="utf-8")) for path in home.glob("storage/outputs/*.json")]
        found = {account["job"]["name"]: account for account in accounts}
        if missing := sorted({photo.stem for photo in photos} - set(found)):
            raise RuntimeError(f"no video was made of {', '.join(missing)}")
        return found


def _frames(account: dict[str, Any]) -> Any:
    """Read the frames of a video: (F, H, W, 3), uint8."""
    (folder,) = account["outputs"]
    return np.stack([np.asarray(PIL.Image.open(path)) for path in sorted(Path(folder).glob("*.png"))])
