"""Every Redis key, channel and time to live of svdq; RQ's own keys start with `rq:`, or RQ_KEY_PREFIX."""

import os
import re
from typing import Final

from svdq.pipeline.errors import InputError

#: RQ's prefix of its keys, read as RQ does; not imported from it, since commands without Redis import no RQ.
RQ: Final = os.environ.get("RQ_KEY_PREFIX", "rq")
if not re.fullmatch(r"[A-Za-z0-9_.:{}-]+", RQ):
    raise InputError(f"RQ_KEY_PREFIX={RQ!r} is not allowed: use letters, digits and _ . : - {{ }}, or unset it.")

PRIORITIES: Final = ("high", "default", "low")  # priorities of jobs, most urgent first
QUEUE_NAMES: Final = tuple(f"svdq-{priority}" for priority in PRIORITIES)  # as workers take jobs
#: RQ's statuses of jobs, in display order.
STATUSES: Final = ("queued", "started", "scheduled", "deferred", "finished", "failed", "stopped", "canceled")
UNRENDERED: Final = ("failed", "stopped", "canceled")  # of jobs that ended without a video
#: With another prefix of RQ's keys, ours are apart, too: two svdq share one database.
PREFIX: Final = "svdq:" if RQ == "rq" else f"{RQ}:svdq:"

DAY_S: Final = 24 * 60 * 60

RESULT_TTL_S: Final = 7 * DAY_S  # of a finished job; then the same submission renders it again
FAILURE_TTL_S: Final = 30 * DAY_S  # seconds that a failed job is kept and can be retried
JOB_TIMEOUT_S: Final = -1  # none of RQ, whose alarm knows one job; the worker has its own deadlines
MAX_RETRIES: Final = 3  # number of retries of a job whose group died

DATABASE_ID: Final = f"{PREFIX}id"  # string: a random id of this database, made when the first photo is submitted
#: Hash, job id -> name of the worker that has popped but not started it, which RQ's intermediate queue lacks.
POPPED: Final = f"{PREFIX}popped"
CANCELED: Final = f"{PREFIX}canceled"  # set of ids of jobs that are to stop although a group has them
#: Sorted set of ids of stopped jobs, which RQ keeps among the failed ones, by the second of Redis' clock of expiry.
STOPPED: Final = f"{PREFIX}stopped"
#: String with the key suffix of the digest of a submission with --force: the part of its ids that makes them new.
FORCED: Final = f"{PREFIX}forced:"
STORAGES: Final = f"{PREFIX}storages"  # set: the storages that photos of jobs were stored in, as shown
#: Hash, job id -> JSON of a `crashes.CrashCount`: how often a rank died that worked on a job.
CRASHES: Final = f"{PREFIX}crashes"
#: Hash, worker name or BURSTS -> why that group, or every burst, takes no more jobs; and FREED with a host, or with
#: ALL_HOSTS -> "", whose ranks have ended to free their GPUs.
PAUSES: Final = f"{PREFIX}pauses"
FREED: Final = "freed:"
ALL_HOSTS: Final = "*"
#: A burst ends when it is paused, and whatever starts bursts would start the next one, again and again.
BURSTS: Final = "bursts"
OWNER_FIELD: Final = "svdq_owner"  # field of a job's own hash: whose job it is
OWNERS: Final = f"{PREFIX}owners"  # set of all owners there were; jobs take turns from the second one on
#: Hash, job id -> owner of the jobs in a queue, for take_turns.lua, with the key suffix of the queue's key; a cache.
TURNS: Final = f"{PREFIX}turns:"
UNFAIR: Final = f"{PREFIX}unfair"  # string that exists while jobs are first come, first served
#: String that lives as long as one group's turn to remove what has expired; the value is the group's name.
MAINTAINED: Final = f"{PREFIX}maintained"
#: Hash, job id -> `keep` or `reject`, the verdict of a person about a finished video. It outlives the job.
VERDICTS: Final = f"{PREFIX}verdicts"
VERDICT_CHANGES: Final = f"{PREFIX}verdict-changes"  # number of changes of verdicts, so that every page shows them
#: Hash, id of the job of an upscaled copy of a copy -> id of the copy that it was made from; both name the original.
COPIES: Final = f"{PREFIX}copies"
#: Set with the key suffix of a job id: ids of jobs that continue or upscale its video.
NEEDED: Final = f"{PREFIX}needed:"
#: String that lives while the video of a job is being removed, with the key suffix of its id.
REMOVING: Final = f"{PREFIX}removing:"
REMOVING_TTL_S: Final = 120
LOOKING: Final = f"{PREFIX}looking"  # string that lives while somebody looks at a page of `svdq serve`
LOOKING_TTL_S: Final = 5
#: Hash with the key suffix of a job id: `webp`, how the video looks so far, and `step`, the number of steps done.
PICTURE: Final = f"{PREFIX}picture:"
PICTURE_TTL_S: Final = 300
#: String that lives as long as one rank's turn to write a picture, with the key suffix of its group's name.
PICTURE_TURN: Final = f"{PREFIX}picture-turn:"
#: Stream of events of videos, each a `type` and an `id`, that are to be sent as webhooks; for add_event.lua.
WEBHOOKS: Final = f"{PREFIX}webhooks"
WEBHOOKS_WANTED: Final = f"{PREFIX}webhooks-wanted"  # string that exists while events are added to that stream
WEBHOOKS_TTL_S: Final = 7 * DAY_S  # seconds for which events are kept without a worker that sends them
WEBHOOKS_SENDER: Final = f"{PREFIX}webhooks-sender"  # string that lives while a worker's host sends them: its name
#: String that lives while one is not accepted: how the last attempt failed, as the end of a sentence.
WEBHOOKS_REFUSAL: Final = f"{PREFIX}webhooks-refusal"
WEBHOOKS_REFUSAL_TTL_S: Final = 900  # longer than the longest delay until the next attempt
SUSPENDED: Final = f"{RQ}:suspended"  # RQ's own: no worker takes jobs while it exists

