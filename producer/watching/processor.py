"""Processes one file that has stopped growing: submits or rejects it, then keeps, moves or deletes it.

A kill between any two steps needs no record of the steps: the file is processed again, and submitting the same photo
with the same parameters finds the job that exists.
"""

import contextlib
import os
import time
from collections import Counter
from pathlib import Path

import redis

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.producer.queue import connect, plain_errors
from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.enqueue import Enqueued, Entry, enqueue_many
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.photos import check_data, read_file
from svdq.producer.watching.directory import Signature, open_file, open_folder, signature, split
from svdq.producer.watching.events import Event, Report, Summary
from svdq.producer.watching.folder_config import FolderConfig
from svdq.producer.watching.options import WatchOptions, is_temporary
from svdq.producer.watching.post_submit import REJECTED, PostSubmit, reject
from svdq.producer.watching.scanner import Debounce
from svdq.producer.watching.state import Outcome, Record, State

#: A file that is no photo must be unchanged for this many times `--stable-for`: it may be half copied.
BAD_FACTOR = 4
#: Seconds until a file on hold is tried again: its svdq.toml is invalid, or it cannot be read or moved.
HOLD_S = 2.0


class Submitter:
    """Submits photos one at a time over a connection that is renewed when it is lost."""

    def __init__(self, settings: Settings) -> None:
        """Initialize; nothing is reached yet.

        Raises:
            InputError: there is no such kind of storage.
        """
        self.settings = settings
        self._storage = Storage(settings.storage)
        self._connection: redis.Redis | None = None

    def submit(self, data: bytes, entry: Entry) -> Enqueued:
        """Store a photo and enqueue its job, unless a job of that id exists.

        Raises:
            UnavailableError: Redis or the storage cannot be reached; the same can be done again.
        """
        if not self._storage.has_input(entry.job.image, len(data)):
            self._storage.write_bytes(entry.job.image, data)
        if self._connection is not None:
            with contextlib.suppress(UnavailableError):  # the server may have been restarted
                return self._enqueue(self._connection, entry)
            self.close()
        self._connection = connect(self.settings)
        return self._enqueue(self._connection, entry)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _enqueue(self, connection: redis.Redis, entry: Entry) -> Enqueued:
        with plain_errors(self.settings):
            return enqueue_many(connection, [entry])[0]


