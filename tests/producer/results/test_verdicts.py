"""The decisions of people about videos."""

import redis

from svdq.producer import job_control


def test_a_verdict_is_given_changed_and_taken_back(connection: redis.Redis) -> None:
    job_control.give(connection, ["a", "b"], "keep")
    job_control.give(connection, ["b"], "reject")
    assert job_control.read(connection, ["a", "b", "c"]) == ["keep", "reject", None]
    assert job_control.kept(connection) == {"a"}
    job_control.give(connection, ["a"], None)
    assert job_control.read(connection, ["a"]) == [None]


def test_no_jobs_and_foreign_values_do_no_harm(connection: redis.Redis) -> None:
    job_control.give(connection, [], "keep")
    assert job_control.read(connection, []) == []
    connection.hset("svdq:verdicts", mapping={"x": b"\xff", "y": "maybe"})
    assert job_control.read(connection, ["x", "y"]) == [None, None]
    assert job_control.kept(connection) == set()
