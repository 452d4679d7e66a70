"""Watches a folder: what `svdq watch` calls."""

import math
import os
import time
from collections import Counter
from pathlib import Path

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.producer.queue import session
from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.watching.folder_config import FolderConfig, PostSubmit, WatchOptions
from svdq.producer.watching.notifier import Notifier, Stop
from svdq.producer.watching.processor import REJECTED, Processor
from svdq.producer.watching.scanner import Debounce, Scanner
from svdq.producer.watching.state import Event, Report, State

#: Seconds between scans: without notifications or shortly after one, and else, in case a notification was lost.
POLL_S, RESCAN_S = 2.0, 60.0
#: Seconds for which a notification makes scans frequent: those about a new folder may be late or missing.
RECENT_S = 5.0
#: Scanning takes at most this share of the time.
MAX_SHARE = 0.1
#: Files that are processed between two scans at most.
BATCH = 100
#: Seconds until Redis or the storage is tried again: at first, and at most, doubling.
FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 30.0


def watch(
    settings: Settings, folder: Path, spec: JobSpec, options: WatchOptions, report: Report, stop: Stop
) -> Counter[str]:
    """Watch a folder until a stop is requested, or once.

    Args:
        settings: of this process.
        folder: the folder to watch.
        spec: the parameters of photos without an svdq.toml.
        options: how to watch.
        report: called with each event.
        stop: ends it, after the current file.

    Returns:
        the number of events by kind, and as `waiting` the number of files that are left to the next run.

    Raises:
        InputError: the folder or an option is not valid, or the folder is already watched; nothing was done.
        UnavailableError: the state cannot be used; with `once` also Redis or the storage.
    """
    counts: Counter[str] = Counter()

    def count_and_report(event: Event) -> None:
        counts[event.kind] += 1
        report(event)

    storage = Storage(settings.storage)
    root = _root(folder, storage.folder)
    post_submit = PostSubmit.parse(options.on_success, root)
    config = FolderConfig(root, spec)
    with State(settings.home, root) as state:
        unavailable = _check_redis(settings)
        if unavailable is not None and options.once:
            raise unavailable
        post_submit.prepare()
        excluded = [root / REJECTED, settings.home, *filter(None, (post_submit.target_folder, storage.folder))]
        scanner = Scanner(root, options, excluded, state)
        notifier = Notifier(root, options, stop)
        notifier.wait()  # from here on changes are noticed
        skipped = [] if options.existing or options.once else list(scanner.old_files())
        state.begin(options.selection, skipped)
        num_photos = sum(options.selection.matches(path) for path, _ in skipped)
        note = f" Photos that are in it already are skipped: {num_photos:,}; --existing submits them."
        report(Event(kind="watching", text=f"Watching {str(root)!r}.{note if num_photos else ''}"))
        waiting = Debounce(options.stable_for_s)
        processor = Processor(
            options, storage, settings.max_pixels, state, config, post_submit, waiting, count_and_report
        )
        watcher = Watcher(settings, scanner, processor, notifier, waiting, report, stop)
        if options.once:
            watcher.run_once()
        else:
            watcher.run(unavailable)
        counts["waiting"] = len(waiting.files)
        report(Event(kind="stopped", text=_summary(counts)))
        return counts


