"""What only a machine with a GPU can tell: `make gpu-check`, or `python deploy/gpu_check.py --model DIR`.

Runs the commands that it prints, one after the other, and writes what they said to a Markdown file. Several ranks share
a GPU where there are fewer GPUs than ranks; their tensors go through the host then.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path

PHOTO = Path(__file__).parent.parent / "docs" / "demo" / "photo.jpg"
#: What ranks that share a card have to reach of one rank's pace.
SHARED_PACE = 0.9


class Report:
    """The Markdown file, written as checks end, so that a check which hangs loses no other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failures: list[str] = []

    def add(self, text: str) -> None:
        """Add a paragraph, also on the terminal."""
        print(f"{text}\n", flush=True)  # noqa: T201
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{text}\n\n")

    def run(self, title: str, *arguments: object, wanted: str = "") -> bool:
        """Run a module of svdq's and add what it printed; a failure is kept and the next check goes on."""
        command = [sys.executable, "-m", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        output = (done.stdout if done.returncode == 0 else done.stdout + done.stderr).rstrip()
        shown = " ".join(["python", *command[1:]])
        self.add(f"## {title}\n\n{wanted}\n\n    {shown}\n\n```\n{output}\n```".replace("\n\n\n\n", "\n\n"))
        if done.returncode != 0:
            self.failures.append(f"{title}: exit code {done.returncode}")
        return done.returncode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Check; exit code 1 when a check failed, 2 without a GPU."""
    import torch

    options = _parse(arguments)
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print("Error: torch finds no GPU here; run this on a machine that has one.", file=sys.stderr)  # noqa: T201
        return 2
    options.report.unlink(missing_ok=True)
    report = Report(options.report)
    where = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}" if on_gpu else "No GPU, only a trial"
    report.add(f"# GPU check, {date.today()}\n\n{where}; torch {torch.__version__}.")
    with tempfile.TemporaryDirectory(prefix="svdq-gpu-check-") as folder:
        model = options.model or _random_model(report, Path(folder, "full-size"))
        _parity(report, model, options)
        shape = ["--size", options.size, "--frames", options.frames]
        dtypes = ["--dtype", "fp16", "--dtype", "bf16"] if on_gpu else ["--model", model, "--option", "fused-qkv"]
        report.run("One step", "svdq.cli", "bench", "unet", "--device", options.device, *shape, *dtypes)
        _sharing(report, model, options, Path(folder, "bench.json"))
    report.add("All checks passed." if not report.failures else "Failed: " + "; ".join(report.failures) + ".")
    return 1 if report.failures else 0


def _random_model(report: Report, folder: Path) -> str:
    from svdq.pipeline.models.full_size import write_full_size_model

    write_full_size_model(folder)
    report.add("No `--model` was given: the UNet has its published size and random weights; it makes noise.")
    return str(folder)


def _parity(report: Report, model: str, options: argparse.Namespace) -> None:
    """Compare with diffusers, then one rank with seven."""
    flags = [
        "--model",
        model,
        "--image",
        PHOTO,
        "--device",
        options.device,
        "--size",
        options.parity_size,
        "--frames",
        14,
    ]
    for ranks in (1, options.ranks):
        report.run(
            f"Against diffusers, ranks: {ranks}",
            *("svdq.pipeline.compare", *flags, "--steps", 10, "--ranks", ranks, "--tolerance", 255),
            wanted="The largest difference of any pixel, of 255; the same for any number of ranks.",
        )
    title = f"One rank against {options.ranks}"
    difference = _ranks_differ_by(model, options)
    report.add(f"## {title}\n\nLargest pixel difference {difference}; wanted: 0.")
    if difference:
        report.failures.append(f"{title}: largest pixel difference {difference}")


def _ranks_differ_by(model: str, options: argparse.Namespace) -> int:
    import numpy as np

    from svdq.pipeline import compare, photo
    from svdq.pipeline.parameters import VideoParameters

    width, height = map(int, options.parity_size.split("x"))
    image = photo.prepare(photo.load(PHOTO.read_bytes(), 10**9), width, height, "crop")
    videos = [VideoParameters(seed=seed, steps=10, frames=14, width=width, height=height) for seed in (1, 2)]
    alone, shared = (
        compare.render(model, image, videos, num_ranks=ranks, device=options.device) for ranks in (1, options.ranks)
    )
    return max(
        int(np.abs(one.astype(np.int16) - other.astype(np.int16)).max())
        for one, other in zip(alone, shared, strict=True)
    )


def _sharing(report: Report, model: str, options: argparse.Namespace, json_path: Path) -> None:
    """Measure one rank and seven, on one card or on as many as there are; memory beside it."""
    ran = report.run(
        f"Ranks: 1 and {options.ranks}",
        *("svdq.cli", "bench", "--model", model, "--device", options.device, "--ranks", f"1,{options.ranks}"),
        *("--size", options.size, "--frames", options.frames, "--samples", options.samples, "--json", json_path),
    )
    if not ran:
        return
    one, many = json.loads(json_path.read_text(encoding="utf-8"))["runs"]
    share = one["per_sample_mean_s"] / many["per_sample_mean_s"]
    memory = "\n".join(f"| {rank} | {gpu_mb:,.0f} |" for rank, gpu_mb in enumerate(many["gpu_mb"]))
    report.add(
        f"{options.ranks} ranks finish {share:.2f} times as many videos an hour as one; wanted, where they share a "
        f"card: {SHARED_PACE}.\n\n| rank | most GPU memory of its tensors, MiB |\n|---|---|\n{memory}"
    )
    if share < SHARED_PACE:
        report.failures.append(f"{options.ranks} ranks have {share:.2f} of one rank's pace")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a StableVideoDiffusionPipeline; default: full size, random weights")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu only tries the script")
    parser.add_argument("--ranks", type=int, default=7)
    parser.add_argument("--size", default="1024x576", help="WIDTHxHEIGHT of what is measured")
    parser.add_argument("--frames", type=int, default=25)
    parser.add_argument("--samples", type=int, default=30, help="videos of a measured run")
    parser.add_argument("--parity-size", default="256x256", help="WIDTHxHEIGHT of what is compared")
    parser.add_argument("--report", type=Path, default=Path("gpu-check.md"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
