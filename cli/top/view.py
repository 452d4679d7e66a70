"""Lays out the live view: as much as fits the terminal, ranks first."""

from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from svdq.cli.formatting import clock, condition_sentence
from svdq.cli.top.parts import Detail, flight_table, group_title, queue_table, rank_table
from svdq.producer.text import printable
from svdq.producer.timeparse import duration

if TYPE_CHECKING:
    from svdq.producer.status.snapshot import Snapshot

#: Levels of detail, from everything to what fits a small terminal.
_DETAILS = (
    Detail(),
    Detail(is_tight=True),
    Detail(is_tight=True, max_in_flight=6),
    Detail(is_tight=True, max_in_flight=3),
    Detail(is_tight=True, max_in_flight=0),
    Detail(is_tight=True, max_in_flight=3, has_ranks=False),
    Detail(is_tight=True, max_in_flight=0, has_ranks=False),
)


class View:
    """A snapshot drawn to fit the terminal; it says so when something is cut off."""

    def __init__(self, snapshot: "Snapshot", *, away: str = "", is_live: bool = False) -> None:
        """Create a view.

        Args:
            snapshot: what to draw.
            away: why there is nothing newer, as a sentence.
            is_live: whether the view fills the screen and a key quits it.
        """
        self._snapshot = snapshot
        self._away = away
        self._is_live = is_live

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw with as much detail as fits the screen; in full if the view does not fill a screen."""
        height = console.height if self._is_live else None
        free = options.reset_height()
        lines: list[list[Segment]] = []
        for detail in _DETAILS:
            lines = console.render_lines(Group(*self._parts(detail, free)), free, pad=False)
            if height is None or len(lines) <= height:
                break
        if height is not None and len(lines) > height:
            more = Text("Not all of it fits; a taller terminal shows more.", style="dim", no_wrap=True, overflow="crop")
            lines[height - 1 :] = console.render_lines(more, free, pad=False)
        for line in lines:
            yield from line
            yield Segment.line()

    def _parts(self, detail: Detail, options: ConsoleOptions) -> Iterator[RenderableType]:
        from svdq.producer.status.estimates import STARTING

        snapshot = self._snapshot
        blank = [] if detail.is_tight else [Text("")]
        yield self._headline()
        yield self._forecast()
        for sentence in self._warnings():
            yield Text(printable(sentence), style="bold yellow")
        yield from blank
        yield queue_table(snapshot.queues, detail, options.max_width)
        for group in snapshot.groups:
            yield from blank
            yield group_title(group, snapshot.jobs_of(group))
            if detail.has_ranks:
                yield rank_table(group, snapshot.names, options)
            in_flight = flight_table(group, snapshot.jobs_of(group), snapshot.estimates, detail, options)
            if in_flight:
                yield from [*blank, *in_flight]
        if not snapshot.groups:
            yield from blank
            is_starting = snapshot.worker_state == "starting"
            yield Text(STARTING if is_starting else "No worker is running; start one with `svdq worker`.")
        if strays := snapshot.strays:
            names = ", ".join(job.name for job in strays[:5]) + (", …" if len(strays) > 5 else "")
            yield Text(printable(f"In flight in groups without recent reports: {len(strays)} ({names})."), style="dim")

    def _headline(self) -> Text:
        snapshot = self._snapshot
        rate = snapshot.videos_per_hour
        pace = "" if rate is None else f"{rate:,.0f} videos an hour  " if rate >= 10 else f"{rate:.1f} videos an hour  "
        ended = f"{snapshot.finished_last_hour} finished and {snapshot.failed_last_hour} failed in the last hour"
        now = datetime.fromtimestamp(snapshot.at)
        return Text.assemble(("svdq", "bold"), f" {now:%H:%M:%S}  ", (pace, "bold"), ended)

    def _forecast(self) -> Text:
        """Describe when all jobs will be done."""
        snapshot = self._snapshot
        num_left = snapshot.num_queued + len(snapshot.jobs)
        if num_left == 0:
            text = "No job is waiting or in flight."
        elif (eta_s := snapshot.estimate.eta_s) is not None:
            text = f"{num_left} to do, done in about {duration(eta_s)}, at {clock(snapshot.at + eta_s)}."
        else:
            text = f"{num_left} to do; the end is unknown: {snapshot.estimate.reason}"
        return Text.assemble(printable(text), ("  q quits" if self._is_live else "", "dim"))

    def _warnings(self) -> Iterator[str]:
        if self._away:
            yield f"{self._away} This is the last known state."
        yield from self._snapshot.pauses
        for group in self._snapshot.groups:
            for rank in group.ranks:
                for condition in rank.conditions:
                    yield condition_sentence(rank, condition)
