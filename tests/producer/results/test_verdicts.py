"""What people have decided about videos."""

import redis

from svdq.producer.results import verdicts


def test_a_verdict_is_given_changed_and_taken_back(connection: redis.Redis) -> None:
    verdicts.give(connection, ["a", "b"], "keep")
    verdicts.give(connection, ["b"], "reject")
    assert verdicts.read(connection, ["a", "b", "c"]) == ["keep", "reject", None]
    assert verdicts.kept(connection) == {"a"}
    verdicts.give(connection, ["a"], None)
    assert verdicts.read(connection, ["a"]) == [None]


def test_no_jobs_and_foreign_values_do_no_harm(connection: redis.Redis) -> None:
    verdicts.give(connection, [], "keep")
    assert verdicts.read(connection, []) == []
    connection.hset("svdq:verdicts", mapping={"x": b"\xff", "y": "maybe"})
    assert verdicts.read(connection, ["x", "y"]) == [None, None]
    assert verdicts.kept(connection) == set()
