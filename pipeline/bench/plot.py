"""Plots the timeline of a bench run: a row for each rank, a color for each video, and how long each rank is idle."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from svdq.pipeline.bench.report import RankLog, busy_share
from svdq.pipeline.installed import headless_pyplot

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
