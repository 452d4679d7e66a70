"""`svdq bench`: does runs through loop or daemon, and computes their figures."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from svdq.pipeline.device import check_device
from svdq.pipeline.errors import InputError
from svdq.pipeline.installed import headless_pyplot
from svdq.pipeline.models.base import Role
from svdq.pipeline.models.families import parameters_of
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.model_names import resolve
from svdq.pipeline.models.resolved_model import ResolvedModel
from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.planning.binding import Components, bind, split_steps
from svdq.pipeline.planning.costs import Costs
from svdq.pipeline.trace import span_events, trace_text
from svdq.producer.files import write_file
from svdq.worker.bench.daemon_runs import run_daemon
from svdq.worker.bench.figures import Burst, RankLog, Run, burst_times, busy_share, make_bursts, make_run
from svdq.worker.bench.loop_runs import Workload, run_loop

#: Frames of a video unless the options say otherwise, where the model's family allows it.
DEFAULT_FRAMES = 14


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The options of `svdq bench`; units are in the names."""

    model: str
    ranks: tuple[int, ...]
    steps: int
    step_ms: float
    encode_ms: float
    decode_ms: float
    #: Slowdown of each rank, or None when all are equal.
    rank_speed: tuple[float, ...] | None
    samples: int
    #: None: two rounds of the ranks.
    warmup_samples: int | None
    #: None: 14, or the largest smaller number that the model's family allows.
    frames: int | None
    size: str
    device: str
    #: loop or daemon.
    through: str
    #: Numbers of videos of bursts, or None for a run of `samples`.
    burst: tuple[int, ...] | None = None
    #: The steps of each of two simulated experts, in proportion, to which ranks are bound; None: all ranks have all.
    segments: tuple[int, int] | None = None

    @property
    def simulated(self) -> bool:
        """Whether the costs are set and not measured."""
        return self.model == "simulated"

    @property
    def bound_steps(self) -> tuple[int, int] | None:
        """The steps of each expert in a video, if ranks are bound."""
        return None if self.segments is None else split_steps(self.steps, self.segments)

    def num_warmup(self, ranks: int) -> int:
        """Count the videos that are left out of the steady figures at each end, or that are the first burst."""
        return 2 * ranks if self.warmup_samples is None else self.warmup_samples

    def bursts(self, ranks: int) -> tuple[int, ...]:
        """Return the numbers of videos that are queued at once, each for an idle group."""
        if self.burst is None:
            return (self.samples,)
        return (max(1, self.num_warmup(ranks)), *self.burst)


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """All runs or bursts of one call, in order, and the logs of the last run."""

    runs: list[Run]
    bursts: list[Burst]
    logs: list[RankLog]


def run_bench(options: BenchOptions) -> BenchReport:
    """Do the runs.

    Raises:
        InputError: the options do not go together.
        SvdqError: a run failed.
    """
    if options.rank_speed is not None and (
        not options.simulated or any(len(options.rank_speed) != ranks for ranks in options.ranks)
    ):
        raise InputError(
            f"--rank-speed {','.join(map(str, options.rank_speed))} needs the simulated model and one number for each "
            f"of the {options.ranks[0]} ranks."
        )
    if options.rank_speed is not None and options.through == "daemon":
        raise InputError("--rank-speed goes through the loop only; leave out --through daemon.")
    if options.segments is not None and (
        not options.simulated or min(options.ranks) < 2 or 0 in split_steps(options.steps, options.segments)
    ):
        raise InputError(
            f"--segments {options.segments[0]}+{options.segments[1]} needs the simulated model, at least two ranks, "
            "and a step for each expert."
        )
    for ranks in options.ranks if options.burst is None else ():
        needed = 2 * options.num_warmup(ranks) + ranks + 2
        if options.samples < needed:
            raise InputError(
                f"--samples {options.samples} is too few to measure {ranks} ranks without the first and the last "
                f"{options.num_warmup(ranks)}; give at least {needed}."
            )
    check_device(options.device)
    with tempfile.TemporaryDirectory(prefix="svdq-tiny-") as folder:
        name = options.model
        if name == "tiny":
            from svdq.pipeline.models.svd.tiny import write_tiny_model

            name = str(Path(folder, "tiny"))
            write_tiny_model(Path(name))
        on_gpus = options.device != "cpu" and torch.cuda.is_available()
        model = resolve(name, on_gpus=on_gpus)
        runs: list[Run] = []
        bursts: list[Burst] = []
        logs: list[RankLog] = []
        for ranks in options.ranks:
            workload = _workload(options, model, ranks)
            run = run_daemon if options.through == "daemon" else run_loop
            logs = run(workload)
            if options.burst is None:
                runs.append(
                    make_run(
                        logs,
                        model=options.model,
                        through=options.through,
                        steps=options.steps,
                        warmup_samples=options.num_warmup(ranks),
                        costs=_costs(options, ranks),
                        segments=options.bound_steps,
                    )
                )
                continue
            bursts += make_bursts(
                logs,
                run(workload, replicas=True),
                through=options.through,
                steps=options.steps,
                videos=workload.bursts,
                costs=_costs(options, ranks),
                segments=options.bound_steps,
            )
        return BenchReport(runs=runs, bursts=bursts, logs=logs)