class Watcher:
    """The loop: scan, process what is due, wait for a notification."""

    def __init__(
        self,
        settings: Settings,
        scanner: Scanner,
        processor: Processor,
        notifier: Notifier,
        waiting: Debounce,
        report: Report,
        stop: Stop,
    ) -> None:
        """Initialize with the parts of a watcher."""
        self._settings = settings
        self._scanner = scanner
        self._processor = processor
        self._notifier = notifier
        self._waiting = waiting
        self._report = report
        self._stop = stop
        #: Names of the conditions that are reported as problems and not resolved yet.
        self._problems: set[str] = set()
        self._scan_at_s = self._earliest_scan_s = 0.0
        self._notified_s = -math.inf
        self._root_id: tuple[int, int] | None = None
        self._retry_at_s, self._delay_s = 0.0, FIRST_DELAY_S

    def run(self, unavailable: UnavailableError | None) -> None:
        """Watch until a stop is requested; `unavailable` says why Redis cannot be used at the start."""
        if unavailable is not None:
            self._back_off(unavailable)
        while not self._stop.is_set():
            if time.monotonic() >= self._retry_at_s:
                try:
                    if time.monotonic() >= self._scan_at_s:
                        self._scan()
                    self._process_due()
                except UnavailableError as error:
                    self._back_off(error)
            if self._notifier.wait():
                self._notified_s = time.monotonic()
                self._scan_at_s = min(self._scan_at_s, self._earliest_scan_s)

    def run_once(self) -> None:
        """Process what is there.

        Raises:
            UnavailableError: Redis, the storage or the state cannot be used.
        """
        self._scan()
        while any(file.due_s < math.inf for file in self._waiting.files.values()) and not self._stop.is_set():
            self._process_due()
            self._notifier.wait()

    def _process_due(self) -> None:
        due = self._waiting.due(time.monotonic())[:BATCH]
        if due:
            with session(self._settings) as connection:
                for file in due:
                    if self._stop.is_set():
                        return
                    if self._processor.process(file, connection):
                        self._delay_s = FIRST_DELAY_S
                        self._set("unavailable", None, "Redis and the storage can be used again.")

    def _scan(self) -> None:
        started_s = time.monotonic()
        root = self._scanner.root
        readable = f"The folder {str(root)!r} can be read again."
        try:
            status = root.stat()
            self._scanner.scan(self._waiting)
        except OSError as error:
            self._set("folder", f"The folder {str(root)!r} cannot be read ({error.strerror}).", readable)
            self._scan_at_s = started_s + POLL_S
            return
        self._set("folder", None, readable)
        if self._root_id is not None and self._root_id != (status.st_dev, status.st_ino):
            self._notifier.restart()  # it was mounted or created again
        self._root_id = (status.st_dev, status.st_ino)
        problem = self._notifier.problem
        self._set(
            "notifications",
            f"There are no notifications of changes ({problem}); the folder is polled." if problem else None,
            "There are notifications of changes again.",
        )
        ended_s = time.monotonic()
        is_frequent = self._notifier.is_polling or ended_s - self._notified_s < RECENT_S
        self._earliest_scan_s = ended_s + (ended_s - started_s) / MAX_SHARE
        self._scan_at_s = max(ended_s + (POLL_S if is_frequent else RESCAN_S), self._earliest_scan_s)

    def _back_off(self, error: UnavailableError) -> None:
        """Pause, for longer each time, because Redis, the storage or the state cannot be used."""
        self._set("unavailable", f"{error} Photos wait until it can be used again.", "")
        self._retry_at_s = time.monotonic() + self._delay_s
        self._delay_s = min(2 * self._delay_s, LONGEST_DELAY_S)

    def _set(self, condition: str, problem: str | None, resolved: str) -> None:
        """Report a condition when it becomes a problem, with that sentence, and when it is resolved."""
        if problem is not None and condition not in self._problems:
            self._problems.add(condition)
            self._report(Event(kind="problem", text=problem))
        elif problem is None and condition in self._problems:
            self._problems.remove(condition)
            self._report(Event(kind="resolved", text=resolved))


def _root(folder: Path, storage: Path | None) -> Path:
    """Resolve the folder to watch and check it."""
    if not os.path.isdir(folder):
        raise InputError(f"There is no folder {str(folder)!r} to watch; create it, or check its path.")
    root = folder.resolve()
    parents = (root, *root.parents)
    if storage is not None and os.path.isdir(storage) and any(os.path.samefile(storage, one) for one in parents):
        raise InputError(f"The folder {str(root)!r} is in svdq's own storage; watch another one.")
    try:
        os.scandir(root).close()
    except OSError as error:
        raise InputError(f"The folder {str(root)!r} cannot be read ({error.strerror}); check its rights.") from error
    return root


def _check_redis(settings: Settings) -> UnavailableError | None:
    """Connect to Redis, so that a problem is reported at the start."""
    try:
        with session(settings):
            return None
    except UnavailableError as error:
        return error


def _summary(counts: Counter[str]) -> str:
    parts = [f"{counts['submitted']} submitted, {counts['known']} known already, {counts['rejected']} rejected"]
    parts += [f"{counts[kind]} {kind}" for kind in ("ignored", "waiting") if counts[kind]]
    return f"{', '.join(parts)}."
