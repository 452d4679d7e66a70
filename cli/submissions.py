"""Prints submissions on a terminal: progress bars, then a line or JSON object for each job."""

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from svdq.cli.formatting import echo, echo_json, named
from svdq.cli.main import EXIT_FAILED
from svdq.cli.option_types import MANY
from svdq.pipeline.errors import InputError, UnavailableError
from svdq.producer.submitting.checking import BadPhotosError, Observer
from svdq.producer.submitting.entries import Entry, Submission
from svdq.producer.submitting.finishing import submit_finishing
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.sources import PhotoRequest
from svdq.producer.submitting.submission import submit_all
from svdq.producer.text import count, duration, rfc3339

if TYPE_CHECKING:
    from svdq.producer.settings import Settings
    from svdq.producer.status.job_view import JobView

MAX_REASONS = 20  # largest number of bad photos printed
MAX_NAMED = 3  # largest number of older videos named


class Bar(Observer):
    """Shows the progress of each phase on a terminal's stderr, and lists the bad photos."""

    def __init__(self, *, is_drawn: bool) -> None:
        self.reasons: list[str] = []
        self._progress: Any = None
        if is_drawn:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._progress.add_task("", total=None)
            self._progress.start()

    def close(self) -> None:
        if self._progress:
            self._progress.stop()

    def begin(self, work: str, total: int) -> None:
        if self._progress:
            self._progress.reset(self._task, description=work, total=total)

    def advance(self) -> None:
        if self._progress:
            self._progress.advance(self._task)

    def leave_out(self, reason: str) -> None:
        self.reasons.append(reason)  # printed when the bar is gone

    def note(self, text: str) -> None:
        echo(text, err=True)


def submit_and_print(
    settings: "Settings",
    requests: Sequence[PhotoRequest | InputError],
    *,
    skip_bad: bool = False,
    do_replace: bool | None = False,
    dry_run: bool = False,
    do_wait: bool,
    verbose: bool,
    as_json: bool,
) -> int:
    """Submit photos, or finished videos to be upscaled, print a line or JSON object for each, return the exit code.

    With `do_replace`, older videos of the photos that still wait are canceled as soon as all jobs are queued; otherwise
    they are named, unless it is None. With `dry_run`, nothing is submitted, and the lines say what would be. With
    `do_wait`, an object is printed when its job has ended. Many jobs have a line only if `verbose`, and totals. The
    exit code is 1 when photos were left out or a job that the command waited for has failed.
    """
    if dry_run and do_wait:
        raise InputError("--dry-run queues nothing to --wait for; leave out one of them.")
    readable = [request for request in requests if isinstance(request, PhotoRequest)]
    finishing = [request for request in readable if request.result is not None]
    specs = [request.spec for request in readable]
    num_jobs = sum(spec.num_jobs for spec in specs)
    is_bulk = num_jobs >= MANY
    has_lines = not as_json and (verbose or not is_bulk)
    # Lines and a bar on the same terminal would mix.
    is_drawn = is_bulk and sys.stderr.isatty() and not (sys.stdout.isatty() and (as_json or has_lines))
    made: list[Submission] = []
    try:
        with contextlib.closing(Bar(is_drawn=is_drawn)) as bar:
            how: Any = {"skip_bad": skip_bad, "dry_run": dry_run, "observer": bar}
            submissions = (
                submit_finishing(settings, finishing, **how) if finishing else submit_all(settings, requests, **how)
            )
            try:
                for submission in submissions:
                    made.append(submission)
                    if as_json and not do_wait:
                        echo_json(_object(submission))
                    elif has_lines:
                        echo(_line(submission, has_hint=not do_wait, dry_run=dry_run))
            except OSError:  # the output cannot be written, as by `| head`; the rest is submitted all the same
                made += submissions
                raise
    except BadPhotosError as error:
        print_reasons(error.reasons)
        raise
    except UnavailableError as error:
        if not made or dry_run:
            raise
        raise UnavailableError(f"{error} {_how_to_go_on(specs, made)}") from error
    except KeyboardInterrupt:
        if not dry_run:
            echo(f"Interrupted. {_how_to_go_on(specs, made)}", err=True)
        raise
    num_new = sum(submission.is_new for submission in made)
    totals = f"New jobs: {num_new:,}; existing jobs: {len(made) - num_new:,}."
    if dry_run and not as_json:
        echo(f"Nothing was queued. {totals}")
        echo(*_expected_end(settings, [submission.entry for submission in made if submission.is_new]))
    elif is_bulk and not as_json:
        echo(f"{totals} `svdq list` shows the newest.")
    _print_surprises(made, dry_run=dry_run)
    if do_replace is not None:
        _replace_older(settings, made, do_replace=do_replace, dry_run=dry_run)
    if bar.reasons:
        print_reasons(bar.reasons)
        echo(f"Bad photos left out: {len(bar.reasons):,} of {len(requests):,}.", err=True)
    exit_code = EXIT_FAILED if bar.reasons else 0
    return max(exit_code, _wait(settings, made, as_json)) if do_wait else exit_code


def _how_to_go_on(specs: Sequence[JobSpec], made: Sequence[Submission]) -> str:
    """Say how many jobs are queued at least, since answers may have been lost, and how to queue the rest."""
    queued = f"Of {count(sum(spec.num_jobs for spec in specs), 'job')}, at least {len(made):,} are queued;"
    return f"{queued} the same command queues the rest."


