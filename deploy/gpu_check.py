"""Checks what only a machine with a GPU can show: `make gpu-check`, or `python deploy/gpu_check.py --scratch DIR`.

Each task writes its figures into results.json and results.md, a table, in the scratch folder; the output of all
commands is in log.txt and log-*.txt. A task that fails is a row that says why, and the others continue. `--total-s` is
for a machine that is available for minutes: the same command again goes on where the last one ended. With 40 GB of
weights and 15 GB of others for a while, DIR needs 64 GB. gpu_checks/offline.sh is for a machine without network.
"""

import argparse
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from gpu_checks import formats, night, parts, runs
from gpu_checks.check import Check, OutOfTime

from svdq.worker.launcher.gpus import memory_of_gpus


class Section(NamedTuple):
    """Some tasks, and what writes the models that they need."""

    run: Callable[[Check], object]
    write_models: Callable[[Check], object] = lambda _: None


#: What no machine has shown yet first.
SECTIONS: Mapping[str, Section] = {
    "formats": Section(formats.formats, formats.write_models),
    "night": Section(night.night, night.night_model),
    "speed": Section(parts.speed, lambda check: parts.write_models(check, parts.SPEED)),
    "memory": Section(parts.memory, lambda check: parts.write_models(check, parts.MEMORY)),
    "runs": Section(runs.runs),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections; the exit code is 1 if a figure is not as wanted or a task failed, 2 without a GPU."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, default=Path("gpu-check"), help="folder of results and weights")
    parser.add_argument("--total-s", type=float, default=math.inf, help="seconds that all of it may take")
    parser.add_argument("--only", action="append", choices=list(SECTIONS), help="run this section; repeatable")
    parser.add_argument("--again", action="store_true", help="begin failed tasks anew")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu only tries the script")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("Error: torch finds no GPU here; run this on a machine that has one.", file=sys.stderr)  # noqa: T201
        return 2
    check = Check(options.scratch.resolve(), options.device, options.total_s, _where(options.device))
    if options.again:
        check.forget_failed()
    sections = [SECTIONS[name] for name in options.only or SECTIONS]
    if check.on_gpu:  # those of later sections while the first ones run
        threading.Thread(target=lambda: [each.write_models(check) for each in sections], daemon=True).start()
    try:
        for each in sections:
            each.run(check)
    except OutOfTime:
        print("No time is left: the same command again goes on from here.")  # noqa: T201
    return check.finish()


def _where(device: str) -> str:
    """Describe the device, the versions and the date."""
    import torch

    libraries = ", ".join(f"{name} {version(name)}" for name in ("svdq", "torch", "diffusers", "transformers"))
    if device == "cpu":
        return f"{date.today()}: no GPU. This only tries the script and says nothing about GPUs; {libraries}."
    cards = "; ".join(f"{name} of {mib} MiB" for _, name, mib, _ in memory_of_gpus()[0])
    return f"{date.today()}: {cards}; {libraries}; CUDA {torch.version.cuda}; cuDNN {torch.backends.cudnn.version()}."


if __name__ == "__main__":
    sys.exit(main())
