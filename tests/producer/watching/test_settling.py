"""When a file has stopped growing; times are given, so that nothing here waits."""

from svdq.producer.watching.settling import Settling, Signature

SMALL, LARGE = Signature(1, 1), Signature(2, 2)


def test_a_file_is_due_when_it_has_not_changed_for_long_enough() -> None:
    settling = Settling(2)
    settling.see("a", SMALL, 10)
    assert settling.next_due(11.9) is None
    assert settling.next_due(12) == "a"


def test_a_file_that_grows_has_to_wait_anew() -> None:
    settling = Settling(2)
    settling.see("a", SMALL, 10)
    settling.see("a", SMALL, 11)
    settling.see("a", LARGE, 11.5)
    assert settling.next_due(12) is None
    assert settling.next_due(13.5) == "a"
    assert settling.unchanged_s("a", 13.5) == 2
    assert settling.signature("a") == LARGE


def test_a_file_stays_due_until_it_is_dealt_with() -> None:
    settling = Settling(2)
    settling.see("a", SMALL, 0)
    settling.see("b", SMALL, 1)
    assert [settling.next_due(9), settling.next_due(9)] == ["a", "a"]
    settling.forget("a")
    assert settling.next_due(9) == "b"
    settling.put_off("b", 20)
    assert settling.next_due(19) is None
    assert settling.next_due(20) == "b"
    settling.forget("b")
    assert settling.next_due(99) is None
    assert len(settling) == 0


def test_a_file_that_was_put_off_and_changes_is_due_like_any_that_changes() -> None:
    settling = Settling(2)
    settling.see("a", SMALL, 0)
    settling.put_off("a", 50)
    settling.see("a", LARGE, 10)
    assert settling.next_due(12) == "a"
