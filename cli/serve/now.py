"""The state that the page shows under "Now", as one JSON object a second, and the stream of it to all pages."""

import json
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import anyio
import redis
from rq.job import JobStatus
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response

from svdq.cli.formatting import condition_reason, named, webhook_sentences
from svdq.cli.serve.access import ServeOptions
from svdq.cli.serve.api_errors import ApiError, RedisAwayError, without_folders
from svdq.cli.serve.backend import FRESH_S, Shared
from svdq.cli.serve.form import families
from svdq.cli.view import progress_of
from svdq.pipeline.models.model_name import model_stem
from svdq.producer import keys
from svdq.producer.keys import STATUSES
from svdq.producer.pauses import FREED, SUSPENDED
from svdq.producer.queue import queues
from svdq.producer.status.estimates import UNKNOWN_WORKERS, Estimate, estimate_jobs
from svdq.producer.status.job_view import JobView, view_many
from svdq.producer.status.ranks import GroupStatus, RankStatus
from svdq.producer.status.registries import ended_before, read_num_ahead
from svdq.producer.status.running import read_running
from svdq.producer.status.snapshot import Recent, Snapshot
from svdq.producer.storage.storage import Storage
from svdq.producer.text import rfc3339
from svdq.producer.together import ask_one

#: Number of videos in flight that are shown, and of waiting ones; number of groups.
MAX_ROWS, MAX_GROUPS = 100, 50
#: The statuses whose newest job says whether the list of results has changed.
ENDINGS = ("finished", "failed", "canceled")
#: Bytes free on the disk below which the page warns.
LOW_DISK_BYTES = 2_000_000_000
DISK_STEP_BYTES = 100_000_000  # smaller changes are not sent
#: Seconds after which Redis counts as away; a page that hears nothing for six takes the server for lost.
ANSWER_S = 3
#: Seconds after which the send to a page that does not read any more is given up.
SEND_TIMEOUT_S = 30
#: Seconds that a stream has to end when the server stops.
END_S = 1.0


def read_state(
    connection: redis.Redis, storage: Storage, snapshot: Snapshot, model: str, recent: Recent[JobView]
) -> dict[str, Any]:
    """Read the jobs that wait, and return the whole state; `model` is the configured one."""
    pictures = _look(connection, snapshot.jobs[:MAX_ROWS])
    running = read_running(connection).models
    counts = counts_of(snapshot)
    queued, others = _first_waiting(connection)
    waiting = recent.read(queued, lambda ids: ((view.id, view) for view in view_many(connection, ids)))
    waiting += view_many(connection, others)
    estimates = estimate_views(connection, waiting, snapshot)
    rows = [_started(snapshot, job) | {"picture": pictures.get(job.id)} for job in snapshot.jobs[:MAX_ROWS]]
    rows += [
        _waiting(job, estimates.get(job.id, Estimate()))
        for job in waiting
        if job.status in ("queued", "scheduled", "deferred")
    ]
    num_waiting = counts["queued"] + counts["scheduled"] + counts["deferred"]
    newest = ended_before(connection, ENDINGS, 1)
    num_ended = [counts[status] for status in (*ENDINGS, "stopped")]
    disk, problem = _disk(storage)
    warnings = _warnings(snapshot, num_waiting, disk) + ([problem] if problem else [])
    return {
        "families": families(running, model) if running else [],
        "models": {model_stem(name): family for name, family in running.items()},
        "several_owners": snapshot.has_several_owners,
        "paused": bool(snapshot.pauses),
        "freed": FREED in snapshot.pauses,
        "warnings": warnings,
        "videos_per_hour": snapshot.videos_per_hour,
        "eta_s": snapshot.estimate.eta_s,
        "eta_reason": snapshot.estimate.reason,
        "counts": counts,
        "finished_last_hour": snapshot.finished_last_hour,
        "failed_last_hour": snapshot.failed_last_hour,
        "disk": disk,
        "groups": [_group(group, snapshot) for group in snapshot.groups[:MAX_GROUPS]],
        "rows": rows,
        "num_more": max(0, num_waiting + counts["started"] - len(rows)),
        "latest": f"{newest[0]}:{num_ended}" if newest else "",
        "verdicts": int(connection.get(keys.VERDICT_CHANGES) or 0),
    }


def counts_of(snapshot: Snapshot) -> dict[str, int]:
    """Return the numbers of jobs of all queues by status."""
    return {status: sum(queue[status] for queue in snapshot.queues.values()) for status in STATUSES}


