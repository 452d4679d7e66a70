from collections.abc import Callable

import pytest
import redis
import rq

from svdq.producer.job_control import move
from svdq.producer.queue import SvdqQueue, fetch
from svdq.producer.status.estimates import STORAGE, Estimate
from svdq.producer.status.job_view import last_sentence, view, view_many
from svdq.producer.status.ranks import Condition, GroupStatus, IntakeStatus
from svdq.producer.status.registries import counts, read_workers
from svdq.producer.status.selection import WINDOW, list_jobs
from svdq.producer.status.snapshot import estimate
from svdq.producer.together import ask_one
from tests.queued import SvdJob, add, fail, finish, start
from tests.ranks import rank


def test_one_job_through_its_life(connection: redis.Redis) -> None:
    job = add(connection, 1)
    queued = view(connection, job.id).as_json()
    assert (queued["status"], queued["step"], queued["steps"], queued["outputs"]) == ("queued", 0, 4, [])
    assert queued.keys() >= SvdJob.model_fields.keys() - {
        "family",
        "boomerang",
        "mark",
        "interpolate",
        "chained",
        "loras",
        "upscale",
        "finishes",
    }
    start(job, step=2, rank=3, notice="preview (no diffusion model)", used={"frames": 25})
    started = view(connection, job.id)
    assert (started.step, started.rank, started.parameters["frames"]) == (2, 3, 25)
    assert started.notice == "preview (no diffusion model)"
    finish(job, {"outputs": ["/x.mp4"], "used": {"frames": 25, "decode_chunk_size": 5}, "notice": "preview"})
    done = view(connection, job.id)
    assert done.ended
    assert (done.step, done.outputs, done.error, done.rank) == (4, ("/x.mp4",), None, None)
    assert done.as_json()["decode_chunk_size"] == 5


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("ValueError: x: y", "x: y"),
        ("The photo: gone", "The photo: gone"),
        ("Photo: gone", "Photo: gone"),
        ("svdq.a.B: Word: z", "Word: z"),
        ("a\n\nplain sentence.\n", "plain sentence."),
    ],
)
def test_last_sentence(text: str, sentence: str) -> None:
    assert last_sentence(text) == sentence
    assert "log" in last_sentence("") == last_sentence(None)


def test_list_is_newest_first_over_all_states(connection: redis.Redis) -> None:
    jobs = [add(connection, number, ("high", "default", "low")[number % 3]) for number in range(9)]
    finish(jobs[0], {"outputs": []})
    fail(jobs[4], "No.")
    jobs[5].cancel()
    ids = [job.id for job in jobs]
    assert [job.id for job in list_jobs(connection)] == ids[::-1]
    assert [job.id for job in list_jobs(connection, limit=2)] == ids[:-3:-1]
    assert [job.id for job in list_jobs(connection, statuses=["failed"])] == [ids[4]]
    assert [job.id for job in view_many(connection, [ids[3], "none", ids[1]])] == [ids[3], ids[1]]
    found = counts(connection)
    assert found["svdq-high"]["finished"] == 1
    assert found["svdq-high"]["queued"] == 2
    assert found["svdq-default"]["failed"] == 1
    assert found["svdq-low"]["canceled"] == 1


def test_foreign_jobs_are_shown_and_not_run(connection: redis.Redis) -> None:
    rq.Queue("svdq-default", connection=connection).enqueue("os.system", "true", job_id="pickled", meta={"a": 1})
    (foreign,) = list_jobs(connection)
    assert "not a job of svdq" in str(foreign.error)
    assert fetch(connection, "pickled").get_status() == "queued"


def test_workers(connection: redis.Redis) -> None:
    assert ask_one(connection, read_workers())[0] == []
    worker = rq.SimpleWorker(["svdq-default"], connection=connection, name="group", queue_class=SvdqQueue)
    other = rq.SimpleWorker(["else"], connection=connection, name="other")
    worker.register_birth()
    other.register_birth()
    (seen,) = ask_one(connection, read_workers())[0]
    assert (seen.name, seen.queues) == ("group", ["svdq-default"])


