"""`svdq worker`: start a group of ranks."""

import contextlib
import json
import logging
import math
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
from redis.exceptions import AuthenticationError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from svdq.cli.formatting import echo
from svdq.cli.option_types import GivenPath, SectionedCommand, storage_options
from svdq.pipeline.errors import InputError, SvdqError, UnavailableError, require_torch
from svdq.pipeline.media.ffmpeg import ffmpeg_version
from svdq.pipeline.models.compute.options import Weights
from svdq.pipeline.models.names.model_names import resolve, what_it_was
from svdq.pipeline.models.resolved_model import ResolvedModel
from svdq.pipeline.models.upscaler_file import find_upscaler
from svdq.producer.connection import session
from svdq.producer.files import check_target, write_file
from svdq.producer.settings import Settings
from svdq.producer.settings_loader import load_settings
from svdq.worker.cards import Cards
from svdq.worker.config import RankConfig, rank_options
from svdq.worker.fit import faster_in_rounds, least_free
from svdq.worker.launcher.gpu_users import users_of_gpus
from svdq.worker.launcher.gpus import visible_gpus
from svdq.worker.outages import check_storage
from svdq.worker.run_folder import check_home

if TYPE_CHECKING:
    # They need packages of the extra `worker`.
    from svdq.worker.launcher.group_process import GroupProcess
    from svdq.worker.launcher.launcher import LaunchOptions

logger = logging.getLogger(__name__)

WAIT_S = 2.0  # seconds between two attempts of a service to reach Redis

#: A number with a digit too many would fill the memory with processes.
COUNT = click.IntRange(1, 1000)


