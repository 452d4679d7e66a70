"""A watched folder and the processor of its files, which is made anew as after a restart."""

import time
from pathlib import Path

import redis

from svdq.producer.connection import session
from svdq.producer.job import Job
from svdq.producer.queue import SvdqQueue, read_job
from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.watching.directory import signature
from svdq.producer.watching.folder_config import FileFilter, FolderConfig, PostSubmit, WatchOptions
from svdq.producer.watching.processor import Processor
from svdq.producer.watching.scanner import Debounce
from svdq.producer.watching.state import Event, FileRecord, OnEvent, State


class Bench:
    """Processes files that have stopped growing, with a real Redis, storage and state."""

    def __init__(self, settings: Settings, root: Path, options: Draft) -> None:
        self.settings, self.root, self.options = settings, root, options
        self.on_success = "keep"
        self.waiting = Debounce(0)
        self.events: list[Event] = []

    def process(
        self,
        path: str,
        *,
        storage_class: type[Storage] = Storage,
        state_class: type[State] = State,
        report: OnEvent | None = None,
        times: int = 2,
    ) -> FileRecord | None:
        """Process a file, if it is due; return its record."""
        with state_class(self.settings.home, self.root) as state, session(self.settings) as connection:
            processor = Processor(
                options=WatchOptions(selection=FileFilter(recursive=True), stable_for_s=0),
                storage=storage_class(self.settings.storage),
                settings=self.settings,
                state=state,
                config=FolderConfig(self.root, JobSpec(drafts=(self.options,))),
                post_submit=PostSubmit.parse(self.on_success, self.root),
                waiting=self.waiting,
                report=report or self.events.append,
            )
            version = signature(self.root, path)
            assert version is not None
            file = self.waiting.update(path, version, time.monotonic())
            for _ in range(times):
                if path in self.waiting.files:
                    processor.process(file, connection)
            return state.get(path)

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


def jobs(connection: redis.Redis) -> list[Job]:
    """Return the jobs in the queue."""
    found = map(read_job, SvdqQueue(connection=connection).jobs)
    return [job for job in found if job is not None]
