"""What becomes of files: nothing is written over, nothing half written has a final name."""

import os
from pathlib import Path

import pytest

from svdq.pipeline.errors import InputError
from svdq.producer.watching.aftermath import Then, finish, move, set_aside


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "inbox"
    (root / "day").mkdir(parents=True)
    (root / "day" / "a.jpg").write_text("new")
    return root


def test_a_moved_file_keeps_its_folder(root: Path) -> None:
    moved = finish(Then.read("move:done", root), root, "day/a.jpg")
    assert moved == root / "done" / "day" / "a.jpg"
    assert moved.read_text() == "new"
    assert not (root / "day" / "a.jpg").exists()


def test_a_moved_file_stands_beside_one_of_its_name(root: Path) -> None:
    (root / "done" / "day").mkdir(parents=True)
    (root / "done" / "day" / "a.jpg").write_text("old")
    moved = finish(Then.read("move:done", root), root, "day/a.jpg")
    assert moved == root / "done" / "day" / "a-2.jpg"
    assert (root / "done" / "day" / "a.jpg").read_text() == "old"


def test_deleting_and_keeping(root: Path) -> None:
    finish(Then.read("keep", root), root, "day/a.jpg")
    assert (root / "day" / "a.jpg").exists()
    finish(Then.read("delete", root), root, "day/a.jpg")
    assert not (root / "day" / "a.jpg").exists()


@pytest.mark.parametrize("text", ["", "move", "move:", "move: ", "move:.", "copy:there", "Keep"])
def test_what_is_not_allowed(root: Path, text: str) -> None:
    with pytest.raises(InputError, match="--then"):
        Then.read(text, root)


def test_a_rejected_file_has_its_reason_beside_it(root: Path) -> None:
    target = set_aside(root, "day/a.jpg", "It is damaged.")
    assert target == root / "rejected" / "day" / "a.jpg"
    assert target.read_text() == "new"
    assert (root / "rejected" / "day" / "a.jpg.txt").read_text() == "It is damaged.\n"


@pytest.fixture
def other_disk(tmp_path: Path) -> Path:
    """A folder on another file system."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system here")
    folder = memory / f"svdq-test-{os.getpid()}"
    folder.mkdir()
    return folder


def test_a_file_is_moved_to_another_disk_whole_and_once(root: Path, other_disk: Path) -> None:
    try:
        source, target = root / "day" / "a.jpg", other_disk / "sub" / "a.jpg"
        os.utime(source, (1_000, 1_000))
        assert move(source, target) == target
        assert (target.read_text(), target.stat().st_mtime) == ("new", 1_000)
        assert not source.exists()

        # As after a kill between the copy and the end.
        source.write_text("new")
        os.utime(source, (1_000, 1_000))
        move(source, target)
        assert not source.exists()
        assert [path.name for path in target.parent.iterdir()] == ["a.jpg"]
    finally:
        for path in sorted(other_disk.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        other_disk.rmdir()
