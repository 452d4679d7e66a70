"""Compares the ends of a campaign's jobs with the expected ones."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
from rq.intermediate_queue import IntermediateQueue
from rq.results import Result
from rq.serializers import JSONSerializer

from svdq.producer import keys
from svdq.producer.queue import fetch, queues
from svdq.producer.status.job_view import JobView, view_many
from tests.faults.arena import Arena
from tests.faults.frames import read_frames

#: Where a job of each state is, and nowhere else.
PLACE_OF = {"finished": "finished", "failed": "failed", "stopped": "failed", "canceled": "canceled"}


def verify(arena: Arena) -> None:
    """Look at every job of an arena, and at every file; note what is wrong."""
    tally = arena.tally
    published = arena.published()
    places = _places(arena)
    views = {view.id: view for view in view_many(arena.connection, arena.jobs)}
    for job_id, expected in arena.jobs.items():
        view = views.get(job_id)
        if view is None:
            tally.lost.append(f"{job_id} is gone")
            continue
        if view.status not in expected.states:
            tally.lost.append(f"{job_id} is {view.status}, not {' or '.join(expected.states)}: {view.error}")
        elif expected.reason not in (view.error or ""):
            tally.lost.append(f"{job_id} failed without saying {expected.reason!r}: {view.error}")
        if places[job_id] != {PLACE_OF.get(view.status, "?"): 1}:
            tally.duplicated.append(f"{job_id} is {view.status} and is in {dict(places[job_id])}")
        rq_job = fetch(arena.connection, job_id)
        if view.status == "finished" and rq_job.retries_left != keys.MAX_RETRIES:
            tally.lost.append(f"{job_id} finished, and has {rq_job.retries_left} of {keys.MAX_RETRIES} retries left")
        results = Result.all(rq_job, serializer=JSONSerializer)
        if sum(result.type is Result.Type.SUCCESSFUL for result in results) != (view.status == "finished"):
            tally.duplicated.append(f"{job_id} is {view.status} with results {[str(item.type) for item in results]}")
        if view.status == "finished":
            _verify_files(arena, view, published)


def _verify_files(arena: Arena, view: JobView, published: Counter[str]) -> None:
    tally = arena.tally
    job = arena.job_of(view.id)
    stem = f"{job.name}-{view.id}"
    if published[f"{stem}.json"] > 1:
        tally.duplicated.append(f"{view.id} was published {published[f'{stem}.json']} times")
    tally.num_rendered_again += sum(
        count - 1 for name, count in published.items() if view.id in name and not name.endswith(".json")
    )
    try:
        sidecar = json.loads((arena.storage / "outputs" / f"{stem}.json").read_text())
    except (OSError, ValueError) as error:
        tally.lost.append(f"{view.id} is finished and has no sidecar: {error}")
        return
    if (sidecar["job_id"], sidecar["job"]["seed"], tuple(sidecar["outputs"])) != (view.id, job.seed, view.outputs):
        tally.wrong.append(f"{view.id} has a sidecar of something else: {sidecar}")
    again = [resumption["steps_done_again"] for resumption in sidecar.get("resumed", ())]
    tally.most_steps_again = max(tally.most_steps_again, *again, 0)
    if len(view.outputs) != len(job.formats):
        tally.lost.append(f"{view.id} has {len(view.outputs)} files, not {len(job.formats)}")
    for kind, output in zip(job.formats, view.outputs, strict=False):
        wanted = arena.reference.frames(job, kind)
        # FFmpeg and Pillow have errors of their own for each way in which a file can be broken.
        try:
            found = read_frames(arena.storage / "outputs" / Path(output).name)
        except Exception as error:  # noqa: BLE001
            tally.wrong.append(f"{output} cannot be decoded: {error}")
            continue
        if not np.array_equal(found, wanted):
            tally.wrong.append(f"{output} differs from an undisturbed run's: {found.shape}, {wanted.shape}")


def _places(arena: Arena) -> dict[str, Counter[str]]:
    """Count for each job the places in RQ that it is in."""
    places: dict[str, Counter[str]] = {job_id: Counter() for job_id in arena.jobs}
    for queue in queues(arena.connection):
        lists = {
            "queued": queue.get_job_ids(),
            "intermediate": IntermediateQueue(queue.key, connection=arena.connection).get_job_ids(),
            "started": queue.started_job_registry.get_job_ids(cleanup=False),
            "finished": queue.finished_job_registry.get_job_ids(cleanup=False),
            "failed": queue.failed_job_registry.get_job_ids(cleanup=False),
            "canceled": queue.canceled_job_registry.get_job_ids(cleanup=False),
            "deferred": queue.deferred_job_registry.get_job_ids(cleanup=False),
            "scheduled": queue.scheduled_job_registry.get_job_ids(cleanup=False),
        }
        for place, job_ids in lists.items():
            for job_id in job_ids:
                places.setdefault(job_id, Counter())[place] += 1
    return places
