"""Shows the progress of jobs that a command waits for: bars on a terminal, otherwise nothing until a job ends."""

from typing import TYPE_CHECKING, Protocol

from svdq.cli.formatting import echo, expected, with_notice
from svdq.producer.text import printable

if TYPE_CHECKING:
    from svdq.producer.status.estimates import Estimate
    from svdq.producer.status.status import JobView

#: Largest number of bars. Further jobs appear as they start.
MAX_BARS = 20


class Display(Protocol):
    """Interface of a progress display."""

    def __enter__(self) -> object:
        """Start the display."""
        ...

    def __exit__(self, *error: object) -> None:
        """Restore the terminal."""
        ...

    def show(self, view: "JobView", estimate: "Estimate | None") -> None:
        """Show the state of a job and when it will be done."""
        ...

    def log(self, sentence: str) -> None:
        """Print a message next to the progress."""
        ...


class Lines:
    """Prints messages only: stderr is not a terminal."""

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *error: object) -> None:
        """Do nothing."""

    def show(self, view: "JobView", estimate: "Estimate | None") -> None:
        """Do nothing: the job is printed when it ends."""

    def log(self, sentence: str) -> None:
        """Print a message on stderr."""
        echo(sentence, err=True)


class Bars:
    """A bar on stderr for each job in flight and, if there are several jobs, one for all of them."""

    def __init__(self, num_jobs: int) -> None:
        # Imported here because only a terminal needs rich.
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
        """Start drawing."""
        self._progress.start()

    def __exit__(self, *error: object) -> None:
        """Clear the bars."""
        self._progress.stop()

    def show(self, view: "JobView", estimate: "Estimate | None") -> None:
        """Update the bar of a job, and remove it when the job has ended."""
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

    def log(self, sentence: str) -> None:
        """Print a message above the bars."""
        self._progress.console.print(printable(sentence), markup=False, highlight=False)
