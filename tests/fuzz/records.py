"""Job records, results, rank records and worker records in a real Redis, where anyone may have written anything."""

import json
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

from rq.results import Result

from svdq.cli.view import lines_of
from svdq.pipeline.errors import InputError
from svdq.producer import keys
from svdq.producer.embedded_redis import stop_server
from svdq.producer.job import SvdJob, WanJob
from svdq.producer.queue import SvdqQueue, fetch, photo_of, read_job, session
from svdq.producer.settings_loader import load_settings
from svdq.producer.status import snapshot
from svdq.producer.status.job_view import view_many
from svdq.producer.status.ranks import Condition, IntakeStatus, RankStatus, ShapeCosts
from svdq.producer.status.selection import list_jobs
from svdq.producer.untrusted_job import UntrustedJob
from tests.fuzz.mutate import mutate_bytes, mutate_json
from tests.fuzz.run import Target
from tests.queued import enqueue

_JOB = SvdJob(image=f"inputs/{'0' * 64}.jpg", name="photo", seed=1, steps=4)
_COSTS = ShapeCosts(frames=2, width=64, height=64, guided=True, step_s=(0.5,), encode_s=0.1, decode_s=2.0)
_WAN_JOB = WanJob(image=_JOB.image, name="photo", prompt="A cat jumps.", seed=1)
_ID, _WAN_ID, _GOOD = "b" * 20, "c" * 20, "a" * 20
_WORKER = "rq:worker:here.7"


def job_records(folder: Path, stack: ExitStack) -> Target:
    """Write mutated records beside a good job; every view must still show that one."""
    settings = load_settings(home=folder / "home")
    stack.callback(stop_server, settings.home)
    connection = stack.enter_context(session(settings))
    connection.config_set("appendfsync", "no")  # nothing here has to last
    enqueue(connection, _JOB, _GOOD)
    enqueue(connection, _JOB, _ID)
    job = fetch(connection, _ID)
    for queue in (SvdqQueue("svdq-default", connection=connection),):
        for registry in (queue.started_job_registry, queue.failed_job_registry, queue.finished_job_registry):
            connection.zadd(registry.key, {_ID: 4e9})
        for registry in (queue.scheduled_job_registry, queue.deferred_job_registry):
            connection.zadd(registry.key, {_ID: 4e9})
    connection.sadd("rq:workers", _WORKER)
    job.meta = {"step": 2, "rank": 0, "used": {"frames": 25}}
    job.save_meta()
    result = Result.create(job, Result.Type.SUCCESSFUL, ttl=1000, return_value={"outputs": ["/x.mp4"], "model": "tiny"})
    (_, payload), *_ = connection.xrange(Result.get_key(_ID))
    assert result is not None
    record = {name.decode(): value.decode("latin-1") for name, value in connection.hgetall(f"rq:job:{_ID}").items()}
    seeds = [_seed(record | {"status": status}, payload) for status in ("queued", "started", "finished", "failed")]
    enqueue(connection, _WAN_JOB, _WAN_ID)
    wan = {name.decode(): value.decode("latin-1") for name, value in connection.hgetall(f"rq:job:{_WAN_ID}").items()}
    seeds += [_seed(record | {"data": wan["data"], "status": status}, payload) for status in ("queued", "started")]

    def read(data: bytes) -> None:
        _write(connection, json.loads(data))
        try:
            rq_job = fetch(connection, _ID)
            if read_job(rq_job) is not None:
                photo_of(rq_job)
            UntrustedJob.find(_ID, connection).latest_result()  # type: ignore[union-attr]
        except InputError:
            pass
        views = view_many(connection, [_ID, _GOOD])
        assert views[-1].id == _GOOD
        assert views[-1].is_readable
        everything = snapshot.take(connection)
        snapshot.estimate(connection, views, everything.groups)
        assert _GOOD in [view.id for view in list_jobs(connection)]
        json.dumps([everything.as_json(), *(view.as_json() for view in views)], allow_nan=False).encode()
        lines_of(everything)

    return Target(seeds=seeds, mutate=_mutate, read=read, allowed=())


def _seed(record: dict[str, str], payload: dict[bytes, bytes]) -> bytes:
    rank = RankStatus(
        group="here-1",
        rank=0,
        num_ranks=1,
        host="here",
        pid=7,
        device="cpu",
        model="preview",
        started_at=1.0,
        at=2.0,
        activity="denoising",
        job_id=_ID,
        steps=4,
        step=2,
        intake=IntakeStatus(worker="here.7", in_flight=(_ID,), costs=(_COSTS,), pace_s=2.0),
        conditions=(Condition(effect="It waits", reason="Disk full.", since=1.0, attempts=2, job_ids=(_ID,)),),
    )
    worker = {
        "queues": "svdq-high,svdq-default",
        "state": "busy",
        "hostname": "here",
        "pid": "7",
        "birth": "2026-01-01",
    }
    return json.dumps(
        {
            "job": record,
            "result": {name.decode(): value.decode("latin-1") for name, value in payload.items()},
            "worker": worker | {"successful_job_count": "7"},
            "rank": {"json": rank.model_dump_json()},
        }
    ).encode()


def _mutate(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Mutate fields of records: as JSON where they are, unpacked and packed again where they are packed."""
    records: dict[str, dict[str, str]] = json.loads(data)
    for _ in range(random.choice((1, 1, 2))):
        fields = records[random.choice(("job", "job", "job", "result", "worker", "rank", "rank"))]
        name = random.choice(sorted(fields) or ["data"])
        value = fields.get(name, "").encode("latin-1")
        unpacked = _unpacked(value)
        try:
            json.loads(unpacked)
            changed = mutate_json(random, unpacked)
        except (ValueError, RecursionError):  # deep nesting from the mutation before
            changed = mutate_bytes(random, unpacked, [b"1970-01-01T00:00:00Z", b"0001-01-01T00:00:00.0Z", b"9" * 30])
        if unpacked is not value:
            changed = zlib.compress(changed)
        match random.randrange(8):
            case 0:
                fields.pop(name, None)
            case 1:
                fields[name] = random.choice(
                    ["", "-1", "9" * 30, "0001-01-01T00:00:00.000000Z", "null", "\xff\xfe", "a,b"]
                )
            case 2 if random.random() < 0.2:
                fields.clear()
            case _:
                fields[name] = changed.decode("latin-1")
    return json.dumps(records).encode()


def _unpacked(value: bytes) -> bytes:
    try:
        return zlib.decompress(value)
    except zlib.error:
        return value


def _write(connection: Any, records: dict[str, dict[str, str]]) -> None:
    raw = {of: {name: text.encode("latin-1") for name, text in fields.items()} for of, fields in records.items()}
    places = {"job": f"rq:job:{_ID}", "result": f"rq:results:{_ID}", "worker": _WORKER, "rank": f"{keys.RANK}here-1:0"}
    with connection.pipeline() as pipeline:
        pipeline.delete(*places.values())
        for of, key in places.items():
            if of == "rank":
                pipeline.set(key, raw[of].get("json", b""), ex=15)
            elif not raw[of]:
                pipeline.set(key, "not a record")
            elif of == "result":
                pipeline.xadd(key, raw[of])
            else:
                pipeline.hset(key, mapping=raw[of])
        pipeline.zadd(keys.RANKS, {"here-1:0": 2.0})
        pipeline.execute()
