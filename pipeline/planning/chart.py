"""Plots a plan: videos per hour against GPUs, and the completion of a night's videos. Needs matplotlib."""

from pathlib import Path

from svdq.pipeline.errors import InputError
from svdq.pipeline.installed import headless_pyplot
from svdq.pipeline.planning.capacity import Model
from svdq.pipeline.planning.plan import Plan

#: Number of points of a completion curve.
_NUM_POINTS = 600
#: Margin of the axes.
_MARGIN = 1.05


def draw_plan(model: Model, plan: Plan, path: Path) -> None:
    """Write the chart of a plan as PNG.

    Raises:
        InputError: matplotlib is not installed.
    """
    pyplot = headless_pyplot()
    figure, (pace_axes, night_axes) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    replica = model.way(1)
    sizes = [*model.group_sizes]
    most = max(sizes[-1] if len(sizes) < 3 else min(sizes[-1], 2 * plan.gpus), plan.gpus, 2)
    shown = [ranks for ranks in sizes if ranks <= most]
    pace_axes.plot(shown, [model.way(ranks).videos_an_hour for ranks in shown], "o-", label="one pipeline")
    pace_axes.plot([1, most], [replica.videos_an_hour, most * replica.videos_an_hour], "--", label="replicas")
    pace_axes.axvline(plan.gpus, color="0.8", zorder=0)
    pace_axes.set(xlabel="GPUs", ylabel="videos an hour", title="Once filled", xlim=(0, None), ylim=(0, None))
    pace_axes.legend()

    question = plan.question
    times_s = [row.time_s for row in plan.rows]
    end_s = (min(times_s) if question.deadline_s is None else min(question.deadline_s, max(times_s))) * _MARGIN
    for row in plan.rows:
        way = model.way(row.gpus // row.groups, row.groups)
        points_s = [end_s * point / _NUM_POINTS for point in range(_NUM_POINTS + 1)]
        done = [min(question.videos, way.finished(point_s)) for point_s in points_s]
        label = row.way if row.gpus == row.groups == 1 else f"{row.way}, {row.gpus} GPUs"
        hours, style = [point_s / 3600 for point_s in points_s], "--" if way.ranks == 1 else "-"
        night_axes.step(hours, done, style, where="post", label=label)
    if question.deadline_s is not None and question.deadline_s <= end_s:
        night_axes.axvline(question.deadline_s / 3600, color="0.6", linestyle=":", label="deadline")
    night_axes.set(
        xlabel="hours", ylabel="videos done", title=f"{question.videos} videos", xlim=(0, end_s / 3600), ylim=(0, None)
    )
    night_axes.legend()
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=100)
    except (OSError, ValueError) as error:
        raise InputError(f"--plot {path} cannot be written ({error}); give a name that ends in .png.") from error
    finally:
        pyplot.close(figure)