#: String, JSON of `ranks.RankStatus`: one for each rank, with the key suffix `<group>:<rank>`.
RANK: Final = f"{PREFIX}rank:"
#: Sorted set of `<group>:<rank>`, by the second of Redis' clock at which the rank wrote its record last.
RANKS: Final = f"{PREFIX}ranks"
RANK_TTL_S: Final = 15
#: Sorted set of starting launchers, `<host>:<pid> <family or -> <model>`, by the second of Redis' clock of expiry.
STARTING: Final = f"{PREFIX}starting"
STARTING_TTL_S: Final = 15
#: String with the key suffix `<model>:<number>`: the name of the group that slept and starts for a job, which is its
#: number among those that wait. It lives for about as long as that takes; others with the model start for other jobs.
WAKING: Final = f"{PREFIX}waking:"
ABILITY_TTL_S: Final = 7 * DAY_S  # for which jobs wait for a group that has gone
#: String with the key suffix of its id: JSON of an `ability.Ability`.
ABILITY: Final = f"{PREFIX}ability:"
#: Sorted set of `<ability> <worker name> <UUIDs of its GPUs>`, by the second of Redis' clock when it last was there.
ABILITIES: Final = f"{PREFIX}abilities"
#: Fields of a job's own hash: what it waits for, since a group that took it has not that; and when it was moved to the
#: front, in microseconds of Redis' clock.
WAITS_FIELD: Final = "svdq_waits"
FRONT_FIELD: Final = "svdq_front"
#: In place of the id of an ability in the name of a queue: its jobs wait although no known group can make them.
WAIT: Final = "wait"
LOG_FIELD: Final = "svdq_log"  # field of a job's own hash: its log, a JSON object a line
#: Prefix of fields of a job's own hash, each of a job that continues its chain; the rest is that job's id.
LATER_FIELD: Final = "svdq_later:"
LOG_BYTES: Final = 16 * 1024  # size limit of the log in bytes; the newest lines are kept
