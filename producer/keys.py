"""Every Redis key, channel and time to live that is ours; RQ's own keys (`rq:…`) are RQ's. Knows nothing else."""

from typing import Final

#: The queues, in the order in which workers look at them.
QUEUE_NAMES: Final = ("svdq-high", "svdq-default", "svdq-low")
#: Start of every key that is ours and not RQ's.
PREFIX: Final = "svdq:"

DAY_S: Final = 24 * 60 * 60

#: Seconds that a finished job can be asked about; after it the same submission renders anew. Its files stay.
RESULT_TTL_S: Final = 7 * DAY_S
#: Seconds that a failed job can be asked about and retried.
FAILURE_TTL_S: Final = 30 * DAY_S
#: Seconds a job may run, as RQ has it: without end, since RQ's alarm signal cannot tell several jobs in flight apart
#: and the worker keeps deadlines of its own.
JOB_TIMEOUT_S: Final = -1
#: Times a job is tried again after its group died under it.
MAX_RETRIES: Final = 3

#: Hash, job id -> name of the worker that has popped it and not begun it yet: who to ask about a job in RQ's
#: intermediate queue, which names no owner.
POPPED: Final = "svdq:popped"
#: Set of ids of jobs that are to stop although a group has them.
CANCELLED: Final = "svdq:cancelled"
#: Hash, job id -> JSON of `recovery.Crashes`: how often a job was being computed by a rank that died.
CRASHES: Final = "svdq:crashes"
#: Hash, worker name -> why that group takes no more jobs.
PAUSES: Final = "svdq:pauses"
#: RQ's own: takes every worker's intake away while it exists.
SUSPENDED: Final = "rq:suspended"

#: String, JSON of `ranks.RankStatus`: one for each rank, under this prefix and `<group>:<rank>`.
RANK: Final = "svdq:rank:"
#: Sorted set of `<group>:<rank>`, by the second since the epoch at which the rank wrote its record last.
RANKS: Final = "svdq:ranks"
#: Seconds that a rank's record outlives the last word of its rank.
RANK_TTL_S: Final = 15
#: Sorted set of launchers (`<host>:<pid>`) whose groups are not ready yet, by the second of Redis' clock at which the
#: entry expires.
STARTING: Final = "svdq:starting"
#: Seconds that an entry outlives the last word of its launcher.
STARTING_TTL_S: Final = 15
#: String, JSON: where a rank of a group over several hosts listens, and the secret of its next connection; one for each
#: rank, under this prefix and `<group>:<rank>`.
RENDEZVOUS: Final = "svdq:rendezvous:"
#: Seconds that it lasts; a rank that waits for its neighbour writes it again and again.
RENDEZVOUS_TTL_S: Final = 60 * 60
#: Field of a job's own hash, so that it ends with the job: what workers logged about it, a JSON object a line.
LOG_FIELD: Final = "svdq_log"
#: Bytes of it that are kept, the newest.
LOG_BYTES: Final = 16 * 1024
