"""What only a machine with a GPU can tell: `make gpu-check`, or `python deploy/gpu_check.py --model DIR`.

Runs the commands that it prints, one after the other, and writes what they said to a Markdown file, with what is wanted
beside what was measured. A section that fails says so, and the others go on. Several ranks share a GPU where there are
fewer GPUs than ranks; their tensors go through the host then. Measures nothing itself.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpu_check_report import Report

from svdq.pipeline.models.memory_measured import WORKSPACE_BYTES

PHOTO = Path(__file__).parent.parent / "docs" / "demo" / "photo.jpg"
#: What ranks that share a card have to reach of one rank's pace, and ranks with a card each of their number.
WANTED_PACE = 0.9
#: How much longer than in diffusers' loop a step may take, and how much faster the best exact option has to make it.
WANTED_STEP, WANTED_SPEEDUP = 1.02, 1.3
#: How much more memory than the UNet's weights and a step's activations a middle rank may take.
WANTED_MEMORY = 1.05
#: Bytes of a GPU's memory that each process takes besides its tensors.
_CONTEXT_BYTES = 700 * 2**20


class Check:
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
        self._parts: list[dict[str, Any]] = []

    def parity(self) -> None:
        """Compare with diffusers in each type, and one rank with several."""
        options = self._options
        found = self._measured(
            *("svdq.pipeline.bench.precision_parity", *self._common, *self._dtypes, "--image", PHOTO),
            *("--shape", f"{options.parity_size}x{options.parity_frames}", "--ranks", options.ranks),
            *("--timed-shape", f"{options.size}x{options.frames}", "--steps", options.steps),
        )
        for dtype, difference in found["differences"].items():
            exact = dtype == "fp32" and not self._on_gpu
            wanted = "0" if exact else "little: 0 where both run the same kernels"
            what = f"Largest pixel difference to diffusers in {dtype}, of 255"
            self._report.judge(what, str(difference), wanted, difference == 0 if exact else None)
        for dtype, difference in found["ranks"].items():
            what = f"Largest pixel difference between one rank and {options.ranks} in {dtype}"
            self._report.judge(what, str(difference), "0", difference == 0)
        for dtype, step_ms in found["step_ms"].items():
            ratio = step_ms["svdq"] / step_ms["diffusers"]
            what = f"A step of one rank over one of diffusers' loop in {dtype}"
            self._report.judge(what, f"{ratio:.3f}", f"at most {WANTED_STEP}", ratio <= WANTED_STEP)

    def step(self) -> None:
        """Measure a step with each option."""
        few = [] if self._on_gpu else ["--option", "fused-qkv", "--repeats", 2]
        found = self._measured("svdq.cli", "bench", "unet", *self._common, *self._shape, *self._dtypes, *few)["unet"]
        exact = [one for one in found if not one["failure"] and not _is_approximate(one["option"])]
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
        self._parts = [one for one in found["parts"] if not one["failure"]]
        for one in self._parts:
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
        """Measure one rank and several, on one card or on as many as there are, and the memory of each."""
        options, report = self._options, self._report
        step = next((one for one in self._parts if one["part"] == "step"), None)
        ranks, gpus = options.ranks, 0
        if self._on_gpu:
            ranks, gpus = _ranks_that_fit(options.ranks, step)
            if ranks < options.ranks:
                report.add(f"The memory holds {ranks} ranks at a time, so there are that many, not {options.ranks}.")
        one, many = self._measured(
            *("svdq.cli", "bench", *self._common, *self._shape, "--steps", options.steps, "--ranks", f"1,{ranks}"),
            *("--samples", options.samples),
        )["runs"]
        share = one["per_sample_mean_s"] / many["per_sample_mean_s"]
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Check; exit code 1 when a section failed or a figure is not as wanted, 2 without a GPU."""
    import torch

    options = _parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("Error: torch finds no GPU here; run this on a machine that has one.", file=sys.stderr)  # noqa: T201
        return 2
    options.report.unlink(missing_ok=True)
    report = Report(options.report, timeout_s=options.timeout_s)
    report.add(f"# GPU check, {date.today()}\n\n{_where(options.device)}")
    with tempfile.TemporaryDirectory(prefix="svdq-gpu-check-") as folder:
        model = options.model or _random_model(report, Path(folder, "full-size"))
        check = Check(report, model, Path(folder), options)
        report.section("Against diffusers, and one rank against several", check.parity)
        report.section("One step with each option", check.step)
        report.section("Encode and decode", check.ends)
        report.section("Types and sizes", check.precision)
        report.section("A pipeline of ranks, and the memory of each", check.sharing)
    return report.finish()


def _where(device: str) -> str:
    """Say on what all this is measured."""
    import torch

    libraries = ", ".join(f"{name} {version(name)}" for name in ("svdq", "torch", "diffusers", "transformers"))
    if device == "cpu":
        return f"No GPU, only a trial of the script; {libraries}."
    card = torch.cuda.get_device_properties(0)
    return (
        f"{torch.cuda.device_count()} x {card.name} of {card.total_memory / 2**30:.0f} GiB; {libraries}; CUDA "
        f"{torch.version.cuda}; TF32 in float32's convolutions: {torch.backends.cudnn.allow_tf32}, in its matrix "
        f"products: {torch.backends.cuda.matmul.allow_tf32}."
    )


def _random_model(report: Report, folder: Path) -> str:
    import torch

    from svdq.pipeline.models.full_size import COMPONENTS, write_full_size_model

    write_full_size_model(folder, torch.float16, components=COMPONENTS)
    report.add(
        "No `--model` was given: UNet, VAE and image encoder have their published sizes and random weights, and what "
        "they make is noise. Time and memory do not depend on that."
    )
    return str(folder)


def _ranks_that_fit(wanted: int, step: dict[str, Any] | None) -> tuple[int, int]:
    """Give how many ranks the cards hold at a time, two at least, and how many cards there are."""
    import torch

    gpus = torch.cuda.device_count()
    if step is None or gpus >= wanted:
        return wanted, gpus
    free = min(torch.cuda.mem_get_info(number)[0] for number in range(gpus))
    each = step["weight_bytes"] + step["peak_bytes"] + _CONTEXT_BYTES
    return max(2, min(wanted, gpus * int(free // each))), gpus


def _is_approximate(option: str) -> bool:
    from svdq.pipeline.models.compute import VARIANTS

    return bool(VARIANTS[option].approximate)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a StableVideoDiffusionPipeline; default: full size, random weights")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu only tries the script")
    parser.add_argument("--ranks", type=int, default=7)
    parser.add_argument("--size", default="1024x576", help="WIDTHxHEIGHT of what is measured")
    parser.add_argument("--frames", type=int, default=25)
    parser.add_argument("--steps", type=int, default=25, help="denoising steps of a video")
    parser.add_argument("--samples", type=int, default=30, help="videos of a measured run")
    parser.add_argument("--sizes", default="576x320,768x448,1024x576", help="of the sweep over types and sizes")
    parser.add_argument("--parity-size", default="256x256", help="WIDTHxHEIGHT of what is compared")
    parser.add_argument("--parity-frames", type=int, default=14)
    parser.add_argument("--timeout-s", type=float, default=3600, help="seconds that one command may take")
    parser.add_argument("--report", type=Path, default=Path("gpu-check.md"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
