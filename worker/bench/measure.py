"""`svdq bench`: does a run or bursts through loop or daemon, and writes and plots the figures."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from svdq.pipeline.errors import InputError, how_to_install
from svdq.pipeline.models.families import family_named, parameters_of
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.resolved_model import ResolvedModel
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.planning.binding import Components, bind, split_steps
from svdq.pipeline.planning.capacity import VideoCosts
from svdq.pipeline.planning.costs import Costs
from svdq.pipeline.trace import span_events, trace_text
from svdq.producer.files import write_file
from svdq.worker.bench import figures
from svdq.worker.bench.daemon_runs import run_daemon
from svdq.worker.bench.loop_runs import Workload, run_loop
from svdq.worker.device import check_device

DEFAULT_FRAMES = 14  # frames of a video unless the options say otherwise, where the model's family allows it


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The options of `svdq bench`."""

    model: str
    ranks: int
    steps: int
    step_ms: float
    encode_ms: float
    decode_ms: float
    rank_speed: tuple[float, ...] | None = None  # None: all are equal
    samples: int
    warmup_samples: int | None = None  # None: two rounds of the ranks
    frames: int | None = None  # None: 14, or fewer if the model's family wants it
    size: str
    device: str
    through: str  # loop or daemon
    burst: tuple[int, ...] | None = None  # numbers of videos of bursts, or None for a run of `samples`
    #: The steps of each of two simulated experts, in proportion; None: all ranks have all.
    segments: tuple[int, int] | None = None
    experts: str = "bound"  # whether ranks hold one expert each, or one rank works in rounds: bound or rounds
    load_ms: float = 0.0  # of the encoders and of each expert in rounds
    skipped: int = 0  # simulated steps that cost nothing
    costs: tuple[float, ...] = ()  # of simulated steps, relative to the first one; none: all cost as much

    @property
    def is_simulated(self) -> bool:
        """Whether the costs are set and not measured."""
        return self.model == "simulated"

    @property
    def num_warmup(self) -> int:
        """Number of videos that are left out of the steady figures at each end, or that are the first burst."""
        return 2 * self.ranks if self.warmup_samples is None else self.warmup_samples

    def check(self) -> None:
        """Raise an InputError if the options do not go together."""
        if self.rank_speed is not None and (not self.is_simulated or len(self.rank_speed) != self.ranks):
            raise InputError(
                f"--rank-speed {','.join(map(str, self.rank_speed))} needs the simulated model and one number for each "
                f"of the {self.ranks} ranks."
            )
        if self.rank_speed is not None and self.through == "daemon":
            raise InputError("--rank-speed goes through the loop only; leave out --through daemon.")
        in_rounds = self.experts == "rounds"
        if self.segments is not None and (
            not self.is_simulated or (self.ranks < 2 and not in_rounds) or 0 in split_steps(self.steps, self.segments)
        ):
            raise InputError(
                f"--segments {self.segments[0]}+{self.segments[1]} needs the simulated model, at least two ranks or "
                "--experts rounds, and a step for each expert."
            )
        if in_rounds and (self.segments is None or self.ranks > 1):
            raise InputError("--experts rounds needs --ranks 1, and two experts, such as --segments 15+25.")
        if self.load_ms and not in_rounds:
            raise InputError(f"--load-ms {self.load_ms:g} needs --experts rounds: other ranks load only once.")
        if self.skipped and not self.is_simulated:
            raise InputError(f"--skipped {self.skipped} needs the simulated model.")
        if self.skipped > (most := len(self._skippable())):
            raise InputError(f"--skipped {self.skipped} is too many: of {self.steps} steps, {most} can be skipped.")
        if self.costs and (not self.is_simulated or self.skipped or len(self.costs) != self.steps):
            raise InputError(
                f"--step-ms of {len(self.costs)} steps needs the simulated model, no --skipped, and as many --steps, "
                f"here {self.steps}."
            )
        needed = 2 * self.num_warmup + self.ranks + 2
        if self.burst is None and self.samples < needed:
            raise InputError(
                f"--samples {self.samples} is too few to measure {self.ranks} ranks without the first and the last "
                f"{self.num_warmup}; give at least {needed}."
            )
        check_device(self.device)

    def _skippable(self) -> list[int]:
        """Return the steps that MagCache may skip, those first that it skips first.

        The first fifth of each expert's steps is computed, and then every third one at least.
        """
        first = self.steps if self.segments is None else split_steps(self.steps, self.segments)[0]
        places = []
        for start, stop in ((0, first), (first, self.steps)):
            number, kept = stop - start, math.ceil((stop - start) / 5)
            places += [(each / number, start + each) for each in range(kept, number) if (each - kept) % 3 < 2]
        return [step for _, step in sorted(places)]

    def step_costs(self) -> tuple[float, ...]:
        """Return the relative costs of simulated steps; none: each costs 1."""
        if self.costs:
            return self.costs
        skipped = self._skippable()[: self.skipped]
        return tuple(float(step not in skipped) for step in range(self.steps)) if skipped else ()


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """The figures of a run, or of bursts in order, and the logs of its ranks."""

    model: str
    runs: list[figures.Run]
    bursts: list[figures.Burst]
    logs: list[figures.RankMeasurements]


