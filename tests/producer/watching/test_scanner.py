"""When a file has stopped growing; times are given, so that nothing here waits."""

from svdq.producer.watching.directory import Signature
from svdq.producer.watching.scanner import Debounce

SMALL, LARGE = Signature(1, 1), Signature(2, 2)


def due(debounce: Debounce, now_s: float) -> list[str]:
    return [file.path for file in debounce.due(now_s)]


def test_a_file_is_due_when_it_has_not_changed_for_long_enough() -> None:
    debounce = Debounce(2)
    debounce.update("a", SMALL, 10)
    assert due(debounce, 11.9) == []
    assert due(debounce, 12) == ["a"]


def test_a_file_that_grows_waits_again() -> None:
    debounce = Debounce(2)
    debounce.update("a", SMALL, 10)
    debounce.update("a", SMALL, 11)
    debounce.update("a", LARGE, 11.5)
    assert due(debounce, 12) == []
    (file,) = debounce.due(13.5)
    assert (file.path, file.signature, file.since_s) == ("a", LARGE, 11.5)


def test_files_are_due_until_they_are_postponed_or_removed() -> None:
    debounce = Debounce(2)
    b = debounce.update("b", SMALL, 0)
    a = debounce.update("a", SMALL, 1)
    assert [due(debounce, 9), due(debounce, 9)] == [["b", "a"], ["b", "a"]]
    debounce.remove(b)
    a.due_s = 20
    assert due(debounce, 19) == []
    assert due(debounce, 20) == ["a"]
    debounce.remove(a)
    assert due(debounce, 99) == []
    assert debounce.files == {}


def test_a_postponed_file_that_changes_is_due_as_any_other() -> None:
    debounce = Debounce(2)
    debounce.update("a", SMALL, 0).due_s = 50
    debounce.update("a", LARGE, 10)
    assert due(debounce, 12) == ["a"]