class Processor:
    """Processes files of one watched folder."""

    def __init__(
        self,
        root: Path,
        options: WatchOptions,
        state: State,
        config: FolderConfig,
        submitter: Submitter,
        post_submit: PostSubmit,
        pending: Debounce,
        report: Report,
    ) -> None:
        """Initialize.

        Args:
            root: the watched folder, resolved.
            options: how it is watched.
            state: what became of files.
            config: the parameters of each photo.
            submitter: takes the photos.
            post_submit: what happens to files afterwards.
            pending: files that wait; those that were processed are removed.
            report: called with each event.
        """
        self._root = root
        self._selection = options.selection
        self._stable_for_s = options.stable_for_s
        self._once = options.once
        self._max_pixels = submitter.settings.max_pixels
        self._state = state
        self._config = config
        self._submitter = submitter
        self._post_submit = post_submit
        self._pending = pending
        self._report = report
        self.summary = Summary()
        #: Files that were submitted and could not be moved or deleted yet.
        self._submitted: dict[str, Signature] = {}
        #: Why files are on hold, and how many there are for each reason, which is reported once.
        self._on_hold: dict[str, str] = {}
        self._reasons: Counter[str] = Counter()

    def process(self, path: str) -> bool:
        """Process a file that is due, if it has not changed; return whether it was submitted.

        Raises:
            UnavailableError: Redis, the storage or the state cannot be used; the file is still due.
        """
        version = self._pending.signature(path)
        if self._has_changed(path, version):
            return False
        if not version.is_regular or not self._selection.matches(path):
            self._ignore(path, version)
            return False
        if self._submitted.get(path) == version:
            self._finish(path, version)
            return False
        try:
            spec = self._config.spec_for(path)
        except InputError as error:
            self._hold(path, f"{error} Its photos wait until this is corrected.")
            return False
        try:
            data = self._read(path)
            if self._has_changed(path, version):
                return False
            entry = self._entry(path, data, spec)
        except OSError as error:
            reason = error.strerror or error
            self._hold(path, f"The file {str(self._root / path)!r} cannot be read ({reason}). Trying again.")
            return False
        except InputError as error:
            self._reject(path, version, error)
            return False
        try:
            is_submitted = self._submit(path, data, entry)
        except InputError as error:  # another program has written something under the job's key
            self._hold(path, f"{error} Trying again.")
            return False
        self._submitted[path] = version
        if self._post_submit.keep:
            self._state.put(path, Record(version, Outcome.SUBMITTED, entry.job_id))
        self._finish(path, version)
        return is_submitted

    def _read(self, path: str) -> bytes:
        folder, name = split(path)
        with open_folder(self._root, folder) as descriptor, open_file(name, descriptor) as file:
            return read_file(file, self._root / path, self._max_pixels)

    def _entry(self, path: str, data: bytes, spec: JobSpec) -> Entry:
        photo = check_data(data, self._root / path, self._max_pixels)
        job, job_id = next(spec.jobs(photo, first_index=1))
        return Entry(job=job, job_id=job_id, priority=spec.priority)

    def _submit(self, path: str, data: bytes, entry: Entry) -> bool:
        """Submit a photo; return whether Redis was asked."""
        record = self._state.get(path)
        if record is not None and record.outcome is Outcome.SUBMITTED and record.job_id == entry.job_id:
            self._report_known(path, entry.job_id, "submitted before")  # it was only touched, or copied again
            return False
        enqueued = self._submitter.submit(data, entry)
        if enqueued.is_new:
            self.summary.submitted += 1
            text = f"{entry.job_id}  {path}"
            self._report(Event(kind="submitted", path=path, job_id=entry.job_id, text=text))
        else:
            status = enqueued.rq_job.get_status(refresh=False).value
            self._report_known(path, entry.job_id, f"exists already, {status}")
        return True

    def _finish(self, path: str, version: Signature) -> None:
        """Keep, move or delete a file that was submitted."""
        try:
            self._post_submit.finish(path, version)
        except FileNotFoundError:
            pass  # somebody else has removed it
        except OSError as error:
            where = str(self._root / path)
            reason = error.strerror or error
            self._hold(path, f"The file {where!r} was submitted and cannot be moved or deleted ({reason}).")
            return
        if not self._post_submit.keep:
            self._state.remove(path)
        self._release(path)

    def _ignore(self, path: str, version: Signature) -> None:
        """Report a file that is not opened, once."""
        self._state.put(path, Record(version, Outcome.IGNORED))
        self._release(path)
        self.summary.ignored += 1
        reason = "its name is not that of a photo. If it is one, convert it to JPEG."
        if not version.is_regular:
            reason = "it is a symbolic link or a special file. To submit it, put the photo itself here."
        self._report(Event(kind="ignored", path=path, text=f"{path} is ignored: {reason}"))

    def _reject(self, path: str, version: Signature, error: InputError) -> None:
        """Reject a file that is no photo, unless it may still become one."""
        now_s = time.monotonic()
        is_young = self._pending.unchanged_s(path, now_s) < BAD_FACTOR * self._stable_for_s
        if is_young or (version.size == 0 and self._has_partial(path)):
            self._pending.postpone(path, now_s + self._stable_for_s)
            return
        moved_to = None
        if not self._post_submit.keep:
            try:
                moved_to = reject(self._root, path, version, str(error))
            except OSError as problem:
                reason = problem.strerror or problem
                error = InputError(f"{error} It cannot be moved to {REJECTED}/ ({reason}) and stays where it is.")
            else:
                if moved_to is None:  # it was replaced
                    self._release(path)
                    return
        if moved_to is None:
            self._state.put(path, Record(version, Outcome.REJECTED))
        else:
            self._state.remove(path)
        self._release(path)
        self.summary.rejected += 1
        text = f"{error} It was moved to {str(moved_to)!r}." if moved_to else str(error)
        self._report(Event(kind="rejected", path=path, text=text, moved_to=str(moved_to) if moved_to else None))

    def _has_partial(self, path: str) -> bool:
        """Return whether a download is beside a file: some browsers put an empty file in its final place."""
        folder, name = split(path)
        stem = Path(name).stem
        with contextlib.suppress(OSError), open_folder(self._root, folder) as descriptor:
            return any(is_temporary(other) and other.startswith(stem) for other in os.listdir(descriptor))
        return False

    def _has_changed(self, path: str, version: Signature) -> bool:
        """Return whether a file has another version; that one waits until it is stable, or for the next run."""
        now = signature(self._root, path)
        if now == version:
            return False
        self._release(path)
        if now is not None and self._once:
            self.summary.waiting += 1
        elif now is not None:
            self._pending.update(path, now, time.monotonic())
        return True

    def _hold(self, path: str, reason: str) -> None:
        """Try a file again later, or in the next run; each reason is reported once."""
        if self._on_hold.get(path) != reason:
            self._release_hold(path)
            self._on_hold[path] = reason
            self._reasons[reason] += 1
            if self._reasons[reason] == 1:
                self._report(Event(kind="problem", path=path, text=reason))
        if self._once:
            self._pending.remove(path)
            self.summary.waiting += 1
        else:
            self._pending.postpone(path, time.monotonic() + HOLD_S)

    def _release(self, path: str) -> None:
        """Stop waiting for a file."""
        self._pending.remove(path)
        self._submitted.pop(path, None)
        self._release_hold(path)

    def _release_hold(self, path: str) -> None:
        reason = self._on_hold.pop(path, None)
        if reason is not None:
            self._reasons[reason] -= 1

    def _report_known(self, path: str, job_id: str, note: str) -> None:
        self.summary.known += 1
        self._report(Event(kind="known", path=path, job_id=job_id, text=f"{job_id}  {path} ({note})"))
