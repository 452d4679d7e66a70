"""The memory of a watcher, which only one process has open."""

import os
from pathlib import Path

import pytest

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.producer.watching.directory import Signature
from svdq.producer.watching.folder_config import FileFilter
from svdq.producer.watching.state import FileRecord, State

SIGNATURE = Signature(5, 1_700_000_000_123_456_789)
DONE = FileRecord(SIGNATURE, "submitted", "j1")


def test_records_survive_a_restart(tmp_path: Path) -> None:
    strange = os.fsdecode(b"day/caf\xe9 'x'.jpg")
    rejected = FileRecord(SIGNATURE, "rejected")
    with State(tmp_path, tmp_path) as state:
        state.put("a.jpg", DONE)
        state.put(strange, rejected)
        state.put("gone.jpg", DONE)
        state.remove("gone.jpg")
    with State(tmp_path, tmp_path) as state:
        assert state.get("a.jpg") == DONE
        assert state.get(strange) == rejected
        assert state.get("gone.jpg") is None


def test_a_second_watcher_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with State(tmp_path, tmp_path):
        with pytest.raises(InputError, match="already watched by another process"):
            State(tmp_path, tmp_path)
        with State(tmp_path, tmp_path / "other"):
            pass
    with State(tmp_path, tmp_path):
        pass


def test_the_selection_and_the_skipped_files_are_written_together(tmp_path: Path) -> None:
    selection = FileFilter(recursive=True, globs=("*.jpg",))
    with State(tmp_path, tmp_path) as state:
        assert state.selection is None
        state.begin(selection, [("a.jpg", SIGNATURE), ("day/b.jpg", SIGNATURE)])
    with State(tmp_path, tmp_path) as state:
        assert state.selection == selection
        skipped = FileRecord(SIGNATURE, "skipped")
        assert [state.get("a.jpg"), state.get("day/b.jpg")] == [skipped, skipped]


def test_the_error_names_an_unusable_database(tmp_path: Path) -> None:
    with State(tmp_path, tmp_path):
        pass
    (file,) = (tmp_path / "watch").glob("*.sqlite")
    file.write_bytes(b"not a database" * 100)
    with pytest.raises(UnavailableError, match=file.name):
        State(tmp_path, tmp_path)
    file.unlink()
    file.mkdir()
    with pytest.raises(UnavailableError, match=file.name):
        State(tmp_path, tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/watch").touch()
    with pytest.raises(UnavailableError, match=r"\(File exists\)"):
        State(tmp_path / "other", tmp_path)
