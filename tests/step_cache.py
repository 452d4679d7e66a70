"""Measures how many more videos an hour two ranks make where steps are skipped, with real compute on processors.

    python -m tests.step_cache                 about 5 minutes on two cores
    python -m tests.step_cache --turns 1

An untrained Wan whose transformers are wide, so that a step takes longer than 20 ms, renders the same videos of 40
steps at a `step_cache` of 0 and of 0.06 in turns: one thread a rank, through the loop without Redis and files.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median

import torch
from diffusers import WanTransformer3DModel

from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.resolved_model import ResolvedModel
from svdq.pipeline.models.wan.family import WanParameters
from svdq.pipeline.models.wan.layout import HIGH_NOISE, LOW_NOISE
from svdq.pipeline.models.wan.tiny import write_tiny_wan
from svdq.worker.bench.figures import burst_times, check_failures
from svdq.worker.bench.loop_runs import Workload, run_loop

THRESHOLDS = (0.0, 0.06)
VIDEO = WanParameters(prompt="A wave breaks.", seed=0, steps=40, frames=5, width=64, height=64)
WIDE = {"num_attention_heads": 4, "attention_head_dim": 128, "ffn_dim": 2048, "num_layers": 4}


def write_wide_wan(folder: Path) -> None:
    """Write a tiny Wan with wide transformers."""
    write_tiny_wan(folder)
    for component in (HIGH_NOISE, LOW_NOISE):
        config = json.loads((folder / component / "config.json").read_text())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            WanTransformer3DModel.from_config(config | WIDE).save_pretrained(folder / component)


def measure(model: ResolvedModel, threshold: float, ranks: int, videos: int) -> tuple[float, float]:
    """Render one video for each rank, then a burst; return videos an hour of the burst, and mean seconds a step."""
    bursts = (ranks, videos)
    parameters = VIDEO.model_copy(update={"step_cache": threshold})
    logs = run_loop(Workload(models=(model,) * ranks, parameters=parameters, bursts=bursts))
    check_failures(logs)
    started_s, ended_s = burst_times(logs, bursts)[-1]
    spans = [span for log in logs for span in log.spans if span.num_steps]
    step_s = sum(span.seconds for span in spans) / sum(span.num_steps for span in spans)
    return 3600 * videos / (ended_s - started_s), step_s


def main() -> None:
    """Measure in turns, and print each turn and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--videos", type=int, default=8)
    options = parser.parse_args()
    paces: list[list[float]] = []
    with tempfile.TemporaryDirectory(prefix="svdq-wan-") as folder:
        write_wide_wan(Path(folder, "wan"))
        model = resolve(str(Path(folder, "wan")))
        for turn in range(options.turns):
            paces.append([])
            for threshold in THRESHOLDS:
                pace, step_s = measure(model, threshold, options.ranks, options.videos)
                paces[-1].append(pace)
                made = f"{pace:.1f} videos an hour, {1000 * step_s:.1f} ms a step on average"
                print(f"turn {turn + 1}, step_cache {threshold:g}: {made}", flush=True)
    ratios = [after / before for before, after in paces]
    print(f"{median(ratios):.2f} times the videos an hour ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
