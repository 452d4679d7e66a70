"""`svdq watch`: photos that are dropped into a folder, into the queue."""

import json
import re
import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import click

from svdq.cli.main import EXIT_FAILED, EXIT_INTERRUPTED, redis_options, storage_option
from svdq.cli.parameters import PRIORITIES, given, parameter_options
from svdq.cli.words import echo
from svdq.pipeline.errors import InputError

if TYPE_CHECKING:
    from svdq.producer.watching.events import Event

EXAMPLES = """\b
Examples:
  svdq watch ~/inbox
  svdq watch ~/inbox --recursive --existing --frames 25
  svdq watch /srv/drop --then move:done --glob '*.jpg' --glob '*.png'
  svdq watch /mnt/nas/photos --poll --settle 10s
  svdq watch ~/inbox --once --then move:done
"""

_UNITS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0}


def _read_seconds(_context: click.Context, _option: click.Parameter, value: str) -> float:
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)(ms|s|m|)", value.strip())
    if match is None or float(match[1]) == 0:
        raise InputError(f"--settle {value} is not a length of time; write it as 2s, 500ms or 1m.")
    return float(match[1]) * _UNITS[match[2]]


@click.command(epilog=EXAMPLES)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--recursive", is_flag=True, help="Take photos in its folders, too; outputs have the same folders.")
@click.option("--glob", "globs", multiple=True, metavar="PATTERN", help="Take these; repeatable [default: all photos].")
@click.option("--existing", is_flag=True, help="Take what lay there before the folder was first watched, too.")
@click.option(
    "--settle",
    "settle_s",
    default="2s",
    show_default=True,
    metavar="TIME",
    callback=_read_seconds,
    help="Take a file that has not changed for so long.",
)
@click.option(
    "--then",
    default="keep",
    show_default=True,
    metavar="keep|move:DIR|delete",
    help="What is done with a photo that was submitted; a relative DIR is in FOLDER.",
)
@click.option("--poll", is_flag=True, help="Look again and again: for network shares, which tell of no changes.")
@click.option("--once", is_flag=True, help="Take what is there, then end; for cron. Implies --existing.")
@parameter_options
@click.option("--priority", type=click.Choice(PRIORITIES), default="default", show_default=True, help="Which queue.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each event, one a line.")
@storage_option
@redis_options
def watch(
    folder: Path,
    recursive: bool,
    globs: tuple[str, ...],
    existing: bool,
    settle_s: float,
    then: str,
    poll: bool,
    once: bool,
    size: tuple[int, int] | None,
    formats: tuple[str, ...],
    priority: str,
    as_json: bool,
    storage: str | None,
    redis_url: str | None,
    **parameters: Any,
) -> int:
    """Submit photos as they are dropped into FOLDER, each once.

    It remembers what it has taken, so it can be stopped, killed and started again: what was dropped meanwhile is taken
    then. A file svdq.toml in a folder says what is wanted of the photos in it (frames = 25, size = "576x320", …) and
    wins over the flags. Files that are no photos are told once and, unless photos are kept, moved to FOLDER/rejected.

    Ctrl-C or SIGTERM finishes the photo at hand and ends.
    """
    # Imported here: `svdq watch --help` needs none of it.
    from svdq.producer.settings import Settings
    from svdq.producer.submitting.options import SubmitOptions
    from svdq.producer.submitting.order import Order
    from svdq.producer.watching.selection import PHOTO_GLOBS, Selection
    from svdq.producer.watching.service import notify_ready
    from svdq.producer.watching.watch import WatchOptions
    from svdq.producer.watching.watch import watch as watch_folder

    settings = Settings.load(redis_url=redis_url, storage=storage)
    options = SubmitOptions(**given(size=size, formats=formats, **parameters))

    def tell(event: "Event") -> None:
        if as_json:
            echo(json.dumps(event.as_json()))
        else:
            echo(event.text, err=event.kind in ("trouble", "mended"))
        if event.kind == "watching":
            notify_ready()

    with StopSignals() as stop:
        summary = watch_folder(
            settings,
            folder,
            Order(options=(options,), priority=priority),
            WatchOptions(
                selection=Selection(recursive=recursive, globs=globs or PHOTO_GLOBS),
                existing=existing,
                settle_s=settle_s,
                then=then,
                poll=poll,
                once=once,
            ),
            tell,
            stop,
        )
    if stop.number == signal.SIGINT:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if once and (summary.rejected or summary.waiting) else 0


class StopSignals:
    """Whether SIGINT or SIGTERM has come; the second one ends the process at once."""

    def __init__(self) -> None:
        #: The signal, or 0.
        self.number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Begin to listen."""
        for number in (signal.SIGINT, signal.SIGTERM):
            # A shell has its background jobs ignore Ctrl-C.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        """Listen no longer."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def is_set(self) -> bool:
        """Whether one has come."""
        return self.number != 0

    def _heard(self, number: int, _frame: FrameType | None) -> None:
        if self.number:
            raise KeyboardInterrupt
        self.number = number
