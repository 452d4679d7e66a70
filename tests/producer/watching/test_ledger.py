"""What a watcher remembers, and that only one has it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.producer.watching.ledger import Ledger, Record, State
from svdq.producer.watching.selection import Selection
from svdq.producer.watching.settling import Signature

SIGNATURE = Signature(5, 1_700_000_000_123_456_789)
DONE = Record(signature=SIGNATURE, state=State.DONE, job_id="j1")


def test_what_is_written_is_there_after_a_restart(tmp_path: Path) -> None:
    strange = os.fsdecode(b"day/caf\xe9 'x'.jpg")
    under_way = Record(signature=SIGNATURE, state=State.SUBMITTING, job_id="j2", job='{"a": 1}', priority="high")
    with Ledger(tmp_path, tmp_path) as ledger:
        ledger.put("a.jpg", DONE)
        ledger.put(strange, under_way)
        ledger.put("gone.jpg", DONE)
        ledger.remove("gone.jpg")
    with Ledger(tmp_path, tmp_path) as ledger:
        assert ledger.get("a.jpg") == DONE
        assert ledger.get(strange) == under_way
        assert ledger.get("gone.jpg") is None
        assert ledger.in_folder("") == {"a.jpg": DONE}
        assert list(ledger.in_folder("day").values()) == [under_way]


def test_a_killed_watcher_leaves_all_that_it_wrote_and_no_lock(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from svdq.producer.watching.ledger import *
home = Path(sys.argv[1])
ledger = Ledger(home, home)
ledger.put("a.jpg", Record(signature=Signature(5, 6), state=State.SUBMITTING, job_id="j1"))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == -9
    with Ledger(tmp_path, tmp_path) as ledger:
        assert ledger.get("a.jpg") == Record(signature=Signature(5, 6), state=State.SUBMITTING, job_id="j1")


def test_a_second_one_for_the_same_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with Ledger(tmp_path, tmp_path):
        with pytest.raises(InputError, match=f"watched already, by process {os.getpid()};"):
            Ledger(tmp_path, tmp_path)
        with Ledger(tmp_path, tmp_path / "other"):
            pass
    with Ledger(tmp_path, tmp_path):
        pass


def test_what_is_watched_and_what_is_left_alone_is_one_step(tmp_path: Path) -> None:
    scope = Selection(recursive=True, globs=("*.jpg",))
    with Ledger(tmp_path, tmp_path) as ledger:
        assert ledger.scope is None
        ledger.begin(scope, [("a.jpg", SIGNATURE), ("day/b.jpg", SIGNATURE)])
    with Ledger(tmp_path, tmp_path) as ledger:
        assert ledger.scope == scope
        left = Record(signature=SIGNATURE, state=State.LEFT)
        assert [ledger.get("a.jpg"), ledger.get("day/b.jpg")] == [left, left]


def test_files_that_are_gone_are_forgotten_in_the_end_only(tmp_path: Path) -> None:
    root = tmp_path / "inbox"
    (root / "day").mkdir(parents=True)
    (root / "there.jpg").touch()
    with Ledger(tmp_path, root) as ledger:
        for path in ("there.jpg", "day/back.jpg", "gone.jpg"):
            ledger.put(path, DONE)
        ledger.forget_gone(root)
        assert ledger.get("gone.jpg") == DONE  # its share may just not be mounted
        (root / "day" / "back.jpg").touch()
        ledger.forget_gone(root, forget_s=-1)
        assert [ledger.get(path) for path in ("there.jpg", "day/back.jpg", "gone.jpg")] == [DONE, DONE, None]


def test_a_ledger_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with Ledger(tmp_path, tmp_path):
        pass
    (file,) = (tmp_path / "watch").glob("*.sqlite")
    file.write_bytes(b"not a database" * 100)
    with pytest.raises(UnavailableError, match=file.name):
        Ledger(tmp_path, tmp_path)
