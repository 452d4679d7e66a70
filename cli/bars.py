"""Where the progress of jobs that are waited for is shown: bars on a terminal, else nothing before a job has ended."""

from typing import TYPE_CHECKING, Protocol

from svdq.cli.formatting import echo, expected, with_notice
from svdq.producer.text import printable

if TYPE_CHECKING:
    from svdq.producer.status.estimates import Estimate
    from svdq.producer.status.status import JobView

#: More bars than this do not fit a terminal; further jobs show as they start.
MAX_BARS = 20


class Display(Protocol):
    """Where progress is shown."""

    def __enter__(self) -> object:
        """Begin to show."""
        ...

    def __exit__(self, *error: object) -> None:
        """Leave the terminal as it was."""
        ...

    def show(self, view: "JobView", estimate: "Estimate | None") -> None:
        """Show how a job stands, and when it will be done."""
        ...

    def say(self, sentence: str) -> None:
        """Say something besides."""
        ...


class Lines:
    """No progress: stderr is not a terminal."""

    def __enter__(self) -> None:
        """Nothing to begin."""

    def __exit__(self, *error: object) -> None:
        """Nothing to end."""

    def show(self, view: "JobView", estimate: "Estimate | None") -> None:
        """Nothing to show before a job has ended."""

    def say(self, sentence: str) -> None:
        """Print it on stderr."""
        echo(sentence, err=True)


class Bars:
    """A bar for each job in flight, and one for all of them when they are several; on stderr."""

    def __init__(self, num_jobs: int) -> None:
        # Imported here: rich is only needed on a terminal.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._ended: set[str] = set()
        self._all = self._progress.add_task("all", total=num_jobs) if num_jobs > 1 else None

    def __enter__(self) -> None:
        """Begin to draw."""
        self._progress.start()

    def __exit__(self, *error: object) -> None:
        """Clear the bars."""
        self._progress.stop()

    def show(self, view: "JobView", estimate: "Estimate | None") -> None:
        """Move the bar of a job; take it away when the job has ended."""
        if view.ended:
            self._ended.add(view.id)
            if (task := self._tasks.pop(view.id, None)) is not None:
                self._progress.remove_task(task)
            if self._all is not None:
                self._progress.update(self._all, completed=len(self._ended))
            return
        if view.id not in self._tasks:
            if len(self._tasks) >= MAX_BARS:
                return
            self._tasks[view.id] = self._progress.add_task("", total=view.steps or None)
        state = view.status if estimate is None else f"{view.status}{expected(estimate)}"
        text = f"{view.name}  {with_notice(state, view)}"
        self._progress.update(self._tasks[view.id], completed=view.step, description=printable(text))

    def say(self, sentence: str) -> None:
        """Print it above the bars."""
        self._progress.console.print(printable(sentence), markup=False, highlight=False)
