"""Moving, deleting and rejecting files: nothing is overwritten, nothing incomplete has a final name."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from svdq.pipeline.errors import InputError
from svdq.producer.watching.directory import COPYING, Signature, delete_file, move_file, signature
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
    """Move or delete day/a.jpg."""
    post_submit = PostSubmit.parse(on_success, root)
    assert post_submit.target is not None
    move_file(root, "day/a.jpg", version(root, "day/a.jpg"), post_submit.target, post_submit.subfolder)


def reject(root: Path, path: str, version: Signature, reason: str) -> Path | None:
    return move_file(root, path, version, root, "rejected", reason)


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
    placed = move_file(root, f"day/{longest}", version(root, f"day/{longest}"), root, "done")
    assert placed == root / "done" / "day" / ("\u00e4" * 124 + "-2.jpg")
    assert placed.read_text() == "new"


@pytest.mark.parametrize("text", ["", "move", "move:", "move: ", "move:.", "move:done/..", "copy:there", "Keep"])
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
        assert move_file(root, "day/a.jpg", old, root, "done") is None
    assert files(root) == {"day/a.jpg": "newer"}


@pytest.fixture
def other_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system here")
    folder = Path(tempfile.mkdtemp(dir=memory))
    yield folder
    shutil.rmtree(folder)


def test_a_file_is_moved_to_another_disk_whole_and_once(root: Path, other_disk: Path) -> None:
    source = root / "day" / "a.jpg"
    source.chmod(0o4640)
    os.utime(source, (1_000, 1_000))
    move_after(f"move:{other_disk}", root)
    assert (files(root), files(other_disk)) == ({}, {"day/a.jpg": "new"})
    status = (other_disk / "day" / "a.jpg").stat()
    assert (status.st_mtime, status.st_mode & 0o7777) == (1_000, 0o640)


def test_a_share_whose_files_have_a_fixed_owner(root: Path, other_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchmod", refuse)
    move_after(f"move:{other_disk}", root)
    assert (files(root), files(other_disk)) == ({}, {"day/a.jpg": "new"})


def test_a_copy_that_cannot_get_its_name_leaves_nothing(
    root: Path, other_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name == COPYING:
            raise OSError(22, "Invalid argument")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="Invalid argument"):
        move_after(f"move:{other_disk}", root)
    assert (files(root), files(other_disk)) == ({"day/a.jpg": "new"}, {})


def test_a_target_knows_where_its_disk_is_mounted(root: Path, tmp_path: Path) -> None:
    prepared = PostSubmit.parse(f"move:{tmp_path / 'done'}", root).prepare()
    assert prepared.mount is not None
    assert os.path.ismount(prepared.mount)
    assert not prepared.is_away
    assert replace(prepared, mount=tmp_path).is_away
