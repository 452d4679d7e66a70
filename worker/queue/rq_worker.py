"""An RQ worker as RQ's own tools see it, without its jobs: name, birth and death, commands, maintenance.

What `rq_adapter` builds on; written against rq 2.12 like it. Nothing that a job names is ever imported or called.
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

#: Seconds without a beat after which a job counts as abandoned, and a worker as gone.
LEASE_S = 15
#: Seconds between beats.
BEAT_S = 4.0
#: Seconds between looks for what others have abandoned.
MAINTENANCE_S = 2.0


class RqWorker(BaseWorker):
    """An RQ worker without jobs: JSON only, no fork, no signals."""

    queue_class = SvdqQueue  # type: ignore[assignment]  # RQ types it as the base class itself

    def __init__(self, connection: redis.Redis, *, on_stop: Callable[[str], None], on_shutdown: Callable[[], None]):
        """Make the worker; nothing is registered yet.

        Args:
            connection: of the bookkeeping thread's own.
            on_stop: called from RQ's listening thread with a job id when RQ's stop command names a job.
            on_shutdown: called from there on RQ's shutdown command.
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
        #: Whether the last `pop` found intake paused: by RQ's suspend, or because too much went wrong here.
        self.paused = False

    # What RQ calls or asks, changed for several executions.

    def get_heartbeat_ttl(self, job: rq.job.Job) -> int:
        """Give the lease of an execution; RQ's own adds a minute."""
        return LEASE_S

    def set_current_job_id(self, job_id: str | None = None, pipeline: Any = None) -> None:
        """Name no current job: there are several, and rq-dashboard fails on one that is stored as JSON."""

    def procline(self, message: str) -> None:
        """Leave the process's title alone."""

    def handle_payload(self, message: Any) -> None:
        """Take RQ's commands: stop a job (whichever of ours it names) and shut down."""
        try:
            payload = parse_payload(message)
            command, job_id = payload["command"], payload.get("job_id")
        except (ValueError, LookupError, AttributeError, TypeError):
            # Anyone can publish here, and an error would end the thread that listens.
            logger.warning("A command that is not one of RQ's was ignored.")
            return
        if command == "stop-job":
            self._on_stop(str(job_id))
        elif command == "shutdown":
            self._on_shutdown()

    # The life of the worker.

    def start(self) -> None:
        """Show up in RQ's registries and listen for commands; may be called again when Redis failed in between."""
        if self.birth_date is None:
            self.register_birth()
        if self.pubsub_thread is None:
            self.subscribe()
        self.set_state(WorkerStatus.IDLE)

    def end(self) -> None:
        """Leave RQ's registries."""
        self.connection.hdel(keys.PAUSES, self.name)
        self.unsubscribe()
        self.register_death()

    def maintain(self) -> None:
        """Remove what has expired from RQ's registries of ended jobs and of workers, by the clock of Redis.

        RQ's own clean-up goes by the clock of this host. Of jobs that no worker holds any more it spends retries;
        `Recovery` takes them back without.
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
        """Refuse: `Intake` drives this worker."""
        raise SvdqError("This worker is driven by a group of ranks; start one with `svdq worker`.")
