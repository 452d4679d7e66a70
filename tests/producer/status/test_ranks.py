"""Records of ranks expire, and a bad one hides no other."""

import redis
from hypothesis import given
from hypothesis import strategies as st

from svdq.producer import keys
from svdq.producer.status.ranks import Condition, IntakeStatus, RankStatus, read_groups
from tests.ranks import COSTS, rank, save


@given(
    st.builds(
        Condition,
        effect=st.text(),
        reason=st.text(),
        since=st.floats(0, 1e10),
        attempts=st.integers(0, 99),
        job_ids=st.lists(st.text()).map(tuple),
    ),
    st.one_of(st.none(), st.floats(0, 1e6)),
)
def test_a_record_is_read_as_it_was_written(condition: Condition, pace_s: float | None) -> None:
    intake = IntakeStatus(worker="w", in_flight=("a", "b"), pace_s=pace_s, costs=(COSTS,))
    status = rank(0, conditions=(condition,), intake=intake, step_range=(0, 4))
    assert RankStatus.model_validate_json(status.model_dump_json()) == status


def test_ranks_are_read_by_group(connection: redis.Redis) -> None:
    assert read_groups(connection) == []
    condition = Condition(effect="Videos wait", reason="Full.", since=1.0, attempts=2)
    save(connection, rank(1, conditions=(condition,)), rank(0, intake=IntakeStatus(worker="w")), rank(0, "there-2"))
    here, there = read_groups(connection)
    assert (here.name, [status.rank for status in here.ranks]) == ("here-1", [0, 1])
    assert here.intake is not None
    assert here.intake.worker == "w"
    assert here.conditions == [condition]
    assert (there.name, there.intake) == ("there-2", None)


def test_a_silent_rank_goes_away_by_itself_and_one_that_ends_at_once(connection: redis.Redis) -> None:
    for number in range(2):
        rank(number).save(connection)
    for key in (keys.RANKS, rank(0).key):
        assert 0 < connection.ttl(key) <= keys.RANK_TTL_S
    connection.delete(rank(1).key)  # as time does
    assert [status.rank for group in read_groups(connection) for status in group.ranks] == [0]
    connection.zadd(keys.RANKS, {"here-1:1": connection.time()[0] - keys.RANK_TTL_S - 2})
    save(connection, rank(0))  # and is not looked for any more
    assert connection.zrange(keys.RANKS, 0, -1) == [b"here-1:0"]
    with connection.pipeline() as pipeline:
        rank(0).remove(pipeline)
        pipeline.execute()
    assert read_groups(connection) == []
    assert not connection.exists(keys.RANKS)


def test_a_wrong_clock_of_a_host_hides_no_rank(connection: redis.Redis) -> None:
    save(connection, rank(0, at=7e9), rank(1, at=1.0), rank(0, at=7e9))
    (group,) = read_groups(connection)
    assert [status.rank for status in group.ranks] == [0, 1]
    assert group.is_whole


def test_a_record_of_another_version_harms_no_other(connection: redis.Redis) -> None:
    save(connection, rank(0), rank(1))
    connection.set(rank(1).key, "{}")
    for number, wrong in enumerate(('"busy_share":1e999', f'"rss_bytes":{"9" * 400}', f'"steps":{"9" * 400}')):
        odd = rank(number, "odd", num_ranks=3)
        save(connection, odd)
        connection.set(odd.key, f"{odd.model_dump_json()[:-1]},{wrong}}}")
    connection.zadd(keys.RANKS, {"newer:0": 2.0})
    connection.set(f"{keys.RANK}newer:0", rank(0, "newer").model_dump_json()[:-1] + ',"more":1}')
    assert [group.name for group in read_groups(connection)] == ["here-1", "newer"]
