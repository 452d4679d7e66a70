"""`svdq worker`: start a group of ranks."""

import sys
from pathlib import Path
from typing import Any

import click


@click.command()
@click.option("--ranks", type=click.IntRange(min=1), help="Ranks of the group; default: one a GPU, or 7 without GPUs.")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Where to compute."
)
@click.option("--groups", type=click.IntRange(min=1), default=1, show_default=True, help="Groups that share the queue.")
@click.option("--burst", is_flag=True, help="End when the queue is empty.")
@click.option("--until", metavar="HH:MM", help="Stop then: no video is begun that would not be done; the rest is kept.")
@click.option(
    "--checkpoints",
    type=click.Choice(["local", "storage", "off"]),
    default="local",
    show_default=True,
    help="Where half-done videos are kept, to go on with after a crash or a stop.",
)
@click.option("--warm", multiple=True, metavar="WxHxF", help="Shape to be ready for at once, such as 1024x576x25.")
@click.option("--trace", type=click.Path(dir_okay=False, path_type=Path), help="Write a Chrome trace at the end.")
@click.option("--model", help="preview, or a StableVideoDiffusionPipeline folder or hub id (SVDQ_MODEL).")
@click.option("--redis-url", help="Redis server (SVDQ_REDIS_URL); default: the embedded one.")
@click.option("--storage", help="Folder or URL for photos and videos (SVDQ_STORAGE).")
def worker(model: str | None, redis_url: str | None, storage: str | None, **options: Any) -> None:
    """Start a group of ranks that renders queued jobs.

    Ctrl-C once takes no more jobs and finishes those in flight; twice stops now.

    \b
    Examples:
      svdq worker                          a rank for every GPU
      svdq worker --ranks 7 --device cpu   seven ranks on the processor
      svdq worker --groups 7 --ranks 1     seven workers of a whole video each
      svdq worker --burst                  render what is queued, then end
      svdq worker --until 06:00            stop in the morning, keep what is half done
    """  # noqa: D301 - \b is click's mark for a paragraph to be left as it is
    from svdq.producer.queue import connect
    from svdq.producer.settings import Settings
    from svdq.worker.launch import LaunchOptions, check_model, launch

    settings = Settings.load(model=model, redis_url=redis_url, storage=storage)
    check_model(settings.model)
    connect(settings).close()
    sys.exit(launch(settings, LaunchOptions(**options)))