def _workload(options: BenchOptions, model: ResolvedModel, ranks: int) -> Workload:
    kind = parameters_of(model)
    frames = options.frames or DEFAULT_FRAMES - (DEFAULT_FRAMES - 1) % kind.frame_step
    parameters = kind.of_shape(f"{options.size}x{frames}").model_copy(update={"steps": options.steps})
    speeds = options.rank_speed or (1.0,) * ranks
    timings = f"step_ms={options.step_ms},encode_ms={options.encode_ms},decode_ms={options.decode_ms}"
    if options.segments is not None:
        timings += f",segments={options.segments[0]}+{options.segments[1]}"
    models = tuple(
        resolve(f"simulated:{timings},slowdown={speed}") if options.simulated else model for speed in speeds[:ranks]
    )
    return Workload(
        models=models,
        components=_components(models[0], parameters, ranks) if options.segments is not None else (),
        parameters=parameters,
        bursts=options.bursts(ranks),
        device=options.device,
    )


def _components(model: ResolvedModel, parameters: VideoParameters, ranks: int) -> tuple[Components, ...]:
    """Bind ranks to one expert each, as a worker does whose ranks have no room for both."""
    simulated = open_model(model, Role(), torch.device("cpu"), torch.float32)
    return tuple(bind(simulated.segments(parameters), [False] * ranks, simulated.info.prior))


def _costs(options: BenchOptions, ranks: int) -> Costs | None:
    """Return the configured costs of a video; None for a model whose costs are measured."""
    if not options.simulated:
        return None
    return Costs(
        step_s=tuple(options.step_ms / 1000 * speed for speed in options.rank_speed or (1.0,) * ranks),
        encode_s=options.encode_ms / 1000,
        decode_s=options.decode_ms / 1000,
    )


def write_results(
    report: BenchReport, *, json_path: Path | None, plot_path: Path | None, trace_path: Path | None
) -> None:
    """Write the files that were asked for.

    Raises:
        InputError: one cannot be written.
    """
    if json_path is not None:
        document = {"runs": [asdict(run) for run in report.runs], "bursts": [asdict(burst) for burst in report.bursts]}
        write_file(json_path, [json.dumps(document, indent=2), "\n"])
    if plot_path is not None:
        try:
            _plot(report, plot_path)
        except OSError as error:
            raise InputError(f"The file {str(plot_path)!r} cannot be written ({error.strerror}).") from error
    if trace_path is not None:
        events = [event for rank, log in enumerate(report.logs) for event in span_events(rank, log.spans)]
        write_file(trace_path, [trace_text(events)])


def _plot(report: BenchReport, path: Path) -> None:
    """Plot the last burst, or three times the first video's time of the last run."""
    if report.bursts:
        burst = report.bursts[-1]
        num_earlier = sum(len(log.finished_s) for log in report.logs) - burst.videos
        start_s, end_s = burst_times(report.logs, [num_earlier, burst.videos])[-1]
        title = f"{burst.videos} videos, {burst.ranks} ranks: {burst.ratio:.3f} of the shortest possible time"
    else:
        run = report.runs[-1]
        start_s = min(span.start_s for log in report.logs for span in log.spans)
        end_s = start_s + 3 * run.first_sample_s
        title = (
            f"{run.model}, {run.ranks} {'bound ' if run.segments else ''}ranks, "
            f"{run.steps} steps of {run.step_ms:.4g} ms, "
            f"encode {run.encode_ms:.4g} ms, decode {run.decode_ms:.4g} ms: efficiency {run.efficiency:.3f}"
        )
    plot_timeline(report.logs, path, title, start_s=start_s, end_s=end_s)


#: How a bar of each kind of work looks, besides the color of its video.
_LOOKS: dict[str, dict[str, Any]] = {
    # Above the steps between which rank 0 encodes.
    "encode": {"hatch": "////", "alpha": 1.0, "zorder": 2},
    "steps": {"alpha": 0.6},
    "decode": {"hatch": "....", "alpha": 1.0},
}


def plot_timeline(logs: Sequence[RankLog], path: Path, title: str, *, start_s: float, end_s: float) -> None:
    """Write the timeline of a run as PNG, from `start_s` to `end_s`, in seconds since the epoch.

    Raises:
        InputError: matplotlib is not installed.
    """
    pyplot = headless_pyplot()
    tab20 = pyplot.get_cmap("tab20").colors
    colors = tab20[::2] + tab20[1::2]  # so that videos in a row differ in hue
    figure, axes = pyplot.subplots(figsize=(12, 0.5 * len(logs) + 1.8))
    spans = [[span for span in log.spans if span.kind and start_s <= span.start_s < end_s] for log in logs]
    by_start = sorted((span for row in spans for span in row), key=lambda span: span.start_s)
    numbers = {job: number for number, job in enumerate(dict.fromkeys(span.job_id for span in by_start))}
    for rank, row in enumerate(spans):
        for span in row:
            axes.broken_barh(
                [(span.start_s - start_s, span.seconds)],
                (rank - 0.4, 0.8),
                facecolors=colors[numbers[span.job_id] % len(colors)],
                edgecolor="white",
                linewidth=0.5,
                **_LOOKS[span.kind],
            )
        idle = 1 - busy_share(logs[rank].spans, start_s, end_s)
        axes.text(1.005, rank, f"{idle:.1%} idle", transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    axes.set(
        xlim=(0, end_s - start_s),
        ylim=(len(logs) - 0.5, -0.5),
        xlabel="seconds",
        ylabel="rank",
        yticks=range(len(logs)),
    )
    axes.set_title(title, fontsize=10)
    handles = [
        pyplot.Rectangle((0, 0), 1, 1, facecolor="gray", edgecolor="white", label=name, **look)
        for name, look in _LOOKS.items()
    ]
    figure.legend(handles=handles, loc="lower right", ncols=len(handles), fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
