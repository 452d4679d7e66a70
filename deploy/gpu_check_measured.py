"""The sections of the GPU check that `svdq bench` and the comparison with diffusers measure."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_check_report import Report

from svdq.pipeline.models.memory import WORKSPACE_BYTES

#: What ranks that share a card have to reach of one rank's pace, and ranks with a card each of their number.
WANTED_PACE = 0.9
#: How much longer than in diffusers' loop a step may take, and how much faster the best exact option has to make it.
WANTED_STEP, WANTED_SPEEDUP = 1.02, 1.3
#: How much more memory than the UNet's weights and a step's activations a middle rank may take.
WANTED_MEMORY = 1.05
#: Bytes of a GPU's memory that each process takes besides its tensors.
_CONTEXT_BYTES = 700 * 2**20
#: Share of a command's time limit in which ranks compute; the rest is for their start and for other work beside them.
_COMPUTING_SHARE = 0.6


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """How long a run of several ranks is made."""

    #: Denoising steps of a video, videos, and those of them that the steady figures leave out.
    steps: int
    samples: int
    warmup: int
    #: Why, as a clause.
    reason: str


def plan_run(one: Mapping[str, Any], ranks: int, gpus: int, *, samples: int, timeout_s: float) -> RunPlan:
    """Choose how many videos several ranks make, so that they are done before the time limit of a command.

    Args:
        one: what `svdq bench` measured of one rank.
        ranks: K.
        gpus: cards that they share; 0: a processor.
        samples: the most videos.
        timeout_s: the limit; what starts and ends the ranks comes out of it, too.
    """
    budget_s, at_a_time = _COMPUTING_SHARE * timeout_s, max(1, min(ranks, gpus))
    ends_s, step_s = (one["encode_ms"] + one["decode_ms"]) / 1000, one["step_ms"] / 1000
    # The pipeline has to be full, and then `svdq bench` counts the time of K videos at least twice.
    fewest, warmup = 2 * ranks + 2, ranks
    seconds = (one["steps"] * step_s + ends_s) / at_a_time
    if (fitting := int(budget_s / seconds)) >= fewest:
        chosen = max(fewest, min(samples, fitting))
        return RunPlan(
            steps=one["steps"], samples=chosen, warmup=warmup, reason=f"{ranks} ranks make {chosen} videos in time"
        )
    steps = max(1, min(one["steps"], int((budget_s * at_a_time / fewest - ends_s) / step_s)))
    return RunPlan(
        steps=steps,
        samples=fewest,
        warmup=warmup,
        reason=f"{ranks} ranks make {fewest} videos of {steps} steps, for more do not fit into {timeout_s:.0f} s",
    )


class Measured:
    """The sections, in the order in which they need each other's figures."""

    def __init__(self, report: Report, model: str, folder: Path, options: argparse.Namespace) -> None:
        self._report = report
        self._model = model
        self._folder = folder
        self._options = options
        self._on_gpu = options.device == "cuda"
        self._dtypes = [f"--dtype={name}" for name in (("fp16", "bf16") if self._on_gpu else ("fp32",))]
        self._common = ["--model", model, "--device", options.device]
        self._shape = ["--size", options.size, "--frames", options.frames]

    def parity(self) -> None:
        """Compare with diffusers in each type, and one rank with several."""
        options = self._options
        found = self._measured(
            *("svdq.pipeline.bench.precision_parity", *self._common, *self._dtypes, "--image", options.photo),
            *("--shape", f"{options.parity_size}x{options.parity_frames}", "--ranks", options.ranks),
            *("--timed-shape", f"{options.size}x{options.frames}", "--steps", options.steps),
        )
        for dtype, difference in found["differences"].items():
            exact = dtype == "fp32" and not self._on_gpu
            wanted = "0" if exact else "little: 0 where both run the same kernels"
            what = f"Largest pixel difference to diffusers in {dtype}, of 255"
            self._report.judge(what, str(difference), wanted, difference == 0 if exact else None)
        for dtype, difference in found["ranks"].items():
            what = f"Largest pixel difference between one rank and {found['num_ranks'][dtype]} in {dtype}"
            self._report.judge(what, str(difference), "0", difference == 0)
        for dtype, step_ms in found["step_ms"].items():
            ratio = step_ms["svdq"] / step_ms["diffusers"]
            what = f"A step of one rank over one of diffusers' loop in {dtype}"
            self._report.judge(what, f"{ratio:.3f}", f"at most {WANTED_STEP}", ratio <= WANTED_STEP)

    def step(self) -> None:
        """Measure a step with each option."""
        few = [] if self._on_gpu else ["--option", "fused-qkv", "--repeats", 2]
        found = self._measured("svdq.cli", "bench", "unet", *self._common, *self._shape, *self._dtypes, *few)["unet"]
        exact = [one for one in found if one["speedup"] is not None and not _is_approximate(one["option"])]
        if not exact:
            raise RuntimeError("no option could be measured")
        best = max((one for one in exact if one["dtype"] == exact[0]["dtype"]), key=lambda one: one["speedup"])
        what = f"Fastest exact option against eager in {best['dtype']} ({best['option']})"
        wanted = f"at least {WANTED_SPEEDUP} times as fast"
        self._report.judge(
            what, f"{best['speedup']:.2f}", wanted, best["speedup"] >= WANTED_SPEEDUP if self._on_gpu else None
        )

    def ends(self) -> None:
        """Measure encode and decode against a step."""
        chunks = [f"--decode-chunk-size={size}" for size in (1, 8, self._options.frames)]
        found = self._measured("svdq.cli", "bench", "ends", *self._common, *self._shape, *self._dtypes, *chunks)
        parts = [one for one in found["parts"] if not one["failure"]]
        self._report.figures["parts"] = parts
        for one in parts:
            if one["worth_steps"] is not None and one["part"] != "step":
                chunk = f", {one['decode_chunk_size']} at a time," if one["decode_chunk_size"] else ""
                expected = {"encode": "0.18", "decode": "4.4"}[one["part"]]
                what = f"The {one['part']}{chunk} in {one['dtype']}, in steps"
                self._report.judge(what, f"{one['worth_steps']:.3g}", f"about {expected}, as on an H100", None)
            if one["peak_bytes"] is not None:
                self._estimate(one)

    def _estimate(self, one: dict[str, Any]) -> None:
        chunk = f", {one['decode_chunk_size']} at a time," if one["decode_chunk_size"] else ""
        taken, estimated = one["peak_bytes"], one["estimated_bytes"]
        self._report.judge(
            f"Memory of the {one['part']}{chunk} in {one['dtype']} besides weights, GB",
            f"{taken / 1e9:.2f}",
            f"at most the estimated {estimated / 1e9:.2f} and {WORKSPACE_BYTES / 1e9:.2f} to work in",
            taken <= estimated + WORKSPACE_BYTES,
        )

    def precision(self) -> None:
        """Sweep types and sizes."""
        options = self._options
        self._report.run(
            *("svdq.cli", "bench", "precision", *self._common, "--sizes", options.sizes, "--frames", options.frames),
            *(() if self._on_gpu else ("--dtype", "fp32", "--dtype", "fp16", "--repeats", 1)),
        )

    def sharing(self) -> None:
        """Measure one rank, then several on one card or on as many as there are, and the memory of each."""
        options, report = self._options, self._report
        parts = report.figures.get("parts", ())
        step = next((one for one in parts if one["part"] == "step"), None)
        ranks, gpus = options.ranks, 0
        if self._on_gpu:
            ranks, gpus = _ranks_that_fit(options.ranks, step, parts)
            if ranks < options.ranks:
                report.add(f"The memory holds {ranks} ranks at a time, so there are that many, not {options.ranks}.")
        # Each in a command of its own, with a time limit of its own: one rank alone needs few videos.
        one = self._pipeline(1, options.steps, samples=4, warmup=1)
        plan = plan_run(one, ranks, gpus, samples=options.samples, timeout_s=report.timeout_s)
        report.add(f"One rank took {one['per_sample_mean_s']:.3g} s a video: {plan.reason}.")
        many = self._pipeline(ranks, plan.steps, samples=plan.samples, warmup=plan.warmup)
        alone_s = (plan.steps * one["step_ms"] + one["encode_ms"] + one["decode_ms"]) / 1000
        share = (one["per_sample_mean_s"] if plan.steps == options.steps else alone_s) / many["per_sample_mean_s"]
        wanted = WANTED_PACE * (ranks if gpus >= ranks else 1)
        where = "with a card each" if gpus >= ranks else "which share a card"
        report.judge(
            f"Videos an hour of {ranks} ranks {where} over those of one",
            f"{share:.2f}",
            f"at least {wanted:.1f}",
            share >= wanted if self._on_gpu else None,
        )
        if many["gpu_mb"]:
            self._memory(many["gpu_mb"], step)

    def _pipeline(self, ranks: int, steps: int, *more: object, samples: int, warmup: int) -> dict[str, Any]:
        counts = ["--steps", steps, "--ranks", ranks, "--samples", samples, "--warmup-samples", warmup, *more]
        run: dict[str, Any] = self._measured("svdq.cli", "bench", *self._common, *self._shape, *counts)["runs"][0]
        return run

    def _memory(self, gpu_mb: list[float], step: dict[str, Any] | None) -> None:
        rows = "\n".join(f"| {rank} | {mib:,.0f} |" for rank, mib in enumerate(gpu_mb))
        self._report.add(f"| rank | most GPU memory of its tensors, MiB |\n|---|---|\n{rows}")
        if step is None or len(gpu_mb) < 3:
            self._report.add("No middle rank, or no step measured alone: its memory is compared with nothing.")
            return
        middle, alone = gpu_mb[len(gpu_mb) // 2], (step["weight_bytes"] + step["peak_bytes"]) / 2**20
        wanted = f"the UNet's weights and a step's activations alone, {alone:,.0f}, within 5%"
        self._report.judge("Memory of a middle rank, MiB", f"{middle:,.0f}", wanted, middle <= WANTED_MEMORY * alone)

    def _measured(self, *arguments: object) -> Any:
        """Run a module that writes JSON, and give that."""
        path = self._folder / "figures.json"
        path.unlink(missing_ok=True)
        try:
            self._report.run(*arguments, "--json", path)
        except RuntimeError:
            if not path.exists():
                raise
            # What it found is judged below, the exit code said no more.
        return json.loads(path.read_text(encoding="utf-8"))


def _ranks_that_fit(wanted: int, step: dict[str, Any] | None, parts: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Give how many ranks the cards hold at a time, two at least, and how many cards there are."""
    import torch

    gpus = torch.cuda.device_count()
    if step is None or gpus >= wanted:
        return wanted, gpus
    free = min(torch.cuda.mem_get_info(number)[0] for number in range(gpus))
    each = step["weight_bytes"] + step["peak_bytes"] + _CONTEXT_BYTES
    # The first rank has the encoder besides, and the last one decodes all frames at once.
    free -= max((one["weight_bytes"] for one in parts if one["part"] == "encode"), default=0)
    free -= max([0, *(one["peak_bytes"] - step["peak_bytes"] for one in parts if one["part"] == "decode")])
    return max(2, min(wanted, gpus * int(free // each))), gpus


def _is_approximate(option: str) -> bool:
    from svdq.pipeline.models.compute import VARIANTS

    return bool(VARIANTS[option].approximate)
