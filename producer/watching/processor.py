"""Processes one file that has stopped growing, once more after a kill: submits or rejects it, then moves it."""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import redis

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.known_model import NOT_KNOWN, Expected
from svdq.producer.decoder import CHECK_S, Decoder, StoppedError, TooSlowError
from svdq.producer.job_control import WAITING, cancel
from svdq.producer.queue import statuses
from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.loras import KnownLoras
from svdq.producer.submitting.photos import MAX_FOREIGN_BYTES, Photo, read_file, source_path
from svdq.producer.submitting.sources import SUFFIX, PhotoRequest
from svdq.producer.submitting.submission import claim_storage, entries_of, submit_checked
from svdq.producer.watching.companions import Companions
from svdq.producer.watching.directory import delete_file, move_file, open_file, signature
from svdq.producer.watching.folder_config import FolderConfig, PostSubmit, WatchOptions
from svdq.producer.watching.scanner import Debounce, WaitingFile
from svdq.producer.watching.state import Event, FileRecord, Kind, OnEvent, State

REJECTED = "rejected"  # folder in the watched folder for files that are no photos
#: A file that is no photo must be unchanged for this many times `--stable-for`: it may be half copied.
BAD_FACTOR = 4
QUICK_S = 2  # seconds of a processor that a photo may take while others wait
HOLD_S = 2.0  # seconds until a file on hold is tried again
REPORT_AGAIN_S = 60.0  # seconds without a file on hold for a reason after which the reason is reported again


