"""Reports a run, and sends notifications about it by apprise, in a thread. URLs hold secrets and are never logged."""

import logging
import math
import queue
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Self

from svdq.pipeline.errors import InputError, SvdqError, UnavailableError, how_to_install
from svdq.producer.connection import clock_of, session
from svdq.producer.pauses import Pause, read_pauses
from svdq.producer.results.run_report import (
    RunReport,
    jobs_left,
    left_to_others,
    records_from_redis,
    records_from_storage,
    summarize,
)
from svdq.producer.settings import Settings, scheme_of
from svdq.producer.status.ranks import conditions_of, read_groups
from svdq.producer.storage.storage import Storage
from svdq.producer.text import count
from svdq.worker.launcher.launcher import Ending

if TYPE_CHECKING:
    from apprise import NotifyBase

logger = logging.getLogger(__name__)

POLL_S = 10.0  # seconds between two searches for problems
AGAIN_S = 600.0  # seconds without a problem after which it is sent again
CLOSE_S = 20.0  # seconds that the end of a run waits for slow services
NOT_ABLE = "It ended because the queued jobs wait for other workers:"  # the ending of a burst that cannot make them
NOT_TAKEN = "It ended because no jobs are taken."  # the ending of a burst that found intake paused


class Notifications:
    """The notifications of one run, as a context manager; without URLs it does nothing."""

    def __init__(self, settings: Settings, *, poll_s: float = POLL_S, close_s: float = CLOSE_S) -> None:
        """Read the URLs; raise an InputError if apprise cannot use one of them."""
        self._settings = settings
        self._poll_s, self._close_s = poll_s, close_s
        self._services = _services(settings.notify)
        self._waiting: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._seen_s: dict[str, float] = {}  # when each problem was last seen, by its title
        self._told: set[str] = set()  # the titles of outages whose ends are to be sent
        self._thread = threading.Thread(target=self._run, name="notify", daemon=True)

    @property
    def are_wanted(self) -> bool:
        """Whether there is anybody to notify."""
        return bool(self._services)

    def __enter__(self) -> Self:
        if self._services:
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Send why the run failed, if it did; wait at most `close_s` until everything is sent."""
        if not self._services:
            return
        if isinstance(error, SvdqError):
            self.send(f"svdq on {socket.gethostname()} failed", str(error))
        self._waiting.put(None)
        self._thread.join(self._close_s)

    def send(self, title: str, text: str) -> None:
        """Send a text in the background."""
        self._waiting.put((title, text))

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
                    if not service.notify(body=text, title=title):
                        logger.warning("The notification to %s was not accepted.", service.service_name)
                except Exception as error:  # noqa: BLE001 - apprise's services raise many types, with the URL in them
                    logger.warning("The notification to %s failed: %s.", service.service_name, type(error).__name__)

    def _look(self) -> None:
        host = socket.gethostname()
        try:
            with session(self._settings) as connection:
                by_no_person = [each.text for each in read_pauses(connection) if not each.by_person]
                groups = [group for group in read_groups(connection) if group.ranks[0].host == host]
        except SvdqError as error:
            logger.debug("Redis cannot be read at present: %s", error)
            return
        except Exception:
            logger.exception("The records in Redis cannot be read.")
            return
        waits = {f"svdq on {host}: {each.effect}": f"{each.effect}: {each.reason}" for _, each in conditions_of(groups)}
        problems = {f"svdq on {host} takes no more jobs": sentence for sentence in by_no_person} | waits
        for group in groups:
            problems |= {f"svdq on {host}: {name} has failed": text for name, text in group.failed_gpus.items()}
        now_s = time.monotonic()
        for title, text in problems.items():
            if now_s - self._seen_s.get(title, -math.inf) >= AGAIN_S:
                self.send(title, text)
                if title in waits:
                    self._told.add(title)
            self._seen_s[title] = now_s
        if any(group.is_whole for group in groups):
            for title in self._told - waits.keys():
                self.send(f"{title} no longer", "Videos go on.")
            self._told &= waits.keys()


def _services(urls: Sequence[str]) -> "list[NotifyBase]":
    if not urls:
        return []
    try:
        import apprise
    except ImportError as error:
        raise InputError(f"--notify needs apprise, which is not installed; {how_to_install('notify')}.") from error
    # Its messages may have the URL in them.
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    services = []
    for number, url in enumerate(urls, 1):
        service = apprise.Apprise.instantiate(url, suppress_exceptions=True)
        if service is None:
            raise InputError(
                f"The notification URL number {number} ({scheme_of(url)}) is not one that apprise can use; correct "
                "--notify or SVDQ_NOTIFY (github.com/caronc/apprise/wiki lists the services)."
            )
        services.append(service)
    return services


def report_of_run(settings: Settings, ending: Ending, started_at: datetime) -> RunReport:
    """Report the jobs that ended since a time with a zone; raise an UnavailableError if Redis cannot be reached."""
    lasted = datetime.now().astimezone() - started_at
    with session(settings) as connection:
        now = clock_of(connection)  # what other hosts have ended has its times
        started_at = now - lasted
        records = list(records_from_redis(connection, started_at, now, logger.warning))
        left, of_others = jobs_left(connection), left_to_others(connection)
        reasons = [each for each in read_pauses(connection) if each.host in (None, socket.gethostname())]
    try:
        records += records_from_storage(Storage(settings.storage), started_at, logger.warning)
    except UnavailableError as error:
        logger.warning("The report has only the jobs that Redis still knows: %s", error)
    why = why_ended(ending, started_at, left=left, pauses=reasons, of_others=of_others)
    return summarize(records, left, since=started_at, until=now, ending=why)


def exit_code(ending: Ending, report: RunReport) -> int:
    """Return the exit code of a run: 1 also for a burst whose videos all failed, or that could take no more."""
    all_failed = report.count("failed") > 0 and not report.count("finished")
    return ending.code or int(ending.burst and (all_failed or report.ending.startswith((NOT_TAKEN, NOT_ABLE))))


def why_ended(
    ending: Ending,
    started_at: datetime,
    *,
    left: Mapping[str, int],
    pauses: Sequence[Pause],
    of_others: Mapping[str, int] | None = None,
) -> str:
    """Return why a run ended, as a sentence.

    `left` counts the unfinished jobs by state, `pauses` concern its host, and `of_others` counts the jobs that wait for
    other workers by what these have.
    """
    if ending.ended_by == "signal":
        return "It was stopped by a signal."
    if ending.code:
        return f"It failed with exit code {ending.code}; its log says why."
    time_given = ""
    if ending.until_s is not None:
        until = datetime.fromtimestamp(ending.until_s).astimezone()
        time_given = until.strftime("%H:%M" if until - started_at < timedelta(days=1) else "%Y-%m-%d %H:%M")
    if ending.ended_by == "until" or (time_given and not ending.burst):
        return f"It ended at the time given, {time_given}."
    if left.get("queued") and pauses:
        return f"{NOT_TAKEN} {pauses[0].text}"
    if of_others:
        waits = (f"{count(number, 'job')} for {what}" for what, number in of_others.items())
        return f"{NOT_ABLE} {', '.join(waits)}."
    return "It ended because the queue was empty."
