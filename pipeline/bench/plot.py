"""Plots the timeline of a bench run: a row per rank and a bar per sample, which shows idle time."""

from collections.abc import Sequence
from pathlib import Path

from svdq.pipeline.bench.report import RankLog
from svdq.pipeline.installed import headless_pyplot

#: Length of the plotted steady state, in multiples of the duration of one video.
_NUM_PASSES = 3


def plot_timeline(logs: Sequence[RankLog], path: Path, title: str) -> None:
    """Write the timeline of the first few videos as PNG.

    Raises:
        InputError: matplotlib is not installed.
    """
    pyplot = headless_pyplot()
    start_s = min(start for log in logs for _, _, start, _ in log.spans)
    first_s = min(time_s for log in logs for time_s in log.finished_s) - start_s
    until_s = _NUM_PASSES * first_s
    colours = pyplot.get_cmap("tab20").colors
    figure, axes = pyplot.subplots(figsize=(12, 0.5 * len(logs) + 1.6))
    jobs: dict[str, int] = {}
    for rank, log in enumerate(logs):
        for name, job, begin, end in log.spans:
            if name == "write" or begin - start_s > until_s:
                continue
            colour = colours[jobs.setdefault(job, len(jobs)) % len(colours)]
            hatch = {"encode": "//", "decode": "\\\\"}.get(name, "")
            axes.broken_barh(
                [(begin - start_s, end - begin)], (rank - 0.4, 0.8), facecolors=colour, edgecolor="white", hatch=hatch
            )
    axes.set(
        xlim=(0, until_s),
        ylim=(len(logs) - 0.5, -0.5),
        xlabel="seconds",
        ylabel="rank",
        title=title,
        yticks=range(len(logs)),
    )
    figure.text(0.99, 0.01, "one color per video; // encode, \\\\ decode", ha="right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
