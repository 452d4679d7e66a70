"""Checks what only a machine with a GPU can show: `make gpu-check`, or `python deploy/gpu_check.py --model DIR`.

Runs svdq's own commands, section by section, and writes their output to a Markdown file as it arrives, with the
required figure beside the measured one. A section that fails is reported, and the others continue. On a machine that is
available for minutes, `--scratch DIR --total-s 570` does as much as it can, and the same command again does the rest;
`--only` chooses. gpu_checks/wheels.txt is for a machine without network. Several ranks share a GPU if there are fewer
GPUs than ranks.
"""

import argparse
import contextlib
import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

from gpu_checks import groups, parts
from gpu_checks.check import Check
from gpu_checks.report import Report
from gpu_checks.step_cache import step_cache

from svdq.worker.launcher.gpus import memory_of_gpus

PHOTO = Path(__file__).parent.parent / "docs" / "demo" / "photo.jpg"
#: The title of each section and what it does: the cheap and valuable first, each after those whose figures it needs.
SECTIONS: Mapping[str, tuple[str, Callable[[Check], None]]] = {
    "runs": ("Tiny models on one rank and on several, bound, in rounds and with a kill -9", groups.runs),
    "parity": ("Tiny models against diffusers, and one rank against several", groups.parity),
    "rounds": ("One expert of Wan at a time", groups.rounds),
    "model": ("A step, an encode and a decode of SVD-XT", parts.model),
    "wan": ("Wan 2.2 at its full width", parts.wan),
    "step_cache": ("Skipped steps of Wan: seconds and PSNR", step_cache),
    "attention": ("Candidates for attention", parts.attention),
    "compile": ("Candidates for compiling", parts.compiled),
    "decode": ("A decode in chunks and in float32, and candidates", parts.decode),
    "offload": ("Streamed blocks and int8 weights", parts.offload),
    "burst": ("A worker with a compiled UNet, eight photos and a kill -9", groups.burst),
    "ranks": ("A pipeline of ranks, and the memory of each", groups.pace),
    "memory": ("A worker with a memory limit", groups.memory),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; the exit code is 1 if a section failed or missed a required figure, 2 without a GPU."""
    import torch

    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("Error: torch finds no GPU here; run this on a machine that has one.", file=sys.stderr)  # noqa: T201
        return 2
    with contextlib.ExitStack() as stack:
        scratch = options.scratch or stack.enter_context(tempfile.TemporaryDirectory(prefix="svdq-gpu-check-"))
        folder = Path(scratch).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "sections.json"  # of each section that was begun, whether it has ended with all as wanted
        ended: dict[str, bool] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if not options.only and not ended:
            options.report.unlink(missing_ok=True)
        report = Report(
            options.report, section_s=options.section_s, total_s=options.total_s, where=_where(options.device)
        )
        check = Check(report, folder, options)
        left = sorted((name for name in SECTIONS if not ended.get(name)), key=ended.__contains__)
        for name in options.only or left:
            if report.is_over:
                report.add(f"There is no time left for `{name}`: the same command again measures what is missing.")
                continue
            title, run = SECTIONS[name]
            ended[name] = report.section(title, run, check)
            path.write_text(json.dumps(ended), encoding="utf-8")
    return report.finish()


def _where(device: str) -> str:
    """Describe the device, the versions and the date of the measurements."""
    import torch

    libraries = ", ".join(f"{name} {version(name)}" for name in ("svdq", "torch", "diffusers", "transformers"))
    if device == "cpu":
        return f"{date.today()}: no GPU. This only tries the script and says nothing about GPUs; {libraries}."
    cards = "; ".join(f"{name} of {mib} MiB" for _, name, mib, _ in memory_of_gpus()[0])
    return f"{date.today()}: {cards}; {libraries}; CUDA {torch.version.cuda}; cuDNN {torch.backends.cudnn.version()}."


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a StableVideoDiffusionPipeline; default: full size, random weights")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu only tries the script")
    parser.add_argument(
        "--only",
        action="append",
        choices=list(SECTIONS),
        help="run this section; repeatable. It is added to the report",
    )
    parser.add_argument("--scratch", help="folder for the model and other files, kept for the next run")
    parser.add_argument("--section-s", type=float, default=570, help="seconds that one section may take")
    parser.add_argument("--total-s", type=float, default=math.inf, help="seconds that all of them may take")
    parser.add_argument("--ranks", type=int, default=7)
    parser.add_argument("--size", default="1024x576", help="WIDTHxHEIGHT of the measurements")
    parser.add_argument("--frames", type=int, default=25)
    parser.add_argument("--steps", type=int, default=25, help="largest number of denoising steps of a video")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each part")
    parser.add_argument("--parity-size", default="256x256", help="WIDTHxHEIGHT of the comparisons")
    parser.add_argument("--worker-steps", type=int, default=4, help="denoising steps of the worker's videos")
    parser.add_argument("--photo", type=Path, default=PHOTO, help="photo to render")
    parser.add_argument("--report", type=Path, default=Path("gpu-check.md"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