def _print_surprises(made: Sequence[Submission], *, dry_run: bool) -> None:
    """Print what was queued again, which photos share a video, and which lose much to its shape."""
    if again := Counter(submission.was for submission in made if submission.was):
        was = ", ".join(f"{number:,} {status}" for status, number in sorted(again.items()))
        echo(f"{again.total():,} {'would be ' * dry_run}queued again: {was} before.", err=True)
    same: dict[str, list[str]] = {}
    for submission in made:
        same.setdefault(submission.id, []).append(os.path.basename(submission.photo))
    print_reasons([f"One video of the same photo: {', '.join(of)}." for of in same.values() if len(set(of)) > 1])
    if cropped := {submission.photo: submission for submission in made if submission.warning}:
        first = next(iter(cropped.values()))
        others = f"Photos that lose much: {len(cropped):,}, such as " if len(cropped) > 1 else ""
        echo(f"{others}{first.name}: {first.warning}; --size auto or --fit pad keeps more.", err=True)


def _replace_older(settings: "Settings", made: Sequence[Submission], *, do_replace: bool, dry_run: bool) -> None:
    """Cancel older videos of the photos of a whole submission that still wait, or say how to."""
    from svdq.producer.connection import session
    from svdq.producer.job_control import cancel_waiting
    from svdq.producer.submitting.older import older_waiting

    with session(settings) as connection:
        older = older_waiting(connection, made)
        canceled = cancel_waiting(connection, older) if do_replace and not dry_run else []
    photos = {submission.job.image for submission in made if not submission.job.predecessor}
    of = "this photo" if len(photos) == 1 else "these photos"
    if canceled:
        echo(f"Canceled, since they still waited: {count(len(canceled), 'older video')} of {of}.", err=True)
    elif older and not do_replace:
        how = f"`svdq cancel {' '.join(older)}`" if len(older) <= MAX_NAMED else "--replace cancels them"
        echo(f"{count(len(older), 'older video')} of {of} still wait{'s' * (len(older) == 1)}: {how}.", err=True)
    elif older and dry_run:
        echo(f"{count(len(older), 'older video')} of {of} would be canceled.", err=True)


def print_reasons(reasons: Sequence[str]) -> None:
    """Print why photos were left out, the first of many."""
    for reason in reasons[:MAX_REASONS]:
        echo(reason, err=True)
    if len(reasons) > MAX_REASONS:
        echo(f"… and {len(reasons) - MAX_REASONS:,} more.", err=True)


def _expected_end(settings: "Settings", entries: Sequence[Entry]) -> list[str]:
    """Say when new jobs would be done, as far as workers have measured such videos, or somebody has published it."""
    from svdq.producer.connection import session
    from svdq.producer.status.estimates import NO_WORKER
    from svdq.producer.status.snapshot import take
    from svdq.producer.submitting.foresight import estimate_of

    if not entries:
        return []
    jobs, now = [entry.job for entry in entries], datetime.now().astimezone()
    with session(settings) as connection:
        found = estimate_of(take(connection), jobs, len(jobs), entries[0].at, now)
    if found.reason == NO_WORKER and not jobs[0].finishes:
        from svdq.worker.choice import published_time_s

        if (time_s := published_time_s(settings.model, jobs[0].parameters, len(jobs))) is not None:
            here = f"about {duration(time_s)} by published times of this machine's GPUs"
            return [f"No worker is running; with one that has loaded the model, they would take {here}."]
    if found.eta_s is None:
        return [f"When they would be done is not known: {found.reason}"]
    return [f"They would be done in about {duration(found.eta_s)}{found.by}."]


def _wait(settings: "Settings", made: Sequence[Submission], as_json: bool) -> int:
    from svdq.cli.wait import wait_for

    submitted = {submission.id: submission for submission in made}

    def print_end(view: "JobView") -> None:
        names = ("status", "outputs", "error", "notice", "started_at", "ended_at", "duration_s")
        ended = view.as_json()
        echo_json(_object(submitted[view.id]) | {name: ended[name] for name in names})

    return wait_for(settings, list(submitted), quiet=as_json, on_end=print_end if as_json else None)[1]


def _object(submission: Submission) -> dict[str, Any]:
    named = {"id": submission.id, "photo": submission.photo, "image": submission.job.image, "seed": submission.seed}
    described: dict[str, Any] = named | {"status": submission.status, "name": submission.name}
    described |= {name: text for name in ("link", "warning") if (text := getattr(submission, name))}
    return described | ({"at": rfc3339(submission.at)} if submission.at else {})


def _line(submission: Submission, *, has_hint: bool, dry_run: bool) -> str:
    if submission.again:
        note = f" ({submission.again})"
    elif submission.was:
        note = f" ({'would be ' * dry_run}queued again, {submission.was} before)"
    elif not submission.is_new:
        note = f" (exists already, {submission.status}; --force renders it again)"
    elif submission.at:
        note = f" (waits until {submission.at.astimezone():%a %Y-%m-%d %H:%M:%S %Z})"
    else:
        note = ""
    hint = f"  svdq wait {submission.id}" if has_hint and not dry_run else ""
    return f"{submission.id}  {named(submission.name, submission.link)}{note}{hint}"