def run_bench(options: BenchOptions) -> BenchReport:
    """Do the run or the bursts; raise an SvdqError if the options do not go together or a video failed."""
    options.check()
    workload = _workload(options)
    logs = (run_daemon if options.through == "daemon" else run_loop)(workload)
    figures.check_failures(logs)
    segments = None if options.segments is None else split_steps(options.steps, options.segments)
    steady = figures.steady_part(logs, options.num_warmup) if options.burst is None else ()
    costs = _costs(options) if options.is_simulated else figures.measured_costs(logs, *steady)
    video = VideoCosts(steps=options.steps, step_costs=options.step_costs(), costs=costs, segments=segments)
    runs = [figures.make_run(logs, video, options.num_warmup)] if options.burst is None else []
    bursts = figures.make_bursts(logs, video, workload.bursts) if options.burst is not None else []
    return BenchReport(model=options.model, runs=runs, bursts=bursts, logs=logs)


def _workload(options: BenchOptions) -> Workload:
    ranks, models = options.ranks, _models(options)
    kind = parameters_of(models[0])
    frames = options.frames or DEFAULT_FRAMES - (DEFAULT_FRAMES - 1) % kind.frame_step
    parameters = kind.of_shape(f"{options.size}x{frames}").model_copy(update={"steps": options.steps})
    if models[0].family and family_named(models[0].family).needs_last_photo(models[0].facts):
        parameters = parameters.model_copy(update={"loop": True})
    components: tuple[Components, ...] = ()
    if options.segments is not None and options.experts == "bound":
        # As a worker binds ranks that have no room for both experts.
        model = open_model(models[0], Role(), torch.device("cpu"), torch.float32)
        components = tuple(bind(model.segments(parameters), [False] * ranks, model.info.prior))
    return Workload(
        models=models,
        components=components,
        in_rounds=options.experts == "rounds",
        parameters=parameters,
        bursts=(options.samples,) if options.burst is None else (max(1, options.num_warmup), *options.burst),
        device=options.device,
    )


def _models(options: BenchOptions) -> tuple[ResolvedModel, ...]:
    if not options.is_simulated:
        on_gpus = options.device != "cpu" and torch.cuda.is_available()
        return (resolve(options.model, on_gpus=on_gpus),) * options.ranks
    timings = f"step_ms={options.step_ms},encode_ms={options.encode_ms},decode_ms={options.decode_ms}"
    if options.segments is not None:
        timings += f",segments={options.segments[0]}+{options.segments[1]},load_ms={options.load_ms}"
    if step_costs := options.step_costs():
        timings += f",costs={'+'.join(f'{cost:g}' for cost in step_costs)}"
    speeds = options.rank_speed or (1.0,) * options.ranks
    return tuple(resolve(f"simulated:{timings},slowdown={speed}") for speed in speeds)


def _costs(options: BenchOptions) -> Costs:
    return Costs(
        step_s=tuple(options.step_ms / 1000 * speed for speed in options.rank_speed or (1.0,) * options.ranks),
        encode_s=options.encode_ms / 1000,
        decode_s=options.decode_ms / 1000,
    )


def write_results(
    report: BenchReport, *, json_path: Path | None, plot_path: Path | None, trace_path: Path | None
) -> None:
    """Write the files that were asked for; raise an InputError if one cannot be, or matplotlib is not installed."""
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
    """Plot the last burst, or a run for three times as long as its first video took."""
    if report.bursts:
        burst = report.bursts[-1]
        num_earlier = sum(len(log.finished_s) for log in report.logs) - burst.videos
        start_s, end_s = figures.burst_times(report.logs, [num_earlier, burst.videos])[-1]
        title = f"{burst.videos} videos, {len(report.logs)} ranks: {burst.ratio:.3f} of the shortest possible time"
    else:
        run = report.runs[0]
        start_s = min(span.start_s for log in report.logs for span in log.spans)
        end_s = start_s + 3 * run.first_sample_s
        title = (
            f"{report.model}, {run.ranks} ranks, {run.steps} steps of {run.step_ms:.4g} ms, "
            f"encode {run.encode_ms:.4g} ms, decode {run.decode_ms:.4g} ms: efficiency {run.efficiency:.3f}"
        )
    _plot_timeline(report, path, title, start_s, end_s)


_LOOKS: dict[str, dict[str, Any]] = {
    "encode": {"hatch": "////", "alpha": 1.0, "zorder": 2},
    "steps": {"alpha": 0.6},
    "decode": {"hatch": "....", "alpha": 1.0},
}


def headless_pyplot() -> ModuleType:
    """Return matplotlib's pyplot, which writes files without a display; raise an InputError if it is not installed."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise InputError(f"--plot needs matplotlib, which is not installed; {how_to_install('plot')}.") from error
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _plot_timeline(report: BenchReport, path: Path, title: str, start_s: float, end_s: float) -> None:
    pyplot, logs = headless_pyplot(), report.logs
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
        idle = 1 - figures.busy_share(logs[rank].spans, start_s, end_s)
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
