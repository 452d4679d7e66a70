"""`svdq worker`: start a group of ranks."""

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from svdq.cli.formatting import echo
from svdq.cli.main import redis_options, storage_option
from svdq.worker.launcher.compute_options import compute_options, read

if TYPE_CHECKING:
    from svdq.producer.settings import Settings
    from svdq.worker.launcher.launch import LaunchOptions


@click.command()
@click.option("--ranks", type=click.IntRange(min=1), help="Ranks of the group; default: one a GPU, or 7 without GPUs.")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Where to compute."
)
@click.option("--groups", type=click.IntRange(min=1), default=1, show_default=True, help="Groups that share the queue.")
@click.option(
    "--nnodes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Hosts of one group; the same command runs on each, and --ranks are those of its own.",
)
@click.option(
    "--rdzv-endpoint", metavar="HOST[:PORT]", help="Where these hosts meet: one of them, and a port there (29400)."
)
@click.option("--burst", is_flag=True, help="End when the queue is empty, and tell what it came to.")
@click.option("--no-lock", is_flag=True, help="Start a burst although another one works on the same devices.")
@click.option("--report", type=click.Path(path_type=Path), help="Write the summary to a .json file as well.")
@click.option("--until", metavar="HH:MM", help="Stop then: no video is begun that would not be done; the rest is kept.")
@click.option(
    "--checkpoints",
    type=click.Choice(["local", "storage", "off"]),
    default="local",
    show_default=True,
    help="Where half-done videos are kept, to go on with after a crash or a stop.",
)
@click.option("--warmup", multiple=True, metavar="WxHxF", help="Shape to be ready for at once, such as 1024x576x25.")
@click.option(
    "--memory-limit",
    metavar="SIZE",
    help="What a rank's weights and activations may take, such as 24GB; videos that need more are refused "
    "(SVDQ_MEMORY_LIMIT). Default: what its GPU has.",
)
@click.option("--trace", type=click.Path(dir_okay=False, path_type=Path), help="Write a Chrome trace at the end.")
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    help="Serve metrics for Prometheus there, such as 9464; 0 takes a free port.",
)
@click.option(
    "--metrics-address", default="127.0.0.1", show_default=True, help="Address of this machine to serve metrics at."
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="How all that goes to stderr is written; json: an object a line.",
)
@compute_options
@click.option("--model", help="preview, or a StableVideoDiffusionPipeline folder or hub id (SVDQ_MODEL).")
@redis_options
@storage_option
def worker(
    model: str | None,
    redis_url: str | None,
    storage: str | None,
    memory_limit: str | None,
    no_lock: bool,
    report: Path | None,
    log_format: str,
    **options: Any,
) -> None:
    """Start a group of ranks that renders queued jobs.

    Ctrl-C once takes no more jobs and finishes those in flight; twice stops now. A burst that finds another one at
    work on its devices, as a crontab may start it, leaves the queue to it and exits with 0.

    \b
    Examples:
      svdq worker                          a rank for every GPU
      svdq worker --ranks 7 --device cpu   seven ranks on the processor
      svdq worker --groups 7 --ranks 1     seven workers of a whole video each
      svdq worker --nnodes 2 --rdzv-endpoint render1   a part of a group over two hosts
      svdq worker --burst                  render what is queued, then end
      svdq worker --until 06:00            stop in the morning, keep what is half done
      svdq worker --burst --until 06:00 --report night.json
      svdq worker --metrics-port 9464 --log-format json
      svdq worker --dtype bf16 --compile blocks
    """  # noqa: D301 - \b is click's mark for a paragraph to be left as it is
    from svdq.producer.settings import Settings
    from svdq.worker.launcher.launch import LaunchOptions

    settings = Settings.load(model=model, redis_url=redis_url, storage=storage, memory_limit=memory_limit)
    launch_options = LaunchOptions(compute=read(options), **options, log_format=log_format)
    with _logging(log_format):
        code = _start(settings, launch_options, report, no_lock=no_lock)
    sys.exit(code)


@contextlib.contextmanager
def _logging(log_format: str) -> Iterator[None]:
    """Set up what this process itself writes to stderr for a block, and in JSON what its children do."""
    from svdq.pipeline.errors import SvdqError
    from svdq.worker.health.json_log import TextFormatter
    from svdq.worker.health.json_stderr import json_stderr

    for name in ("metrics", "launcher"):
        logging.getLogger(f"svdq.worker.{name}").setLevel(logging.INFO)
    if log_format == "text":
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(TextFormatter("%(message)s"))
        logging.basicConfig(handlers=[handler])
        yield
        return
    with json_stderr():
        try:
            yield
        except SvdqError as error:
            logging.getLogger("svdq.worker").critical("%s", error)
            sys.exit(error.exit_code)


def _start(settings: "Settings", options: "LaunchOptions", report: Path | None, *, no_lock: bool) -> int:
    """Check what can be checked before any rank starts, then run, if no other burst does."""
    from svdq.pipeline.ffmpeg import ffmpeg_version
    from svdq.pipeline.installed import require_torch
    from svdq.producer.queue import connect
    from svdq.producer.results.pages import check_target
    from svdq.worker.launcher.burst_lock import burst_lock, devices_of
    from svdq.worker.launcher.gpus import num_gpus
    from svdq.worker.launcher.model_check import check_model

    require_torch("a worker")
    if report is not None:
        check_target(report, (".json",))
    if options.trace is not None:
        check_target(options.trace, ())
    on_gpus = options.device != "cpu" and num_gpus() > 0
    check_model(settings.model, on_gpus=on_gpus, dtype=options.compute.dtype)
    ffmpeg_version()
    connect(settings).close()
    if not options.burst or no_lock:
        return _run(settings, options, report)
    with burst_lock(settings.home, devices_of(options)) as holder:
        if holder is not None:
            echo(holder, err=True)
            return 0
        return _run(settings, options, report)


def _run(settings: "Settings", options: "LaunchOptions", report: Path | None) -> int:
    """Run until the end, tell what a burst came to, and return the exit code."""
    from svdq.producer.results.pages import write
    from svdq.worker.launcher.launch import launch
    from svdq.worker.launcher.run_end import report_of_run

    started_at = datetime.now().astimezone()
    ending = launch(settings, options)
    if options.burst or report is not None:
        found = report_of_run(settings, ending, started_at, until=options.until)
        for line in found.lines():
            echo(line)
        if report is not None:
            write(report, [json.dumps(found.as_json(), indent=2) + "\n"])
    return ending.code
