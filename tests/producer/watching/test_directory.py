"""Moving, deleting and rejecting files: nothing is overwritten, nothing incomplete has a final name."""

from pathlib import Path

import pytest

from svdq.pipeline.errors import InputError
from svdq.producer.watching.directory import Signature, delete_file, move_file, signature
from svdq.producer.watching.folder_config import PostSubmit


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "inbox"
    (root / "day").mkdir(parents=True)
    (root / "day" / "a.jpg").write_text("new")
    return root


def version(root: Path, path: str) -> Signature:
    found = signature(root, path)
    assert found is not None
    return found


def move_after(on_success: str, root: Path) -> None:
    """Move day/a.jpg."""
    move_file(root, "day/a.jpg", version(root, "day/a.jpg"), PostSubmit.parse(on_success, root).target)


def reject(root: Path, path: str, version: Signature, reason: str) -> Path | None:
    return move_file(root, path, version, "rejected", reason)


def files(folder: Path) -> dict[str, str]:
    """All files below a folder, with hidden ones, and what is in them."""
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_moved_file_gets_a_free_name(root: Path) -> None:
    (root / "done" / "day").mkdir(parents=True)
    (root / "done" / "day" / "a.jpg").write_text("old")
    move_after("move:done", root)
    assert files(root) == {"done/day/a.jpg": "old", "done/day/a-2.jpg": "new"}


def test_a_moved_file_with_the_longest_name_gets_a_free_name(root: Path) -> None:
    longest = "\u00e4" * 125 + "x.jpg"
    (root / "day" / longest).write_text("new")
    (root / "done" / "day").mkdir(parents=True)
    (root / "done" / "day" / longest).write_text("old")
    placed = move_file(root, f"day/{longest}", version(root, f"day/{longest}"), "done")
    assert placed == root / "done" / "day" / ("\u00e4" * 124 + "-2.jpg")
    assert placed.read_text() == "new"


@pytest.mark.parametrize(
    "text",
    ["", "move", "move:", "move: ", "move:.", "move:done/..", "move:../done", "move:/done", "copy:there", "Keep"],
)
def test_actions_that_are_not_allowed(root: Path, text: str) -> None:
    with pytest.raises(InputError, match="--on-success"):
        PostSubmit.parse(text, root)


def test_a_rejected_file_has_its_reason_beside_it(root: Path) -> None:
    target = reject(root, "day/a.jpg", version(root, "day/a.jpg"), "It is damaged.")
    assert target == root / "rejected" / "day" / "a.jpg"
    assert files(root) == {"rejected/day/a.jpg": "new", "rejected/day/a.jpg.txt": "It is damaged.\n"}


@pytest.mark.parametrize("action", ["move", "delete", "reject"])
def test_a_newer_version_stays(root: Path, action: str) -> None:
    old = version(root, "day/a.jpg")
    (root / "day" / "a.jpg").write_text("newer")
    if action == "reject":
        assert reject(root, "day/a.jpg", old, "It is damaged.") is None
    elif action == "delete":
        delete_file(root, "day/a.jpg", old)
    else:
        assert move_file(root, "day/a.jpg", old, "done") is None
    assert files(root) == {"day/a.jpg": "newer"}
