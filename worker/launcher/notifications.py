"""Sends notifications about a run by apprise: a pause after failures, a condition such as a full disk, the summary.

A thread does it, so that a run never waits for it or fails by it. URLs hold secrets and are never logged.
"""

import logging
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import redis

from svdq.pipeline.errors import InputError, SvdqError
from svdq.producer.job_control import pauses
from svdq.producer.queue import session
from svdq.producer.results.run_report import RunReport
from svdq.producer.settings import Settings
from svdq.producer.status.ranks import read_groups

if TYPE_CHECKING:
    from apprise import NotifyBase
from collections.abc import Mapping
from datetime import datetime, timedelta

from svdq.pipeline.errors import UnavailableError
from svdq.producer.results.run_report import jobs_left, records_from_redis, records_from_storage, summarize
from svdq.producer.storage.storage import Storage
from svdq.worker.launcher.launcher import Ending

logger = logging.getLogger(__name__)

#: Seconds between two looks at what is wrong.
POLL_S = 10.0
#: Seconds after which the same title may be sent again: a storage may come and go every few seconds.
AGAIN_S = 600.0
#: Seconds that the end of a run waits for services that are slow.
CLOSE_S = 20.0


class Notifications:
    """The notifications of one run; without URLs it does nothing."""

    def __init__(self, settings: Settings, *, poll_s: float = POLL_S, close_s: float = CLOSE_S) -> None:
        """Read the URLs.

        Raises:
            InputError: apprise cannot use one of them.
        """
        self._settings = settings
        self._poll_s, self._close_s = poll_s, close_s
        self._services = _services(settings.notify)
        self._waiting: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._sent_s: dict[str, float] = {}
        #: Titles of what was wrong at the last look and has been sent.
        self._sent: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="notify", daemon=True)

    @property
    def are_wanted(self) -> bool:
        """Whether there is anybody to notify."""
        return bool(self._services)

    def __enter__(self) -> Self:
        """Begin to look for what is wrong."""
        if self._services:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Send why the run failed, if it did, and wait for a limited time until everything is sent."""
        if not self._services:
            return
        if isinstance(error, SvdqError):
            self.send(f"svdq on {socket.gethostname()} failed", str(error))
        self._waiting.put(None)
        self._thread.join(self._close_s)

    def send(self, title: str, text: str) -> bool:
        """Send a text in the background, unless the same title was sent lately; return whether it is sent."""
        now_s = time.monotonic()
        if now_s - self._sent_s.get(title, now_s - AGAIN_S) < AGAIN_S:
            return False
        self._sent_s[title] = now_s
        self._waiting.put((title, text))
        return True

    def send_summary(self, report: RunReport) -> None:
        """Send the summary of the run."""
        counts = ", ".join(f"{report.count(end):,} {end}" for end in ("finished", "failed"))
        self.send(f"svdq on {socket.gethostname()}: {counts}", "\n".join(report.lines()))

    def _run(self) -> None:
        while True:
            try:
                message = self._waiting.get(timeout=self._poll_s)
            except queue.Empty:
                self._look()
                continue
            if message is None:
                return
            title, text = message
            for service in self._services:
                try:
                    is_sent = service.notify(body=text, title=title)
                except Exception as error:  # noqa: BLE001 - apprise's services raise many types, with the URL in them
                    logger.warning("The notification to %s failed: %s.", service.service_name, type(error).__name__)
                else:
                    if not is_sent:
                        logger.warning("The notification to %s was not accepted.", service.service_name)

    def _look(self) -> None:
        """Send what is wrong, once as long as it lasts."""
        try:
            with session(self._settings) as connection:
                problems = dict(_problems(connection, socket.gethostname()))
            self._sent = {title for title, text in problems.items() if title in self._sent or self.send(title, text)}
        except SvdqError as error:
            logger.debug("What is wrong cannot be read at present: %s", error)
        except Exception:
            logger.exception("What is wrong cannot be read.")


def _problems(connection: redis.Redis, host: str) -> Iterator[tuple[str, str]]:
    """Yield title and text of what is wrong with the ranks of a host, and of groups that paused after failures."""
    for sentence in pauses(connection):
        if sentence.startswith("PAUSED "):  # and not by a person
            yield f"svdq on {host} takes no more jobs", sentence
    for group in read_groups(connection):
        for rank in group.ranks:
            for condition in rank.conditions if rank.host == host else ():
                yield f"svdq on {host}: {condition.effect}", f"{condition.effect}: {condition.reason}"
        for name, sentence in group.failed_gpus.items() if group.ranks[0].host == host else ():
            yield f"svdq on {host}: {name} has failed", sentence


def _services(urls: Sequence[str]) -> "list[NotifyBase]":
    if not urls:
        return []
    import apprise

    # Its messages may have the URL in them.
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    services = []
    for number, url in enumerate(urls, 1):
        service = apprise.Apprise.instantiate(url, suppress_exceptions=True)
        if service is None:
            scheme, colon, _ = url.partition("://")
            shown = f"{scheme}://…" if colon else "not a URL"
            raise InputError(
                f"The notification URL number {number} ({shown}) is not one that apprise can use; correct --notify or "
                "SVDQ_NOTIFY (github.com/caronc/apprise/wiki lists the services)."
            )
        services.append(service)
    return services


#: How a burst ends that leaves jobs in the queue because of a pause.
NOT_TAKEN = "It ended because no jobs are taken."


def report_of_run(settings: Settings, ending: Ending, started_at: datetime) -> RunReport:
    """Report the jobs that ended during a run.

    `started_at` has a zone.

    Raises:
        UnavailableError: Redis cannot be reached.
    """
    now = datetime.now().astimezone()
    with session(settings) as connection:
        records = list(records_from_redis(connection, started_at, now, logger.warning))
        left = jobs_left(connection)
        reasons = pauses(connection)
    try:
        records += records_from_storage(Storage(settings.storage), started_at, logger.warning)
    except UnavailableError as error:
        logger.warning("The report has only the jobs that Redis still knows: %s", error)
    return summarize(
        records,
        left,
        since=started_at,
        until=now,
        ending=why_ended(ending, started_at, left=left, pauses=reasons),
    )


def exit_code(ending: Ending, report: RunReport) -> int:
    """Return the exit code of a run: 1 also for a burst in which all videos failed, or which found the queue paused."""
    all_failed = report.count("failed") > 0 and not report.count("finished")
    return ending.code or int(ending.burst and (all_failed or report.ending.startswith(NOT_TAKEN)))


def why_ended(ending: Ending, started_at: datetime, *, left: Mapping[str, int], pauses: Sequence[str]) -> str:
    """Say why a run ended.

    `started_at` has a zone, `left` counts the unfinished jobs by state, and `pauses` says in a sentence each why no
    jobs are taken.
    """
    if ending.ended_by == "signal":
        return "It was stopped by a signal."
    if ending.code:
        return f"It failed with exit code {ending.code}; its log says why."
    if ending.ended_by == "until" or (ending.until_s is not None and not ending.burst):
        return f"It ended at the time given, {_until(ending, started_at)}."
    if left.get("queued"):
        if pauses:
            return f"{NOT_TAKEN} {pauses[0]}"
        if ending.until_s is not None:
            return f"It ended because no further video could be done by {_until(ending, started_at)}."
    return "It ended because the queue was empty."


def _until(ending: Ending, started_at: datetime) -> str:
    assert ending.until_s is not None
    until = datetime.fromtimestamp(ending.until_s).astimezone()
    return until.strftime("%H:%M" if until - started_at < timedelta(days=1) else "%Y-%m-%d %H:%M")
