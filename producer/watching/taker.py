"""Taking one file that has stopped growing: submitting it, or refusing it, and putting it away.

Each step is written to the ledger before the next, so that whoever comes after a kill goes on from there: the job is
written down before it is enqueued, and enqueuing it twice under its id is enqueuing it once.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

from pydantic import ValidationError

from svdq.pipeline.errors import InputError
from svdq.producer.job import Job
from svdq.producer.submitting.enqueue import Entry
from svdq.producer.submitting.order import Order
from svdq.producer.submitting.photos import Photo
from svdq.producer.watching.aftermath import REJECTED, Then, finish, set_aside
from svdq.producer.watching.defaults import FolderDefaults
from svdq.producer.watching.events import Event, Summary
from svdq.producer.watching.ledger import Ledger, Record, State
from svdq.producer.watching.settling import Settling, Signature
from svdq.producer.watching.submitter import Submitter
from svdq.producer.watching.tree import Tree

#: A file that is no photo must not have changed for this many times as long as one that is: it may be half copied.
BAD_SETTLES = 4
#: Seconds until a file is tried again that is held up: its folder's svdq.toml is wrong, or it may not be read or moved.
HELD_S = 2.0


class Taker:
    """Takes files of one watched folder."""

    def __init__(
        self,
        *,
        tree: Tree,
        ledger: Ledger,
        defaults: FolderDefaults,
        submitter: Submitter,
        then: Then,
        settling: Settling,
        settle_s: float,
        patient: bool,
        tell: Callable[[Event], None],
    ) -> None:
        """Make it.

        Args:
            tree: the folder.
            ledger: what is remembered of its files.
            defaults: what is wanted of each photo.
            submitter: takes the photos.
            then: what is done with files afterwards.
            settling: the files that are waited for; those that were dealt with are taken out.
            settle_s: seconds without a change after which a file has stopped growing.
            patient: whether what grows or is held up is waited for; else it is left to another time.
            tell: is told of each event.
        """
        self._tree = tree
        self._ledger = ledger
        self._defaults = defaults
        self._submitter = submitter
        self._then = then
        self._settling = settling
        self._settle_s = settle_s
        self._patient = patient
        self._tell = tell
        self.summary = Summary()
        #: Why files are held up, by their path; each reason is told once.
        self._held: dict[str, str] = {}
        self._told: set[str] = set()

    def take(self, path: str) -> bool:
        """Take a file that is due, if it is as it was; return whether Redis and storage were reached for it.

        Raises:
            UnavailableError: Redis, the storage or the ledger cannot be used; nothing is lost, the file is still due.
        """
        signature = self._settling.signature(path)
        if self._has_changed(path, signature):
            return False
        if not self._tree.takes(path):
            self._leave_out(path, signature)
            return False
        record = self._ledger.get(path)
        if record is not None and record.signature == signature and record.state is State.SUBMITTED:
            self._put_away(path, record)
            return False
        try:
            order = self._defaults.order_for(path)
        except InputError as error:
            self._hold(path, f"{error} The photos that it counts for wait until it is mended.")
            return False
        try:
            photo = self._submitter.check(self._tree.root / path)
            entry = _entry(signature, record, photo, order)
            # It was only touched, or was copied here again.
            is_known = record is not None and record.state is State.DONE and record.job_id == entry.job_id
            if not is_known:
                self._submit(path, signature, photo, entry)
        except InputError as error:
            self._refuse(path, signature, error)
            return False
        if is_known:
            self._tell_known(path, entry.job_id, "submitted before")
        record = Record(signature=signature, state=State.SUBMITTED, job_id=entry.job_id)
        self._ledger.put(path, record)
        self._put_away(path, record)
        return not is_known

    def _leave_out(self, path: str, signature: Signature) -> None:
        """Tell, once, of a file that is no photo by its name."""
        self._ledger.put(path, Record(signature=signature, state=State.OTHER))
        self._let_go(path)
        self.summary.left_out += 1
        text = f"{path} is left out: by its name it is no photo. If it is one, convert it to JPEG."
        self._tell(Event(kind="left_out", path=path, text=text))

    def _submit(self, path: str, signature: Signature, photo: Photo, entry: Entry) -> None:
        record = Record(
            signature=signature,
            state=State.SUBMITTING,
            job_id=entry.job_id,
            job=entry.job.model_dump_json(),
            priority=entry.priority,
        )
        self._ledger.put(path, record)
        enqueued = self._submitter.submit(photo, entry)
        if enqueued.is_new:
            self.summary.submitted += 1
            self._tell(Event(kind="submitted", path=path, job_id=entry.job_id, text=f"{entry.job_id}  {path}"))
        else:
            status = enqueued.rq_job.get_status(refresh=False).value
            self._tell_known(path, entry.job_id, f"exists already, {status}")

    def _refuse(self, path: str, signature: Signature, error: InputError) -> None:
        """Reject a file that is no photo, once it is clear that it will be none."""
        if self._has_changed(path, signature):
            return
        if isinstance(error.__cause__, OSError) and error.__cause__.errno is not None:
            self._hold(path, f"{error} It is tried again.")  # it is its disk or its rights; Pillow's have no number
            return
        now_s = time.monotonic()
        is_young = self._settling.unchanged_s(path, now_s) < BAD_SETTLES * self._settle_s
        if is_young or (signature.size == 0 and self._tree.has_partial(path)):
            self._settling.put_off(path, now_s + self._settle_s)
            return
        moved_to = None
        if not self._then.keeps:
            try:
                moved_to = set_aside(self._tree.root, path, str(error))
            except OSError as trouble:
                reason = trouble.strerror or trouble
                error = InputError(f"{error} It cannot be moved to {REJECTED}/ ({reason}) and stays where it is.")
        if moved_to is None:
            self._ledger.put(path, Record(signature=signature, state=State.BAD))
        else:
            self._ledger.remove(path)
        self._let_go(path)
        self.summary.rejected += 1
        note = f" It is in {str(moved_to)!r} now." if moved_to else ""
        self._tell(
            Event(kind="rejected", path=path, text=f"{error}{note}", moved_to=str(moved_to) if moved_to else None)
        )

    def _put_away(self, path: str, record: Record) -> None:
        """Keep, move or delete a file that was submitted."""
        if self._has_changed(path, record.signature):
            return  # it is another one by now
        try:
            finish(self._then, self._tree.root, path)
        except OSError as error:
            where = str(self._tree.root / path)
            reason = error.strerror or error
            self._hold(path, f"The file {where!r} was submitted and cannot be moved or deleted ({reason}).")
            return
        if self._then.keeps:
            self._ledger.put(path, replace(record, state=State.DONE))
        else:
            self._ledger.remove(path)
        self._let_go(path)

    def _has_changed(self, path: str, signature: Signature) -> bool:
        """Whether a file is no longer as it was; then it is waited for anew, if it is there and there is time."""
        now = self._tree.look(path)
        if now == signature:
            return False
        self._let_go(path)
        if now is not None and self._patient:
            self._settling.see(path, now, time.monotonic())
        elif now is not None:
            self.summary.waiting += 1
        return True

    def _hold(self, path: str, reason: str) -> None:
        """Try a file again later, or another time; each reason is told once."""
        if reason not in self._told:
            self._told.add(reason)
            self._tell(Event(kind="trouble", path=path, text=reason))
        self._held[path] = reason
        if self._patient:
            self._settling.put_off(path, time.monotonic() + HELD_S)
        else:
            self._settling.forget(path)
            self.summary.waiting += 1

    def _let_go(self, path: str) -> None:
        """Wait for a file no longer."""
        self._settling.forget(path)
        reason = self._held.pop(path, None)
        if reason is not None and reason not in self._held.values():
            self._told.discard(reason)

    def _tell_known(self, path: str, job_id: str, note: str) -> None:
        self.summary.known += 1
        self._tell(Event(kind="known", path=path, job_id=job_id, text=f"{job_id}  {path} ({note})"))


def _entry(signature: Signature, record: Record | None, photo: Photo, order: Order) -> Entry:
    """Make the job of a photo, or read the one that was written down for it before a kill.

    Redis may have that one already, so it is that one, although another may be wanted by now.
    """
    if record is not None and record.state is State.SUBMITTING and record.signature == signature:
        with contextlib.suppress(ValidationError):  # it was written by another version
            job = Job.model_validate_json(record.job)
            if job.image == photo.key:
                return Entry(job=job, job_id=record.job_id, priority=record.priority)
    job, job_id = next(order.jobs(photo, first_index=1))
    return Entry(job=job, job_id=job_id, priority=order.priority)