def _look(connection: redis.Redis, jobs: Sequence[JobView]) -> dict[str, int]:
    """Have the ranks draw pictures; return the number of steps done in the newest one of each job that has one."""
    with connection.pipeline(transaction=False) as pipeline:
        pipeline.set(keys.LOOKING, 1, ex=keys.LOOKING_TTL_S)
        for job in jobs:
            pipeline.hget(f"{keys.PICTURE}{job.id}", "step")
        _, *steps = pipeline.execute()
    return {job.id: int(step) for job, step in zip(jobs, steps, strict=True) if step is not None}


def _first_waiting(connection: redis.Redis) -> tuple[list[str], list[str]]:
    """Return the ids of the first jobs that wait: those that are queued, and those that are scheduled or deferred."""
    with connection.pipeline(transaction=False) as pipeline:
        for queue in queues(connection):
            pipeline.lrange(queue.key, 0, MAX_ROWS - 1)
            for registry in (queue.scheduled_job_registry, queue.deferred_job_registry):
                pipeline.zrange(registry.key, 0, MAX_ROWS - 1, withscores=True)
        answers = pipeline.execute()
    queued = [member for answer in answers[::3] for member in answer]
    others = [
        member
        for kind in (1, 2)
        for _, member in sorted((at, each) for answer in answers[kind::3] for each, at in answer)
    ]
    members = [member.decode(errors="backslashreplace") for member in dict.fromkeys([*queued, *others])][:MAX_ROWS]
    num_queued = min(len(set(queued)), MAX_ROWS)
    return members[:num_queued], members[num_queued:]


def estimate_views(connection: redis.Redis, views: Sequence[JobView], snapshot: Snapshot) -> dict[str, Estimate]:
    """Estimate when jobs will be done, by id; only those that wait in a queue or are started are in the result."""
    places = {view.id: view.queue for view in views if view.status == "queued"}
    waiting = replace(
        snapshot.waiting,
        num_ahead=ask_one(connection, read_num_ahead(connection, places)) if places else {},
        started=[job for job in snapshot.jobs if job.is_readable],
    )
    return estimate_jobs(views, waiting, snapshot.groups, snapshot.pauses, snapshot.no_group)


def _started(snapshot: Snapshot, job: JobView) -> dict[str, Any]:
    estimate = snapshot.estimates.get(job.id, Estimate())
    group = snapshot.finder.find(job.id, job.worker)
    state = progress_of(job, group)[1] if group and job.is_readable else "its worker does not answer"
    described = _row(job, "waits for the disk" if estimate.condition else state, estimate)
    return described | {"seed": job.parameters.get("seed")}


def _waiting(job: JobView, estimate: Estimate) -> dict[str, Any]:
    state = {"scheduled": "waits for its time", "deferred": "waits for others"}.get(job.status, "")
    if job.scheduled_at is not None and job.scheduled_at <= datetime.now(UTC):
        state = "waits for a worker"
    elif job.status == "queued" and estimate.num_ahead is None:
        state = estimate.reason
    if estimate.num_ahead is not None:
        state = "next" if estimate.num_ahead == 0 else f"{estimate.num_ahead:,} before it"
    if job.waits_for:
        state = " · ".join(filter(None, (f"waits for {job.waits_for}", state)))
    return _row(job, state, estimate)


def _row(job: JobView, state: str, estimate: Estimate) -> dict[str, Any]:
    return {
        "id": job.id,
        "name": named(job.name, job.link),
        "owner": job.owner,
        "status": job.status,
        "state": state,
        "photo": str(job.parameters.get("image", ""))[7:19],  # the beginning of its hash
        "step": job.step,
        "steps": job.steps,
        "eta_s": None if estimate.eta_s is None else round(estimate.eta_s, 1),
        "scheduled_at": rfc3339(job.scheduled_at) if job.scheduled_at else None,
    }


def _group(group: GroupStatus, snapshot: Snapshot) -> dict[str, Any]:
    first, intake = group.ranks[0], group.intake
    kind = "GPU" if first.device.startswith("cuda") else "CPU"
    shapes = (
        dict.fromkeys(f"{cost.width}x{cost.height}, {cost.frames} frames" for cost in intake.costs) if intake else {}
    )
    ranks = {rank.rank: rank for rank in group.ranks}
    return {
        "host": first.host,
        "model": " + ".join((model_stem(first.model), *first.loras)),
        "notice": first.notice,
        "pace_s": intake.pace_s if intake else None,
        "pace_of": next(iter(shapes)) if len(shapes) == 1 else f"a mix of {len(shapes)} sizes" if shapes else "",
        "is_draining": bool(intake and intake.draining),
        "ranks": [_rank(f"{kind} {number + 1}", ranks.get(number), snapshot) for number in range(first.num_ranks)],
    }


