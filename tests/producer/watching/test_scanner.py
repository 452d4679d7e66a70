"""When a file has stopped growing; times are given, so that nothing here waits."""

from svdq.producer.watching.directory import Signature
from svdq.producer.watching.scanner import Debounce

SMALL, LARGE = Signature(1, 1), Signature(2, 2)


def test_a_file_is_due_when_it_has_not_changed_for_long_enough() -> None:
    debounce = Debounce(2)
    debounce.update("a", SMALL, 10)
    assert debounce.due(11.9) == []
    assert debounce.due(12) == ["a"]


def test_a_file_that_grows_waits_again() -> None:
    debounce = Debounce(2)
    debounce.update("a", SMALL, 10)
    debounce.update("a", SMALL, 11)
    debounce.update("a", LARGE, 11.5)
    assert debounce.due(12) == []
    assert debounce.due(13.5) == ["a"]
    assert debounce.unchanged_s("a", 13.5) == 2
    assert debounce.signature("a") == LARGE


def test_files_are_due_until_they_are_postponed_or_removed() -> None:
    debounce = Debounce(2)
    debounce.update("b", SMALL, 0)
    debounce.update("a", SMALL, 1)
    assert [debounce.due(9), debounce.due(9)] == [["b", "a"], ["b", "a"]]
    debounce.remove("b")
    debounce.postpone("a", 20)
    assert debounce.due(19) == []
    assert debounce.due(20) == ["a"]
    debounce.remove("a")
    assert debounce.due(99) == []
    assert len(debounce) == 0


def test_a_postponed_file_that_changes_is_due_as_any_other() -> None:
    debounce = Debounce(2)
    debounce.update("a", SMALL, 0)
    debounce.postpone("a", 50)
    debounce.update("a", LARGE, 10)
    assert debounce.due(12) == ["a"]
