"""Checks what only a machine with a GPU can show: `make gpu-check`, or `python deploy/gpu_check.py --model DIR`.

Runs svdq's own commands, section by section, and writes their output to a Markdown file as it arrives, with the
required figure beside the measured one. A section that fails is reported, and the others continue. A section takes at
most `--section-s`, so that `--only` with `--scratch` suits a machine that is available for minutes. Several ranks
share a GPU if there are fewer GPUs than ranks.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
from gpu_check_report import Report

PHOTO = Path(__file__).parent.parent / "docs" / "demo" / "photo.jpg"
#: The sections, ordered so that each one finds the figures of earlier ones that it needs.
SECTIONS = {
    "model": "A step, an encode and a decode",
    "compile": "A compiled step, and one with int8 weights",
    "parity": "Against diffusers, and one rank against several",
    "ranks": "A pipeline of ranks, and the memory of each",
    "burst": "A worker with a compiled UNet and two photos",
    "memory": "A worker with a memory limit",
}
#: Required pace relative to one rank: of ranks that share a card, and per rank of ranks with a card each.
WANTED_PACE = 0.9
#: Required speed-up of a step by compiling.
WANTED_SPEEDUP = 1.3
#: Largest memory of a middle rank relative to its weights and the larger of a step's and a decode's tensors.
WANTED_MEMORY = 1.05
#: Bytes of GPU memory that each process takes besides its tensors.
CONTEXT_BYTES = 700 * 2**20
#: Share of a section's time in which several ranks compute; the rest is for their start, and for one rank before them.
COMPUTING_SHARE = 0.5


def steps_in_time(one: Mapping[str, Any], ranks: int, gpus: int, samples: int, section_s: float) -> int:
    """Choose the number of denoising steps so that several ranks finish the videos within a section.

    Args:
        one: the result of `svdq bench` for one rank.
        ranks: K.
        gpus: number of cards that they share; 0 for a CPU.
        samples: videos.
        section_s: seconds of the section.
    """
    ends_s, step_s = (one["encode_ms"] + one["decode_ms"]) / 1000, one["step_ms"] / 1000
    video_s = COMPUTING_SHARE * section_s * max(1, min(ranks, gpus)) / samples
    return max(1, min(one["steps"], int((video_s - ends_s) / step_s)))


class Check:
    """The sections. Each worker has its own home and queue."""

    def __init__(self, report: Report, model: str, folder: Path, options: argparse.Namespace) -> None:
        self._report = report
        self._model = model
        self._folder = folder
        self._options = options
        self._on_gpu = options.device == "cuda"
        self._common = ["--model", model, "--device", options.device]
        self._shape = ["--size", options.size, "--frames", options.frames]

    def model(self) -> None:
        """Measure the three parts in each dtype, float16 first."""
        chunks = [f"--decode-chunk-size={size}" for size in (1, 8, self._options.frames)]
        dtypes = [f"--dtype={name}" for name in (("fp16", "bf16") if self._on_gpu else ("fp32",))]
        for row in self._rows("model", *dtypes, *chunks):
            if not row["finite"]:
                what = f"Finite results of the {row['part']} in {row['dtype']}"
                self._report.judge(what, "no", "yes with trained weights", None)

    def compile(self) -> None:
        """Measure a compiled step and one with int8 weights against a step as diffusers computes it."""
        ways = ["--compile=off", "--compile=blocks", "--approximate=int8"]
        plain, *others = self._rows("compile", "--part=step", *ways)
        for row in others:
            name = "compiled blocks" if row["compiled"] == "blocks" else "int8"
            speedup, wanted = plain["seconds"] / row["seconds"], WANTED_SPEEDUP if name != "int8" else None
            self._report.judge(
                f"Speed of a step with {name} over diffusers' own (largest difference {row['difference']})",
                f"{speedup:.2f}",
                f"at least {wanted}" if wanted else "",
                speedup >= wanted if wanted and self._on_gpu else None,
            )

    def parity(self) -> None:
        """Compare one rank with diffusers, and several ranks with one."""
        options = self._options
        ranks, _ = self._ranks_that_fit()
        common = [*self._common, "--image", options.photo, "--size", options.parity_size, "--steps", 8]
        for count, against in ((1, "diffusers"), (ranks, "one rank")):
            more = ["--ranks", count, *(["--alone"] if against == "one rank" else [])]
            said = self._report.run("svdq.pipeline.compare", *common, *more, "--tolerance", 255)
            difference = re.findall(r"largest pixel difference over .*: (\d+)$", said, re.MULTILINE)[-1]
            # Half precision on a GPU may differ from diffusers; the number of ranks must not change a pixel.
            good = difference == "0" if against == "one rank" or not self._on_gpu else None
            self._report.judge(f"Largest pixel difference of {count} ranks to {against}, of 255", difference, "0", good)

    def ranks(self) -> None:
        """Measure one rank, then several on one card or on all cards, and the memory of each."""
        options, report = self._options, self._report
        ranks, gpus = self._ranks_that_fit()
        if ranks < options.ranks:
            report.add(f"Memory suffices for {ranks} of {options.ranks} ranks, so this section runs with fewer.")
        one = self._pipeline(1, options.steps, samples=5, warmup=1)
        # The pipeline has to be full, and then `svdq bench` counts the time of K videos at least twice.
        samples = 3 * ranks + 2
        steps = steps_in_time(one, ranks, gpus, samples, options.section_s)
        many = self._pipeline(ranks, steps, samples=samples, warmup=ranks)
        alone_s = (steps * one["step_ms"] + one["encode_ms"] + one["decode_ms"]) / 1000
        share = alone_s / many["per_sample_mean_s"]
        wanted = WANTED_PACE * (ranks if gpus >= ranks else 1)
        where = "with a card each" if gpus >= ranks else "which share a card"
        report.judge(
            f"Videos an hour of {ranks} ranks {where} over those of one",
            f"{share:.2f}",
            f"at least {wanted:.1f}",
            share >= wanted if self._on_gpu else None,
        )
        if many["gpu_mb"]:
            self.memory_of_ranks(many["gpu_mb"])

    def memory_of_ranks(self, gpu_mb: Sequence[float]) -> None:
        """Report the peak GPU memory of each rank, in MiB, and compare a middle rank with a step alone."""
        rows = "\n".join(f"| {rank} | {mib:,.0f} |" for rank, mib in enumerate(gpu_mb))
        self._report.add(f"| rank | peak GPU memory of its tensors, MiB |\n|---|---|\n{rows}")
        step = self._row("step")
        if step is None or len(gpu_mb) < 3:
            self._report.add("No middle rank, or no step measured alone: its memory is compared with nothing.")
            return
        # It warms up its decoder, too, whether it decodes a video or not.
        decodes = [row for row in self._measured("model") if row["part"] == "decode"]
        weight_bytes = step["weight_bytes"] + max((row["weight_bytes"] for row in decodes), default=0)
        alone_bytes = weight_bytes + max(row["peak_bytes"] for row in (step, *decodes))
        middle, alone = gpu_mb[len(gpu_mb) // 2], alone_bytes / 2**20
        wanted = f"its weights and the larger of a step's and a decode's tensors, {alone:,.0f}, within 5%"
        self._report.judge("Memory of a middle rank, MiB", f"{middle:,.0f}", wanted, middle <= WANTED_MEMORY * alone)

    def burst(self) -> None:
        """Render two photos with compiled blocks, and again in reverse order; the second run uses the compile cache."""
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
            what = f"Largest pixel difference of the {which} photo, compiled, between its turns as first and as second"
            self._report.judge(what, str(difference), "0", difference == 0)
        differ = not np.array_equal(_frames(first[photos[0].stem]), _frames(first[photos[1].stem]))
        self._report.judge("Two photos make two videos", "yes" if differ else "no", "yes", differ)

    def memory(self) -> None:
        """Render a video with too little memory to decode all frames at once, which reduces the chunk size."""
        frames = self._options.frames
        parts = [self._row("step"), self._row("encode"), self._row("decode", 8), self._row("decode", frames)]
        measured = [row for row in parts if row is not None and row["peak_bytes"] is not None]
        if len(measured) < len(parts):
            self._report.add("The section `model` has not measured all parts on a GPU here: there is no limit to set.")
            return
        step, encode, some, whole = measured
        weights = step["weight_bytes"] + encode["weight_bytes"] + whole["weight_bytes"]
        least = max(step["peak_bytes"], encode["peak_bytes"], some["peak_bytes"])
        limit = weights + (least + whole["peak_bytes"]) // 2
        [made] = self._rendered("limited", [self._options.photo], "--memory-limit", limit).values()
        chunk = made["job"]["decode_chunk_size"] or frames
        what = f"Frames decoded at a time with {limit / 1e9:.2f} GB"
        self._report.judge(what, str(chunk), f"fewer than {frames}", chunk < frames)
        if taken := made.get("memory_bytes"):
            most, wanted = weights + max(taken.values()), f"at most {limit / 1e9:.2f} and a tenth"
            self._report.judge(
                "Memory of its tensors with the weights, GB", f"{most / 1e9:.2f}", wanted, most <= 1.1 * limit
            )

    def _rows(self, name: str, *arguments: object) -> list[dict[str, Any]]:
        """Run `svdq bench model` and return the rows that could be measured, also if the time limit ended the run."""
        path = self._folder / f"{name}.json"
        path.unlink(missing_ok=True)
        command = ["svdq.cli", "bench", "model", *self._common, *self._shape, "--repeats", self._options.repeats]
        try:
            self._report.run(*command, *arguments, "--json", path)
        except RuntimeError as error:
            if not path.exists():
                raise
            self._report.fail(str(error))
        rows = self._measured(name)
        if not rows:
            raise RuntimeError("nothing could be measured")
        return rows

    def _measured(self, name: str) -> list[dict[str, Any]]:
        """Return the rows that `svdq bench model` has measured for a section, in this run or an earlier one."""
        path = self._folder / f"{name}.json"
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else ()
        return [row for row in rows if not row["failure"]]

    def _row(self, part: str, chunk_size: int | None = None) -> dict[str, Any] | None:
        """Return the first row of a part from the section `model`."""
        wanted = (part, chunk_size)
        return next((row for row in self._measured("model") if (row["part"], row["decode_chunk_size"]) == wanted), None)

    def _pipeline(self, ranks: int, steps: int, *, samples: int, warmup: int) -> dict[str, Any]:
        path = self._folder / "bench.json"
        counts = ["--steps", steps, "--ranks", ranks, "--samples", samples, "--warmup-samples", warmup]
        self._report.run("svdq.cli", "bench", *self._common, *self._shape, *counts, "--json", path)
        run: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["runs"][0]
        return run

    def _ranks_that_fit(self) -> tuple[int, int]:
        """Return the number of ranks that the cards can hold, at least two, and the number of cards."""
        import torch

        wanted, step = self._options.ranks, self._row("step")
        gpus = torch.cuda.device_count() if self._on_gpu else 0
        if not gpus or gpus >= wanted or step is None:
            return wanted, gpus
        free = min(torch.cuda.mem_get_info(number)[0] for number in range(gpus))
        each = step["weight_bytes"] + step["peak_bytes"] + CONTEXT_BYTES
        # The first rank also has the encoder, and the last one decodes all frames at once.
        encode, decode = self._row("encode"), self._row("decode", self._options.frames)
        free -= 0 if encode is None else encode["weight_bytes"]
        free -= 0 if decode is None else max(0, decode["peak_bytes"] - step["peak_bytes"])
        return max(2, min(wanted, gpus * int(free // each))), gpus

    def _rendered(self, name: str, photos: Sequence[Path], *worker: object) -> dict[str, dict[str, Any]]:
        """Queue photos, render them with a worker, and return the sidecar of each video by its photo's name."""
        options, home = self._options, self._folder / name
        shutil.rmtree(home, ignore_errors=True)  # left by a killed run
        ours = {"SVDQ_HOME": str(home), "SVDQ_STORAGE": str(home / "storage"), "SVDQ_MODEL": self._model}
        ours["TORCHINDUCTOR_CACHE_DIR"] = str(self._folder / "compiled")
        # The user's settings are for other queues.
        environment = {name: text for name, text in os.environ.items() if not name.startswith("SVDQ_")} | ours
        video = ["--size", options.size, "--frames", options.frames, "--steps", options.worker_steps, "--seed", 1]
        try:
            self._report.run("svdq.cli", "submit", *photos, *video, "--format", "png", environment=environment)
            command = ["worker", "--burst", "--ranks", 1, "--device", options.device, *worker]
            self._report.run("svdq.cli", *command, environment=environment)
        finally:
            self._report.run("svdq.cli", "redis", "stop", environment=environment)
        sidecars = [json.loads(path.read_text(encoding="utf-8")) for path in home.glob("storage/outputs/*.json")]
        found = {sidecar["job"]["name"]: sidecar for sidecar in sidecars}
        if missing := sorted({photo.stem for photo in photos} - set(found)):
            raise RuntimeError(f"no video was made of {', '.join(missing)}")
        return found