@dataclass(kw_only=True)
class Processor:
    """Processes files of one watched folder."""

    options: WatchOptions
    storage: Storage
    settings: Settings
    state: State
    config: FolderConfig
    post_submit: PostSubmit
    waiting: Debounce
    report: OnEvent
    is_stopped: Callable[[], bool] = lambda: False
    expected: Expected = NOT_KNOWN  # which videos are for whose parameters do not decide
    held_s: dict[str, float] = field(default_factory=dict)  # when a file was last on hold, by the reason

    def __post_init__(self) -> None:
        self._root = self.post_submit.root
        stable_for_s = self.options.stable_for_s
        self._decoder = Decoder(is_stopped=self.is_stopped)
        self._beside = Companions(self.config, self.post_submit, stable_for_s, self._decoded)

    def process(self, file: WaitingFile, connection: redis.Redis) -> None:
        """Process a file that is due, if it has not changed; it is still due after UnavailableError and RedisError."""
        if self._has_changed(file):
            return
        if not file.signature.is_regular or not self.options.selection.matches(file.path):
            self._ignore(file)
        elif file.is_submitted:
            self._finish(file)
        elif (first := self._beside.first_of(file.path)) is not None:
            self._pair(file, first, connection)
        else:
            self._submit_or_wait(file, connection)

    def _submit_or_wait(self, file: WaitingFile, connection: redis.Redis) -> None:
        with contextlib.suppress(StoppedError):  # it waits for the next run
            try:
                self._submit_checked(file, connection)
            except TooSlowError as error:
                if file.is_slow:
                    self._reject(file, str(error))
                file.is_slow = True

    def _decoded(self, file: WaitingFile, data: bytes, path: Path) -> Photo:
        """Check a photo, or its last frame; a `file` that is not slow may take a moment only."""
        cpu_s = CHECK_S if file.is_slow else QUICK_S
        return self._decoder.check_data(data, path, self.settings.max_pixels, cpu_s)

    def _submit_checked(self, file: WaitingFile, connection: redis.Redis) -> None:
        try:
            asked = self.config.spec_for(file.path)
            expected = asked if asked.expected.model else replace(asked, expected=self.expected)
            added = self._beside.add(file, expected)
            spec = KnownLoras(self.settings, connection).looked_up(added[0]) if added else asked
        except TooSlowError:
            raise
        except InputError as error:
            self._hold(file, f"{error} Its photos wait until this is corrected.")
            return
        if added is None:
            return
        _, last = added
        try:
            with open_file(self._root, file.path) as opened:
                data = read_file(opened, self._root / file.path, MAX_FOREIGN_BYTES)
            if self._has_changed(file):
                return
            photo = self._decoded(file, data, self._root / file.path)
        except OSError as error:
            self._hold(file, f"{self._shown(file)} cannot be read ({error.strerror or error}). It waits.")
            return
        except TooSlowError:
            raise
        except InputError as error:
            self._reject(file, str(error))
            return
        source = source_path(self._root.name, *file.path.split("/"))
        try:
            job_id = self._submit(file, replace(photo, source=source, last=last), spec, connection)
        except InputError as error:  # another program has written something under the job's key
            self._hold(file, f"{error} The photo waits until this is corrected.")
            return
        file.is_submitted = True
        if self.post_submit.keep:
            self.state.put(file.path, FileRecord(file.signature, "submitted", job_id))
        self._finish(file)

    def _submit(self, file: WaitingFile, photo: Photo, spec: JobSpec, connection: redis.Redis) -> str:
        """Submit a photo unless its record has the same job, and this did not fail; return the job's id."""
        request = PhotoRequest(path=photo.path, photo=photo, spec=spec)
        links = list(entries_of([request]))
        entry, job_ids = links[-1], [link.job_id for link in links]
        record = self.state.get(file.path)
        kind: Kind = "known"
        is_recorded = record is not None and record.outcome == "submitted" and record.job_id == entry.job_id
        if is_recorded and None in statuses(connection, job_ids):
            note = " (submitted before)"  # Redis has forgotten it, and it was only touched, or copied again
        elif record and record.outcome == "lost" and self.storage.exists(entry.job.sidecar_key(entry.job_id)):
            note = " (finished before)"
        else:
            claim_storage(connection, self.storage)
            found = list(submit_checked(connection, self.storage, self.settings, [request]))
            submission = next((each for each in found if each.is_new), found[-1])
            kind = "submitted" if submission.is_new else "known"
            if submission.again:
                note = f" ({submission.again})"
            elif submission.was:
                note = f" (queued again, {submission.was} before)"
            elif submission.is_new:
                note = f" ({found[0].warning}; size auto or fit pad keeps more of it)" if found[0].warning else ""
            else:
                note = " (submitted before)" if is_recorded else f" (exists already, {submission.status})"
        text = f"{entry.job_id}  {file.path}{note}"
        self.report(Event(kind=kind, path=file.path, job_id=entry.job_id, text=text))
        return entry.job_id

    def _finish(self, file: WaitingFile) -> None:
        """Keep, move or delete a photo that was submitted, unless it was replaced since or is gone."""
        post_submit, moved_to = self.post_submit, None
        try:
            with contextlib.suppress(FileNotFoundError):
                if target := post_submit.target:
                    moved_to = move_file(self._root, file.path, file.signature, target)
                elif not post_submit.keep:
                    delete_file(self._root, file.path, file.signature)
        except OSError as error:
            why = f"was submitted and cannot be moved or deleted ({error.strerror or error})."
            self._hold(file, f"{self._shown(file)} {why}")
            return
        if not post_submit.keep:
            self._beside.finish(file, moved_to)
            for path in (*file.beside, file.path):
                self.state.remove(path)
        self.waiting.remove(file)

    def _pair(self, last: WaitingFile, first: str, connection: redis.Redis) -> None:
        """Remember a last frame; if its photo was submitted without it, submit both in place of a job that waits."""
        self.state.put(last.path, FileRecord(last.signature, "last"))
        self.waiting.remove(last)
        if not first:
            text = f"{last.path} waits: there is no photo beside it whose last frame it can be."
            self.report(Event(kind="ignored", path=last.path, text=text))
        elif first not in self.waiting.files and (version := signature(self._root, first)):
            record = self.state.get(first)
            if record and record.job_id and statuses(connection, [record.job_id])[0] in WAITING:
                with contextlib.suppress(InputError):  # it has just been begun
                    cancel(connection, record.job_id)
            self.waiting.update(first, version, time.monotonic())

    def _ignore(self, file: WaitingFile) -> None:
        self.state.put(file.path, FileRecord(file.signature, "ignored"))
        self.waiting.remove(file)
        reason = "its name does not end like a photo's. If it is a photo, convert it to JPEG."
        if not file.signature.is_regular:
            reason = "it is a symbolic link or a special file. To submit it, put the photo itself here."
        elif file.path.lower().endswith(SUFFIX):
            reason = self._beside.why_ignored(file.path)
        if reason:
            self.report(Event(kind="ignored", path=file.path, text=f"{file.path} is ignored: {reason}"))

    def _reject(self, file: WaitingFile, reason: str) -> None:
        """Reject a file that is no photo, unless it may still become one."""
        now_s = time.monotonic()
        if now_s - file.since_s < BAD_FACTOR * self.options.stable_for_s:
            file.due_s = now_s + self.options.stable_for_s
            return
        if file.signature.size == 0:  # some browsers put an empty file in the final place of a download
            self._hold(file, f"{self._shown(file)} is empty (0 bytes). Waiting for its content.")
            return
        self.waiting.remove(file)
        moved_to = None
        if not self.post_submit.keep:
            try:
                moved_to = move_file(self._root, file.path, file.signature, REJECTED, reason)
            except OSError as error:
                reason += f" It cannot be moved to {REJECTED}/ ({error.strerror or error}) and stays where it is."
            else:
                self.state.remove(file.path)
                if moved_to is None:  # it was replaced
                    return
                reason += f" It was moved to {str(moved_to)!r}."
        if moved_to is None:
            self.state.put(file.path, FileRecord(file.signature, "rejected"))
        self.report(Event(kind="rejected", path=file.path, text=reason, moved_to=str(moved_to) if moved_to else None))

    def _has_changed(self, file: WaitingFile) -> bool:
        """Return whether a file has another version, which then waits until it is stable, or for the next run."""
        now = signature(self._root, file.path)
        if now == file.signature:
            return False
        self.waiting.remove(file)
        if now is not None:
            newer = self.waiting.update(file.path, now, time.monotonic())
            newer.due_s = math.inf if self.options.once else newer.due_s
        return True

    def _hold(self, file: WaitingFile, reason: str) -> None:
        now_s = time.monotonic()
        file.due_s = math.inf if self.options.once else now_s + HOLD_S
        if now_s - self.held_s.get(reason, -math.inf) > REPORT_AGAIN_S:
            self.report(Event(kind="problem", path=file.path, text=reason))
        self.held_s[reason] = now_s

    def _shown(self, file: WaitingFile) -> str:
        return f"The file {str(self._root / file.path)!r}"
