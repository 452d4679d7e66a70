"""The part of the RQ worker that does not deal with jobs: name, registration, commands, maintenance.

The base of `job_completion` and `group_worker`, written against rq 2.12.
"""

import logging
from collections.abc import Callable
from typing import Any

import redis
import rq
from rq.command import parse_payload
from rq.serializers import JSONSerializer
from rq.worker import BaseWorker, WorkerStatus
from rq.worker_registration import clean_worker_registry

from svdq.pipeline.errors import SvdqError
from svdq.producer import keys, process_identity
from svdq.producer.queue import SvdqQueue, queues
from svdq.producer.untrusted_job import UntrustedJob
from svdq.worker.queue import transitions

logger = logging.getLogger(__name__)

#: Seconds without a renewal after which a job counts as abandoned, and a worker as ended.
LEASE_S = 15
#: Seconds between renewals.
BEAT_S = 4.0
#: Seconds between searches for abandoned jobs of other groups.
MAINTENANCE_S = 2.0


class RqWorker(BaseWorker):
    """An RQ worker without jobs; it uses JSON only, and neither forks nor handles signals."""

    queue_class = SvdqQueue  # type: ignore[assignment]  # RQ types it as the base class itself

    def __init__(self, connection: redis.Redis, *, on_stop: Callable[[str], None], on_shutdown: Callable[[], None]):
        """Make the worker; nothing is registered yet. The bookkeeping thread alone uses `connection`.

        RQ's listening thread calls `on_stop` with the job id of RQ's stop command, and `on_shutdown`.
        """
        super().__init__(
            queues(connection),
            name=process_identity.worker_name(),
            connection=connection,
            serializer=JSONSerializer,
            job_class=UntrustedJob,
            job_monitoring_interval=BEAT_S,
            worker_ttl=LEASE_S,
            log_job_description=False,
        )
        self._on_stop = on_stop
        self._on_shutdown = on_shutdown
        #: Whether the last `pop` found intake paused: by RQ's suspend, or because too many jobs failed here.
        self.paused = False

    # Methods that RQ calls, changed for several executions.

    def get_heartbeat_ttl(self, job: rq.job.Job) -> int:
        """Return the lease of an execution; RQ adds a minute."""
        return LEASE_S

    def set_current_job_id(self, job_id: str | None = None, pipeline: Any = None) -> None:
        """Store no current job: there are several, and rq-dashboard fails on one that is stored as JSON."""

    def procline(self, message: str) -> None:
        """Keep the process's title."""

    def handle_payload(self, message: Any) -> None:
        """Handle RQ's commands to stop a job and to shut down."""
        try:
            payload = parse_payload(message)
            command, job_id = payload["command"], payload.get("job_id")
        except (ValueError, LookupError, AttributeError, TypeError):
            # Anyone can publish here, and an error would end the listening thread.
            logger.warning("A command that is not one of RQ's was ignored.")
            return
        if command == "stop-job":
            self._on_stop(str(job_id))
        elif command == "shutdown":
            self._on_shutdown()

    # The life of the worker.

    def start(self) -> None:
        """Register in RQ and listen for commands; may be called again after an error of Redis."""
        if self.birth_date is None:
            self.register_birth()
        if self.pubsub_thread is None:
            self.subscribe()
        self.set_state(WorkerStatus.IDLE)

    def end(self) -> None:
        """Remove the worker from RQ's registries."""
        self.connection.hdel(keys.PAUSES, self.name)
        self.unsubscribe()
        self.register_death()

    def maintain(self) -> None:
        """Remove expired entries from RQ's registries of ended jobs and of workers, by the clock of Redis.

        RQ's own clean-up uses the clock of this host, and spends retries of abandoned jobs; `Recovery` does not.
        """
        now_s = int(transitions.server_time(self.connection))
        for queue in self.queues:
            try:
                queue.finished_job_registry.cleanup(now_s)
                queue.failed_job_registry.cleanup(now_s)
                clean_worker_registry(queue)
            except (redis.ConnectionError, redis.TimeoutError):
                raise
            except Exception:
                logger.exception("The clean-up of %s failed.", queue.name)

    def work(self, *_: Any, **__: Any) -> bool:
        """Refuse to run; `Intake` drives this worker."""
        raise SvdqError("This worker is driven by a group of ranks; start one with `svdq worker`.")