def test_a_new_job_is_listed_wherever_it_is_in_its_queue(connection: redis.Redis) -> None:
    *_, newest = [add(connection, number) for number in range(9)]
    move(connection, newest.id, front=True, priority=None)
    assert [job.id for job in list_jobs(connection, 1)] == [newest.id]
    finish(newest, {"outputs": []})
    for number in range(3):
        finish(fetch(connection, f"{number:020x}"), {"outputs": []})
    connection.zadd(SvdqQueue("svdq-default", connection=connection).finished_job_registry.key, {newest.id: 1})
    assert [job.id for job in list_jobs(connection, 1, ["finished"])] == [newest.id]


#: Makes as many finished jobs as are wanted out of one, inside Redis. KEYS: job, its results, registry. ARGV: number.
COPY = """
local expiry = redis.call('zrange', KEYS[3], -1, -1, 'WITHSCORES')[2]
for number = 1, tonumber(ARGV[1]) do
  local id = string.format('%020d', number)
  redis.call('copy', KEYS[1], 'rq:job:' .. id)
  redis.call('copy', KEYS[2], 'rq:results:' .. id)
  redis.call('hset', 'rq:job:' .. id, 'created_at', string.format('2020-01-01T00:00:00.%06dZ', number))
  redis.call('zadd', KEYS[3], expiry - 1 + number / 1e6, id)
end
"""


def num_commands(connection: redis.Redis, look: Callable[[], object]) -> tuple[int, object]:
    """How many commands Redis does for one look."""
    connection.config_resetstat()
    found = look()
    statistics = connection.info("commandstats")
    return sum(entry["calls"] for name, entry in statistics.items() if name != "cmdstat_info"), found


def test_thousands_of_kept_jobs_make_no_look_longer(connection: redis.Redis) -> None:
    """Kept jobs cost nothing: as many commands as before, and none that walks over them."""
    job = add(connection, 2**60)
    finish(job, {"outputs": ["/x.mp4"]})
    names = (
        job.key,
        f"rq:results:{job.id}",
        SvdqQueue("svdq-default", connection=connection).finished_job_registry.key,
    )
    looks = {"status": lambda: counts(connection), "list": lambda: list_jobs(connection, 20)}
    connection.eval(COPY, len(names), *names, WINDOW)
    for look in looks.values():
        look()  # loads the scripts
    few = {name: num_commands(connection, look)[0] for name, look in looks.items()}
    connection.eval(COPY, len(names), *names, 5000)
    many = {name: num_commands(connection, look) for name, look in looks.items()}
    assert {name: number for name, (number, _) in many.items()} == few
    assert many["status"][1]["svdq-default"]["finished"] == 5001
    assert [seen.id for seen in many["list"][1]] == [job.id, *(f"{number:020d}" for number in range(5000, 4981, -1))]
    slow = {"cmdstat_keys", "cmdstat_scan"}  # SMEMBERS is of the queues
    assert not slow & set(connection.info("commandstats"))


def test_jobs_ahead_and_conditions_are_estimated(connection: redis.Redis) -> None:
    urgent, *others = [add(connection, number, "high" if number == 0 else "default") for number in range(4)]
    started = add(connection, 9)
    start(started)
    condition = Condition(effect="Videos wait", reason="Full.", since=1.0, attempts=2, job_ids=(started.id,))
    intake = IntakeStatus(worker="w", in_flight=(started.id,), pace_s=10.0)
    groups = [GroupStatus(name="here-1", ranks=(rank(0, intake=intake, conditions=(condition,)),))]
    views = view_many(connection, [job.id for job in (urgent, *others, started)])
    found = estimate(connection, views, groups)
    assert [found[job.id].num_ahead for job in (urgent, *others)] == [0, 1, 2, 3]
    assert found[started.id] == Estimate(condition=condition, reason=STORAGE)
    finish(urgent, {"outputs": []})
    found = estimate(connection, view_many(connection, [urgent.id, others[0].id]), groups)
    assert {job_id: each.num_ahead for job_id, each in found.items()} == {others[0].id: 0}
    assert found[others[0].id].reason == STORAGE
