"""Records of jobs: those of other versions are read, and a job's log is in order, limited, and expires with the job."""

import json
from datetime import timedelta

import pytest
import redis

from svdq.producer import keys
from svdq.producer.job import JobArguments
from svdq.producer.job_control import cancel, retry
from svdq.producer.job_log import MAX_TEXT, LogEntry, append_log, read_log
from svdq.producer.records import Sidecar
from tests.queued import JOB, enqueue


def entry(text: str, level: str = "INFO") -> LogEntry:
    return LogEntry.now(rank=1, host="here", level=level, text=text, at=1000.5)


def append(connection: redis.Redis, job_id: str, *entries: LogEntry) -> None:
    with connection.pipeline() as pipeline:
        append_log(pipeline, job_id, list(entries))
        pipeline.execute()


def test_entries_come_back_in_order_and_outlive_a_retry(connection: redis.Redis) -> None:
    enqueue(connection, JOB, "a")
    assert read_log(connection, "a") == []
    first = entry("It failed:\nTraceback …\r\n  “File”\x85", "ERROR")
    append(connection, "a", first, entry("two"))
    cancel(connection, "a")
    retry(connection, "a")
    append(connection, "a", entry("three"))
    assert read_log(connection, "a") == [first, entry("two"), entry("three")]


def test_a_job_that_is_gone_stays_gone(connection: redis.Redis) -> None:
    append(connection, "a", entry("late"))
    assert connection.keys("*") == []
    assert read_log(connection, "a") == []


def test_of_much_the_newest_is_kept(connection: redis.Redis) -> None:
    enqueue(connection, JOB, "a")
    for number in range(300):
        append(connection, "a", entry(f"line {number} {'x' * 100}"))
    kept = [int(found.text.split()[1]) for found in read_log(connection, "a")]
    assert kept == list(range(kept[0], 300))
    assert 50 < len(kept) < 300
    assert connection.hstrlen("rq:job:a", keys.LOG_FIELD) <= keys.LOG_BYTES
    append(connection, "a", entry(f"begin {'y' * 3 * MAX_TEXT} end"))
    last = read_log(connection, "a")[-1].text
    assert len(last) <= MAX_TEXT + 10
    assert (last[:5], last[-3:]) == ("begin", "end")


#: The first version's sidecar, and all keys of today's.
EARLY = {"svdq": "0.1", "job_id": "a", "job": {"name": "cup", "seed": 1}, "outputs": ["/x/cup-a.mp4"]}
LATER = {
    "model": {"name": "preview", "notice": "preview (no diffusion model)", "compute": {"dtype": "float32"}},
    "versions": {"svdq": "0.1"},
    "source": "trip/cup.jpg",
    "shown": {"frames": 3, "fps": 24},
    "finished_at": "2026-11-23T20:00:00.123000Z",
    "group": {"ranks": 2, "host": "here", "pid": 7},
    "seconds": {"encode": 0.5, "denoise": 1.5},
    "stages": [{"rank": 0, "steps": 4, "seconds": 1.5}],
    "memory_bytes": {"peak": 2000000},
    "resumed": [{"from_step": 2, "steps_done_again": 1}],
}


@pytest.mark.parametrize("document", [EARLY, EARLY | LATER, EARLY | {"added": {"by": ["a later version"]}}])
def test_sidecars_of_all_versions_keep_their_keys(document: dict[str, object]) -> None:
    sidecar = Sidecar.parse(json.dumps(document))
    assert json.loads(sidecar.text) == document
    assert sidecar.name == "cup"
    assert sidecar.result.used == document["job"]
    comment = json.loads(sidecar.comment)
    assert comment == {key: value for key, value in document.items() if key not in ("outputs", "source")}


def test_the_work_of_a_video_is_the_sum_of_its_seconds() -> None:
    assert Sidecar.model_validate(EARLY | LATER).work == timedelta(seconds=2)
    assert Sidecar.model_validate(EARLY).work is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"svdq": "1", "job": 3}', '{"svdq": "\\ud800", "job": {}}'])
def test_text_that_is_no_sidecar_is_refused_with_a_reason(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w+"):
        Sidecar.parse(text)


def test_arguments_of_earlier_jobs_are_read_and_written_alike() -> None:
    arguments = {"job": JOB.model_dump(mode="json")}
    assert JobArguments.model_validate(arguments).model_dump(mode="json") == arguments
    noted = arguments | {"photo": "/photos/x.jpg", "notes": {"source": "a/x.jpg", "replaced": "d1", "prompt": "A cat."}}
    found = JobArguments.model_validate(noted)
    assert found.model_dump(mode="json") == noted
    assert (found.source, found.replaced, found.own_notes) == ("a/x.jpg", "d1", {"prompt": "A cat."})