def _rank(name: str, rank: RankStatus | None, snapshot: Snapshot) -> dict[str, Any]:
    if rank is None:
        return {"name": name, "job": "does not answer", "step": "", "busy": None}
    job, step = "idle", ""
    if rank.job_id is not None:
        job = snapshot.names.get(rank.job_id, rank.job_id)
        step = "decoding" if rank.activity == "decoding" else f"step {rank.step} of {rank.steps}"
    elif rank.activity == "loading":
        job = rank.loading_text
    elif rank.activity == "waiting":
        job = "waits for the disk"
    elif rank.rest is not None:
        job = rank.activity
    return {"name": name, "job": job, "step": step, "busy": round(rank.busy_share * 100)}


def _warnings(snapshot: Snapshot, num_waiting: int, disk: dict[str, int] | None) -> list[str]:
    sentences = []
    for reason in snapshot.pauses:
        if reason == SUSPENDED:
            sentences.append("Paused: no new videos are started until you press Resume.")
        else:
            text = reason.text.replace("run `svdq resume`", "press Resume").replace("`svdq resume`", "you press Resume")
            sentences.append(text.replace("PAUSED", "Paused:", 1))
    if not snapshot.groups and snapshot.worker_state == "starting":
        sentences.append("A worker is starting.")
    lost = [job for job in snapshot.jobs_by_group.get(None, []) if job.status == JobStatus.STARTED.value]
    if snapshot.worker_state == "none" and (num_waiting or lost):
        sentences.append("No worker is running, so the videos wait. Start one with `svdq worker`.")
    if snapshot.worker_state == "unknown":
        sentences.append(UNKNOWN_WORKERS)
    if len(snapshot.groups) > MAX_GROUPS:
        sentences.append(f"{MAX_GROUPS} of {len(snapshot.groups):,} groups are shown; `svdq status` lists all.")
    for rank, condition in snapshot.conditions:
        sentences.append(f"{condition.effect} on {rank.host}: {condition_reason(condition)}")
    sentences += [*snapshot.failed_gpus, *webhook_sentences(snapshot.outbox)]
    if disk and disk["free"] < LOW_DISK_BYTES:
        sentences.append(
            f"The disk is nearly full: {disk['free'] / 1e9:.1f} GB are free. Remove old videos with `svdq prune`."
        )
    if lost and snapshot.worker_state not in ("none", "unknown"):
        sentences.append("A worker does not answer; its videos go on as soon as another takes them.")
    return list(map(without_folders, sentences))


def _disk(storage: Storage) -> tuple[dict[str, int] | None, str]:
    """Return the free and all bytes of the disk, None for a remote storage; and a sentence if it cannot be asked."""
    if storage.folder is None:
        return None, ""
    for folder in (storage.folder, *storage.folder.parents):
        try:
            usage = shutil.disk_usage(folder)
        except FileNotFoundError:  # the first write creates it
            continue
        except OSError as error:  # such as a folder of a file server that is away
            return {}, f"The storage of photos and videos cannot be used ({error.strerror})."
        return {"free": usage.free // DISK_STEP_BYTES * DISK_STEP_BYTES, "total": usage.total}, ""
    raise AssertionError("there is a root folder")


async def events(request: Request) -> Response:
    """Stream the state, and each second what has changed of it, to a page, until its token is removed."""
    states: Shared[dict[str, Any]] = request.app.state.page_states
    options: ServeOptions = request.app.state.options
    is_ending = anyio.Event()

    async def stream() -> AsyncIterator[ServerSentEvent]:
        sent: dict[str, Any] = {}
        while not is_ending.is_set() and options.owner_of(request) is not None:
            try:
                with anyio.fail_after(ANSWER_S):
                    state = await states.get()
                changed = {name: value for name, value in state.items() if name not in sent or sent[name] != value}
            except (ApiError, TimeoutError):
                state, changed = {}, {"outage": str(RedisAwayError())}
            sent = state
            yield ServerSentEvent(json.dumps(changed, separators=(",", ":")), event="state")
            with anyio.move_on_after(FRESH_S):
                await is_ending.wait()

    # A stream that is canceled when the server stops, instead of ending by itself, is an error in uvicorn's log.
    return EventSourceResponse(
        stream(), send_timeout=SEND_TIMEOUT_S, shutdown_event=is_ending, shutdown_grace_period=END_S
    )
