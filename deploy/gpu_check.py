"""What only a machine with a GPU can tell: `make gpu-check`, or `python deploy/gpu_check.py --model DIR`.

Runs the commands that it prints, one after the other, and writes what they said to a Markdown file, with what is wanted
beside what was measured. A section that fails says so, and the others go on. With `--only` it does some sections and
keeps what the file has of the others, for machines that are there for minutes only. Several ranks share a GPU where
there are fewer GPUs than ranks. Measures nothing itself.
"""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

from gpu_check_measured import Measured
from gpu_check_report import Report
from gpu_check_worker import WorkerRuns

PHOTO = Path(__file__).parent.parent / "docs" / "demo" / "photo.jpg"
#: The sections by their names, in the order in which they need each other's figures.
SECTIONS = {
    "parity": "Against diffusers, and one rank against several",
    "step": "One step with each option",
    "ends": "Encode and decode",
    "precision": "Types and sizes",
    "sharing": "A pipeline of ranks, and the memory of each",
    "burst": "A worker with a compiled UNet and two photos",
    "memory": "A worker with a memory limit",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Check; exit code 1 when a section failed or a figure is not as wanted, 2 without a GPU."""
    import torch

    options = _parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("Error: torch finds no GPU here; run this on a machine that has one.", file=sys.stderr)  # noqa: T201
        return 2
    report = Report(
        options.report,
        timeout_s=options.timeout_s,
        where=_where(options.device),
        trial=options.device == "cpu",
        keep=bool(options.only),
    )
    with contextlib.ExitStack() as stack:
        scratch = options.scratch or stack.enter_context(tempfile.TemporaryDirectory(prefix="svdq-gpu-check-"))
        folder = Path(scratch).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        model = options.model or _random_model(folder / "full-size")
        checks = (Measured(report, model, folder, options), WorkerRuns(report, model, folder, options))
        for name, title in SECTIONS.items():
            if not options.only or name in options.only:
                check = next(getattr(each, name) for each in checks if hasattr(each, name))
                report.section(title, check)
    return report.finish()


def _where(device: str) -> str:
    """Say on what and when all this is measured."""
    import torch

    libraries = ", ".join(f"{name} {version(name)}" for name in ("svdq", "torch", "diffusers", "transformers"))
    if device == "cpu":
        return f"{date.today()}: no GPU. This only tries the script and says nothing about GPUs; {libraries}."
    card = torch.cuda.get_device_properties(0)
    return (
        f"{date.today()}: {torch.cuda.device_count()} x {card.name} of {card.total_memory / 2**30:.0f} GiB; "
        f"{libraries}; CUDA {torch.version.cuda}; TF32 in float32's convolutions: {torch.backends.cudnn.allow_tf32}, "
        f"in its matrix products: {torch.backends.cuda.matmul.allow_tf32}."
    )


def _random_model(folder: Path) -> str:
    """Write a model of the published sizes, where it is not there from an earlier run."""
    import torch

    from svdq.pipeline.models.full_size import COMPONENTS, write_full_size_model

    whole = folder.with_name("full-size-is-whole")
    if not whole.exists():
        write_full_size_model(folder, torch.float16, components=COMPONENTS)
        whole.touch()
    print(  # noqa: T201
        "No `--model` was given: UNet, VAE and image encoder have their published sizes and random weights, and what "
        "they make is noise. Time and memory do not depend on that.\n"
    )
    return str(folder)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a StableVideoDiffusionPipeline; default: full size, random weights")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu only tries the script")
    parser.add_argument(
        "--only",
        action="append",
        choices=list(SECTIONS),
        help="do this section; repeatable. What the report has of the others stays",
    )
    parser.add_argument(
        "--scratch", help="folder for what is written on the way, kept for the next run, such as the model"
    )
    parser.add_argument("--ranks", type=int, default=7)
    parser.add_argument("--size", default="1024x576", help="WIDTHxHEIGHT of what is measured")
    parser.add_argument("--frames", type=int, default=25)
    parser.add_argument("--steps", type=int, default=25, help="denoising steps of a video")
    parser.add_argument(
        "--samples", type=int, default=30, help="videos of a measured run, fewer where it takes too long"
    )
    parser.add_argument("--sizes", default="576x320,768x448,1024x576", help="of the sweep over types and sizes")
    parser.add_argument("--parity-size", default="256x256", help="WIDTHxHEIGHT of what is compared")
    parser.add_argument("--parity-frames", type=int, default=14)
    parser.add_argument("--worker-steps", type=int, default=4, help="denoising steps of what a worker makes")
    parser.add_argument("--timeout-s", type=float, default=3600, help="seconds that one command may take")
    parser.add_argument("--photo", type=Path, default=PHOTO, help="what is rendered")
    parser.add_argument("--report", type=Path, default=Path("gpu-check.md"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
