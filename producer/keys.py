"""Every Redis key, channel and time to live of svdq; RQ's own keys start with `rq:`."""

from typing import Final

#: Priorities of jobs, most urgent first.
PRIORITIES: Final = ("high", "default", "low")
#: The queue of each, in the order in which workers take jobs from them.
QUEUE_NAMES: Final = tuple(f"svdq-{priority}" for priority in PRIORITIES)
#: RQ's statuses of jobs, in display order.
STATUSES: Final = ("queued", "started", "scheduled", "deferred", "finished", "failed", "stopped", "canceled")
#: Those of jobs that ended without a video.
UNRENDERED: Final = ("failed", "stopped", "canceled")
PREFIX: Final = "svdq:"

DAY_S: Final = 24 * 60 * 60

#: Seconds that a finished job is kept; after that the same submission renders it again. Its files stay.
RESULT_TTL_S: Final = 7 * DAY_S
#: Seconds that a failed job is kept and can be retried.
FAILURE_TTL_S: Final = 30 * DAY_S
#: No timeout of RQ, whose alarm signal does not distinguish several jobs in flight; the worker has its own deadlines.
JOB_TIMEOUT_S: Final = -1
#: Number of retries of a job whose group died.
MAX_RETRIES: Final = 3

#: String: a random id of this database, made when the first photo is submitted.
DATABASE_ID: Final = "svdq:id"
#: Hash, job id -> name of the worker that has popped but not started it, which RQ's intermediate queue lacks.
POPPED: Final = "svdq:popped"
#: Set of ids of jobs that are to stop although a group has them.
CANCELED: Final = "svdq:canceled"
#: Sorted set of ids of stopped jobs, which RQ keeps among the failed ones, by the second of Redis' clock of expiry.
STOPPED: Final = "svdq:stopped"
#: Hash, job id -> JSON of `recovery.Crashes`: how often a job was being computed by a rank that died.
CRASHES: Final = "svdq:crashes"
#: Hash, worker name or BURSTS -> why that group, or every burst, takes no more jobs.
PAUSES: Final = "svdq:pauses"
#: A burst ends when it is paused, and whatever starts bursts would start the next one, again and again.
BURSTS: Final = "bursts"
#: String that lives as long as one group's turn to remove what has expired; the value is the group's name.
MAINTAINED: Final = "svdq:maintained"
#: Hash, job id -> `keep` or `reject`, the verdict of a person about a finished video. It outlives the job.
VERDICTS: Final = "svdq:verdicts"
#: Number of changes of verdicts, so that every page shows them.
VERDICT_CHANGES: Final = "svdq:verdict-changes"
#: String that lives while somebody looks at a page of `svdq serve`.
LOOKING: Final = "svdq:looking"
LOOKING_TTL_S: Final = 5
#: Hash with the key suffix of a job id: `webp`, how the video looks so far, and `step`, the number of steps done.
PICTURE: Final = "svdq:picture:"
PICTURE_TTL_S: Final = 300
#: String that lives as long as one rank's turn to write a picture, with the key suffix of its group's name.
PICTURE_TURN: Final = "svdq:picture-turn:"
#: RQ's own: no worker takes jobs while it exists.
SUSPENDED: Final = "rq:suspended"

#: String, JSON of `ranks.RankStatus`: one for each rank, with the key suffix `<group>:<rank>`.
RANK: Final = "svdq:rank:"
#: Sorted set of `<group>:<rank>`, by the second of Redis' clock at which the rank wrote its record last.
RANKS: Final = "svdq:ranks"
RANK_TTL_S: Final = 15
#: Sorted set of starting launchers, `<host>:<pid> <family or -> <model>`, by the second of Redis' clock of expiry.
STARTING: Final = "svdq:starting"
STARTING_TTL_S: Final = 15
#: Field of a job's own hash: its log, a JSON object a line.
LOG_FIELD: Final = "svdq_log"
#: Field of a job's own hash: the number of later requests for the same video, each of which may delete it once.
CLAIMS_FIELD: Final = "svdq_claims"
#: Prefix of fields of a job's own hash, each of a job that continues its chain; the rest is that job's id.
LATER_FIELD: Final = "svdq_later:"
#: Size limit of the log in bytes; the newest lines are kept.
LOG_BYTES: Final = 16 * 1024
