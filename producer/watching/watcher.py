"""Watches a folder: scans it, processes the files that are due, and pauses."""

import contextlib
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.pipeline.models.known_model import Expected
from svdq.pipeline.models.model_name import model_stem
from svdq.producer.connection import database_id, session
from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.model_choice import configured_model, expect, why_default
from svdq.producer.watching.folder_config import FolderConfig, PostSubmit, WatchOptions
from svdq.producer.watching.processor import REJECTED, Processor
from svdq.producer.watching.scanner import Debounce, Scanner
from svdq.producer.watching.state import Event, OnEvent, State

SCAN_S, MAX_SHARE = 2.0, 0.02  # longest pause between scans, and their largest share of time
TICK_S = 0.2  # seconds between two checks for a stop request
BATCH = 100  # files that are processed between two scans at most
HANGS_S = 30.0  # seconds of one photo, or of one scan, after which it is reported
FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 30.0  # until another try of Redis or the storage, doubling


def watch(
    settings: Settings,
    folder: Path,
    spec: JobSpec,
    options: WatchOptions,
    report: OnEvent,
    is_stopped: Callable[[], bool],
) -> Counter[str]:
    """Watch a folder until a stop is requested, or once; scan it, because network shares send no notifications.

    `spec` has the parameters of photos without an svdq.toml. After `is_stopped` returns True, the current file is the
    last. Returns the number of events by kind, and as `waiting` the number of files left to the next run. Raises
    InputError before anything was done, and UnavailableError for the state; with `once` also for Redis or the storage.
    """
    counts: Counter[str] = Counter()

    def count_and_report(event: Event) -> None:
        counts[event.kind] += 1
        report(event)

    storage = Storage.open_for_command(settings.storage)
    root = _root(folder, storage.folder)
    post_submit = PostSubmit.parse(options.on_success, root)
    if "" in options.selection.globs:
        raise InputError("--glob is empty; give a pattern such as '*.jpg', or leave it out.")
    named = spec.drafts[0].model
    model = configured_model(settings)
    if model and named and model_stem(named) != model_stem(model.name):
        model = None  # what the workers have of that name decides
    config = FolderConfig(root, replace(spec, expected=Expected(model=model)))
    with State(settings.home, root) as state:
        unavailable, default, database = None, "", ""
        try:
            with session(settings) as connection:  # so that a problem is reported at the start
                database = database_id(connection)
                if config.is_open:
                    default = f" {why_default(expect(settings, connection, named))}".rstrip()
        except UnavailableError as error:
            if options.once:
                raise
            unavailable = error
        post_submit.prepare()
        targets = state.targets | ({post_submit.target} if post_submit.target else set())
        excluded = [root / REJECTED, settings.home, *([storage.folder] if storage.folder else ())]
        excluded += [root / target for target in targets]
        scanner = Scanner(root, options, excluded, state)
        skipped = [] if options.existing or options.once else list(scanner.old_files())
        state.begin(options.selection, skipped, targets, database)
        num_photos = sum(options.selection.matches(path) for path, _ in skipped)
        note = f" Photos that are in it already are skipped: {num_photos:,}; --existing submits them."
        report(Event(kind="watching", text=f"Watching {str(root)!r}.{note if num_photos else ''}{default}"))
        processor = Processor(
            options=options,
            storage=storage,
            settings=settings,
            state=state,
            config=config,
            post_submit=post_submit,
            waiting=Debounce(options.stable_for_s),
            report=count_and_report,
            is_stopped=is_stopped,
        )
        watcher = _Watcher(settings, named, scanner, processor, report, is_stopped)
        if options.once:
            watcher.run_once()
        else:
            watcher.run(unavailable)
        counts["waiting"] = len(processor.waiting.files)
        text = f"{counts['submitted']} submitted, {counts['known']} known already, {counts['rejected']} rejected"
        text += "".join(f", {counts[kind]} {kind}" for kind in ("ignored", "waiting") if counts[kind])
        report(Event(kind="stopped", text=f"{text}."))
        return counts


@dataclass
class _Watcher:
    settings: Settings
    named: str | None  # the model that the command names
    scanner: Scanner
    processor: Processor
    report: OnEvent
    is_stopped: Callable[[], bool]
    problems: set[str] = field(default_factory=set)  # names of conditions that are not resolved
    scan_at_s: float = 0.0
    retry_at_s: float = 0.0
    delay_s: float = FIRST_DELAY_S

    def __post_init__(self) -> None:
        self.waiting = self.processor.waiting
        self.pause_s = min(SCAN_S, self.processor.options.stable_for_s)

    def run(self, unavailable: UnavailableError | None) -> None:
        """Watch until a stop is requested; `unavailable` says why Redis cannot be used at the start."""
        if unavailable is not None:
            self._back_off(unavailable)
        while not self.is_stopped():
            if time.monotonic() >= self.retry_at_s:
                try:
                    if time.monotonic() >= self.scan_at_s:
                        self._scan()
                    self._process_due()
                except UnavailableError as error:
                    self._back_off(error)
            time.sleep(min(TICK_S, self.pause_s))

    def run_once(self) -> None:
        self._scan()
        while any(file.due_s < math.inf for file in self.waiting.files.values()) and not self.is_stopped():
            self._process_due()
            time.sleep(min(TICK_S, self.pause_s))

    def _process_due(self) -> None:
        due = self.waiting.due(time.monotonic())[:BATCH]
        if due:
            with session(self.settings) as connection:
                self.processor.expected = expect(self.settings, connection, self.named)
                for file in due:
                    if self.is_stopped():
                        return
                    with self._said_if_it_hangs("A photo"):
                        self.processor.process(file, connection)
            # Files that could not be processed before were the first of these.
            self.delay_s = FIRST_DELAY_S
            self._set("unavailable", None, "Redis and the storage can be used again.")

    @contextlib.contextmanager
    def _said_if_it_hangs(self, work: str) -> Iterator[None]:
        """Report once that work takes long, as on a mount that does not answer, and once that it goes on."""
        problem = f"{work} has taken {HANGS_S:.0f} s: the folder or the storage does not answer. Photos wait for it."
        timer = threading.Timer(HANGS_S, self._set, ("hangs", problem, ""))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            self._set("hangs", None, "The folder and the storage answer again.")

    def _scan(self) -> None:
        started_s = time.monotonic()
        problem = None
        try:
            with self._said_if_it_hangs("A look at the folder"):
                self.scanner.scan(self.waiting)
        except OSError as error:
            problem = f"The folder {str(self.scanner.root)!r} cannot be read ({error.strerror})."
        self._set("folder", problem, f"The folder {str(self.scanner.root)!r} can be read again.")
        ended_s = time.monotonic()
        self.scan_at_s = ended_s + max(self.pause_s, (ended_s - started_s) / MAX_SHARE)

    def _back_off(self, error: UnavailableError) -> None:
        """Pause, for longer each time, because Redis, the storage or the state cannot be used."""
        self._set("unavailable", f"{error} Photos wait until it can be used again.", "")
        self.retry_at_s = time.monotonic() + self.delay_s
        self.delay_s = min(2 * self.delay_s, LONGEST_DELAY_S)

    def _set(self, condition: str, problem: str | None, resolved: str) -> None:
        """Report a condition when it becomes a problem, with that sentence, and when it is resolved."""
        if problem is not None and condition not in self.problems:
            self.problems.add(condition)
            self.report(Event(kind="problem", text=problem))
        elif problem is None and condition in self.problems:
            self.problems.remove(condition)
            self.report(Event(kind="resolved", text=resolved))


def _root(folder: Path, storage: Path | None) -> Path:
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