class WorkerCommand(SectionedCommand):
    """A command whose options have the setting `worker_options` as their default."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing and not set(ctx.help_option_names) & set(args):
            ctx.default_map = self._defaults(load_settings().worker_options, ctx.parent)
        return super().parse_args(ctx, args)

    def _defaults(self, text: str, parent: click.Context | None) -> dict[str, Any]:
        """Parse the setting; raises InputError for what a command line could not have either."""
        try:
            words = shlex.split(text)
            context = click.Context(self, parent=parent)
            super().parse_args(context, [*words])
            values = self.make_parser(context).parse_args(words)[0]
            if own := [name for name in values if name in Settings.model_fields]:
                raise ValueError(f"{own[0]} is a setting of its own")
        except (ValueError, click.UsageError) as error:
            reason = error.format_message() if isinstance(error, click.UsageError) else str(error)
            raise InputError(  # without the text: it may have a password
                f"SVDQ_WORKER_OPTIONS (or worker_options in svdq.toml) is not what `svdq worker` takes ({reason}); "
                "correct or unset it."
            ) from error
        return values


@click.command(cls=WorkerCommand)
@click.option(
    "--ranks", type=COUNT, help="Ranks of the group [default: one per GPU; without GPUs one per core, at most 7]."
)
@click.option("--groups", type=COUNT, default=1, show_default=True, help="Groups that share the queue.")
@click.option("--report", type=GivenPath(), help="Also write the summary to a .json file.")
@click.option(
    "--until",
    metavar="TIME",
    help="Stop then, such as 06:00 or +8h; videos that are not done continue later.",
)
@click.option(
    "--on-demand",
    metavar="DURATION",
    help="End the ranks, which frees their GPUs, after so long without a job, such as 10m, and start them again when "
    "there is one (SVDQ_ON_DEMAND). A burst ends instead.",
)
@click.option(
    "--memory-limit",
    metavar="SIZE",
    help="Memory for a rank's weights and activations, such as 24GB; videos that need more are refused "
    "(SVDQ_MEMORY_LIMIT). Default: the memory of its GPU.",
)
@click.option(
    "--weights",
    type=click.Choice(get_args(Weights)),
    help="How weights of quantized files are held and multiplied. native: as in the file, and layers multiply in its "
    "format (int8, fp8, mxfp8, nvfp4); stored: as in the file, and layers make them when they use them; made: in the "
    "type computed in, with the same frames as stored. auto: native where the GPU has a kernel, else made where there "
    "is room (SVDQ_WEIGHTS).",
)
@click.option(
    "--wait-for-able",
    is_flag=True,
    default=None,
    help="Let jobs that no worker can make wait for one that can, in place of failing (SVDQ_WAIT_FOR_ABLE).",
)
@click.option(
    "--wait-for-gpu/--no-wait-for-gpu",
    default=None,
    help="Wait while another program, such as a game, holds memory that the model needs, and return jobs that run out "
    "of memory because of one to the queue (SVDQ_WAIT_FOR_GPU). Default: it waits.",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    help="Serve Prometheus metrics on this port of SVDQ_METRICS_ADDRESS, such as 9464; 0 takes a free port.",
)
@click.option(
    "--notify",
    multiple=True,
    metavar="URL",
    help="Send a run's summary, a pause after failures and a full disk to this apprise URL, such as ntfy://TOPIC; "
    "repeatable (SVDQ_NOTIFY).",
)
@rank_options
@click.option("--model", help="preview, or the folder or hub id of a model (SVDQ_MODEL).")
@storage_options
def worker(
    model: str | None,
    redis_url: str | None,
    storage: str | None,
    memory_limit: str | None,
    weights: str | None,
    on_demand: str | None,
    wait_for_able: bool | None,
    wait_for_gpu: bool | None,
    report: Path | None,
    notify: tuple[str, ...],
    **options: Any,
) -> None:
    """Start a group of ranks that renders queued jobs.

    The first Ctrl-C stops taking jobs and finishes the videos in flight (in rounds, the present steps of one
    video); the second stops at once. A burst exits with 1 if all its videos failed, if it found the queue paused,
    or if it leaves jobs that other workers must make. Options in SVDQ_WORKER_OPTIONS, or in worker_options of
    svdq.toml, need not be typed; options that are typed take precedence.

    \b
    Examples:
      svdq worker                          one rank per GPU
      svdq worker --ranks 7 --device cpu   seven ranks on the CPU
      svdq worker --groups 7 --ranks 1     seven workers that render whole videos
      svdq worker --until 06:00            stop in the morning, keep unfinished videos
      svdq worker --burst --report night.json
      svdq worker --dtype bf16 --compile blocks --metrics-port 9464
    """
    require_torch("a worker")
    from svdq.worker.launcher.launcher import LaunchOptions

    flags: dict[str, Any] = {"model": model, "redis_url": redis_url, "storage": storage, "weights": weights}
    flags |= {"memory_limit": memory_limit, "on_demand": on_demand}
    flags |= {"wait_for_able": wait_for_able, "wait_for_gpu": wait_for_gpu, "notify": notify or None}
    settings = load_settings(**flags)
    given = {name: options.pop(name) for name in RankConfig.model_fields if name in options}
    rank = RankConfig(**given, weights=settings.weights)
    if settings.loras is not None and not settings.loras.is_dir():
        raise InputError(f"There is no folder {str(settings.loras)!r}, which SVDQ_LORAS names; correct it.")
    if settings.upscaler is not None:
        # As a path, since ranks run in another folder.
        found = find_upscaler(settings.upscaler, settings.loras)
        settings = settings.model_copy(update={"upscaler": str(found)})
    with _logging(rank.log_format):
        code = _start(settings, LaunchOptions(rank=rank, **options), report)
    sys.exit(code)


@contextlib.contextmanager
def _logging(log_format: str) -> Iterator[None]:
    from svdq.worker.health.rank_log import JsonFormatter, TextFormatter  # needs packages of the extra `worker`

    logging.getLogger("svdq.worker.launcher").setLevel(logging.INFO)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter("%(message)s") if log_format == "text" else JsonFormatter())
    logging.basicConfig(handlers=[handler])
    try:
        yield
    except SvdqError as error:
        if log_format == "text":
            raise
        logging.getLogger("svdq.worker").critical("%s", error)
        sys.exit(error.exit_code)


def _start(settings: Settings, options: "LaunchOptions", report: Path | None) -> int:
    """Check all that can be checked before any rank starts, then run."""
    from svdq.worker.launcher.launcher import starting_record

    rank = options.rank
    # Not by the types of the options: `svdq deploy` parses them for another user and a later time.
    if report is not None:
        check_target(report, (".json",))
    if settings.trace is not None:
        check_target(settings.trace, ())
    model = resolve(settings.model, on_gpus=rank.device != "cpu" and bool(visible_gpus()), dtype=rank.dtype)
    if former := what_it_was(settings.model):
        logger.warning("%s", former)
    ffmpeg_version()
    if settings.c2pa_cert is not None or settings.c2pa_key is not None:
        from svdq.worker.output.content_credentials import ContentCredentials  # imports Pillow

        ContentCredentials.of(settings)
    _reach_redis(settings, waits=not options.rank.burst and not sys.stderr.isatty())
    groups: list[GroupProcess] = []
    with starting_record(settings, model, groups):  # what follows may take long, and others are to know of the worker
        check_home(settings.home)
        check_storage(settings.storage)
        return _run(settings, model, _fitted(settings, model, options), report, groups)


def _fitted(settings: Settings, model: ResolvedModel, options: "LaunchOptions") -> "LaunchOptions":
    """Complete the options by what the GPUs and their memory are."""
    gpus = visible_gpus() if options.rank.device != "cpu" else []
    # Not for the preview: a call of nvidia-smi may take seconds a GPU.
    if gpus and model.layout is not None:
        warn_of_other_programs()
    if len(gpus) == 2 and model.layout is not None and (cards := Cards.here()) is not None:
        cards = replace(cards, number=len(gpus), limit_bytes=settings.memory_limit)
        options = divide(options, settings.model, cards)
    if settings.wait_for_gpu:
        options = replace(options, least_free=partial(least_free, settings, options.rank))
    return options


def warn_of_other_programs() -> None:
    """Name the programs that hold memory of the GPUs."""
    for user in users_of_gpus():
        logger.warning("GPU %s: %s; to have its memory for videos, %s.", user.gpu, user, user.advice)


def _reach_redis(settings: Settings, *, waits: bool) -> None:
    """Check that Redis answers and allows what RQ does; a service `waits` for it, and says so once."""
    from svdq.worker.queue.rq_worker import check_rights

    has_said = False
    while True:
        try:
            with session(settings) as connection:
                check_rights(connection)
            return
        except UnavailableError as error:
            cause = error.__cause__
            is_away = isinstance(cause, RedisConnectionError | RedisTimeoutError)
            if not waits or not is_away or isinstance(cause, AuthenticationError):
                raise
            if not has_said:
                logger.warning("%s The worker waits for it.", error)
                has_said = True
            time.sleep(WAIT_S)


def divide(options: "LaunchOptions", model: str, cards: Cards) -> "LaunchOptions":
    """Give each of two GPUs a group in rounds where this is faster than ranks that hold one expert each."""
    is_open = options.ranks is None and options.groups == 1 and options.rank.experts == "auto"
    if not is_open or cards.number != 2:
        return options
    try:
        share = faster_in_rounds(model, options.rank.compute, cards)
    except InputError:
        return options  # made in code
    if share <= 0:
        return options
    why = "the only way that fits"
    if not math.isinf(share):
        why = f"about {share:.0%} faster than `--ranks 2 --experts bound`"
    echo(f"Each GPU runs its own group, in rounds: {why}.", err=True)
    return replace(options, ranks=1, groups=2)


def _run(
    settings: Settings,
    model: ResolvedModel,
    options: "LaunchOptions",
    report: Path | None,
    groups: "list[GroupProcess]",
) -> int:
    """Run until the end, print the summary of a burst, and return the exit code."""
    from svdq.worker.launcher.launcher import launch
    from svdq.worker.launcher.notifications import Notifications, exit_code, report_of_run
    from svdq.worker.launcher.webhooks import Webhooks

    started_at = datetime.now().astimezone()
    with Notifications(settings) as notifications, Webhooks(settings):
        ending = launch(settings, model, options, groups)
        is_shown = options.rank.burst or report is not None
        if not is_shown and not notifications.are_wanted:
            return ending.code
        try:
            found = report_of_run(settings, ending, started_at)
        except UnavailableError:
            if is_shown:
                raise
            return ending.code  # a notification fails no run
        if report is not None:
            write_file(report, [json.dumps(found.as_json(), indent=2) + "\n"])
        notifications.send_summary(found)
        if is_shown:
            echo(*found.lines())  # last, since its terminal may have closed
    return exit_code(ending, found)