def _frames(sidecar: dict[str, Any]) -> Any:
    """Read the frames of a video: (F, H, W, 3), uint8."""
    (folder,) = sidecar["outputs"]
    return np.stack([np.asarray(PIL.Image.open(path)) for path in sorted(Path(folder).glob("*.png"))])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; the exit code is 1 if a section failed or missed a required figure, 2 without a GPU."""
    import torch

    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("Error: torch finds no GPU here; run this on a machine that has one.", file=sys.stderr)  # noqa: T201
        return 2
    if not options.only:
        options.report.unlink(missing_ok=True)
    report = Report(options.report, section_s=options.section_s, where=_where(options.device))
    with contextlib.ExitStack() as stack:
        scratch = options.scratch or stack.enter_context(tempfile.TemporaryDirectory(prefix="svdq-gpu-check-"))
        folder = Path(scratch).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        check = Check(report, options.model or _random_model(folder / "full-size"), folder, options)
        for name, title in SECTIONS.items():
            if not options.only or name in options.only:
                report.section(title, getattr(check, name))
    return report.finish()


def _where(device: str) -> str:
    """Describe the device, the versions and the date of the measurements."""
    import torch

    libraries = ", ".join(f"{name} {version(name)}" for name in ("svdq", "torch", "diffusers", "transformers"))
    if device == "cpu":
        return f"{date.today()}: no GPU. This only tries the script and says nothing about GPUs; {libraries}."
    card = torch.cuda.get_device_properties(0)
    return (
        f"{date.today()}: {torch.cuda.device_count()} x {card.name} of {card.total_memory / 2**30:.0f} GiB; "
        f"{libraries}; CUDA {torch.version.cuda}; cuDNN {torch.backends.cudnn.version()}."
    )


def _random_model(folder: Path) -> str:
    """Write a model of the published sizes, unless it exists from an earlier run."""
    import torch

    from svdq.pipeline.models.svd.full_size import COMPONENTS, write_full_size_model

    whole = folder.with_name("full-size-is-whole")
    if not whole.exists():
        write_full_size_model(folder, torch.float16, components=COMPONENTS)
        whole.touch()
    print("Without `--model`, the published sizes get random weights, and the videos show noise.\n")  # noqa: T201
    return str(folder)


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
