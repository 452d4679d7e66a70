"""Which jobs are suspects after a rank has died, and which are not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from svdq.worker.queue.crashes import (
    MAX_ID_LENGTH,
    PHASES,
    RECORD_BYTES,
    SLOT_BYTES,
    CrashMarker,
    CrashSuspect,
    Phase,
    folder_without_launcher,
    read_suspects,
)

JOB = "0123456789abcdef0123"


def group(folder: Path, restart_count: int = 0) -> list[CrashMarker]:
    return [CrashMarker(folder, restart_count, rank) for rank in range(3)]


def test_the_job_of_the_rank_without_a_clean_exit_is_the_suspect(tmp_path: Path) -> None:
    ranks = group(tmp_path)
    for number, rank in enumerate(ranks):
        rank.begin("step", f"{JOB}{number}", 4 + number)
    ranks[0].mark_clean_exit()
    ranks[2].mark_clean_exit()
    assert read_suspects(tmp_path, 1) == (CrashSuspect(job_id=f"{JOB}1", phase="step", step=5, rank=1),)
    assert read_suspects(tmp_path, 1) == ()  # once


def test_every_thread_of_a_rank_leaves_a_suspect(tmp_path: Path) -> None:
    rank = CrashMarker(tmp_path, 0, 0)
    rank.begin("decode", "a")
    with rank.during("prepare", "b"), rank.during("write", "c"), rank.during("write", "d"):
        with rank.during("write", "e"):
            pass
        found = {suspect.job_id: suspect.phase for suspect in read_suspects(tmp_path, 1)}
    assert found == {"a": "decode", "b": "prepare", "c": "write", "d": "write"}


def test_a_phase_that_is_over_leaves_none(tmp_path: Path) -> None:
    rank = CrashMarker(tmp_path, 0, 0)
    rank.begin("encode", "a")
    rank.idle()
    with rank.during("prepare", "b"):
        pass
    with pytest.raises(OSError, match="full"), rank.during("write", "c"):
        raise OSError("full")
    assert read_suspects(tmp_path, 1) == ()


def test_ranks_that_die_of_the_same_job_are_one_suspect(tmp_path: Path) -> None:
    ranks = group(tmp_path)
    ranks[0].begin("step", JOB, 1)
    ranks[1].begin("warm-up", JOB)
    ranks[2].begin("warm-up", JOB)
    assert read_suspects(tmp_path, 1) == (CrashSuspect(job_id=JOB, phase="warm-up", rank=1),)


def test_a_rank_that_ends_because_it_stalled_suspects_its_stage_loop_alone(tmp_path: Path) -> None:
    ranks = group(tmp_path)
    with ranks[1].during("prepare", "other"):
        ranks[1].begin("step", JOB, 4)
        ranks[1].mark_stalled()
        ranks[0].mark_clean_exit()
        ranks[2].mark_clean_exit()
        expected = CrashSuspect(job_id=JOB, phase="step", step=4, rank=1, stalled=True)
        assert read_suspects(tmp_path, 1) == (expected,)


def test_a_slot_written_late_does_not_undo_a_clean_exit(tmp_path: Path) -> None:
    rank = CrashMarker(tmp_path, 0, 0)
    rank.mark_clean_exit()
    rank.begin("step", JOB, 9)
    with rank.during("write", JOB):
        assert read_suspects(tmp_path, 1) == ()


def test_files_are_read_once_and_those_of_this_restart_are_left(tmp_path: Path) -> None:
    group(tmp_path, 0)[0].begin("step", "a", 1)
    group(tmp_path, 1)[2].begin("step", "b", 1)  # it died before it could read those of the start before
    new = group(tmp_path, 2)
    new[0].begin("step", "c", 1)
    assert {suspect.job_id for suspect in read_suspects(tmp_path, 2)} == {"a", "b"}
    assert len(list(tmp_path.iterdir())) == len(new)
    assert read_suspects(tmp_path, 2) == ()


def test_a_record_survives_kill_9(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from svdq.worker.queue.crashes import CrashMarker\n"
        "marker = CrashMarker(Path(sys.argv[1]), 0, 0)\n"
        "for step in range(12): marker.begin('step', sys.argv[2], step)\n"
        "os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path), JOB]).returncode == -9
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [RECORD_BYTES]
    assert read_suspects(tmp_path, 1) == (CrashSuspect(job_id=JOB, phase="step", step=11, rank=0),)


@pytest.mark.parametrize("phase", PHASES)
def test_the_longest_id_fits_in_every_phase(tmp_path: Path, phase: Phase) -> None:
    longest = "a" * MAX_ID_LENGTH
    CrashMarker(tmp_path, 0, 0).begin(phase, longest, 99_999)
    assert [suspect.job_id for suspect in read_suspects(tmp_path, 1)] == [longest]


def test_an_id_that_does_not_fit_and_a_damaged_file_name_no_job(tmp_path: Path) -> None:
    CrashMarker(tmp_path, 0, 0).begin("step", "x" * SLOT_BYTES, 1)
    (tmp_path / "restart0.rank1").write_bytes(b"step 1 a")
    (tmp_path / "restart0.rank2").write_bytes(b"\xff" * RECORD_BYTES)
    assert read_suspects(tmp_path, 1) == ()


def test_without_a_launcher_the_folder_is_the_parents(tmp_path: Path) -> None:
    folder = folder_without_launcher(tmp_path)
    assert folder == folder_without_launcher(tmp_path)  # after a restart of the group, too
    before, pid, identity = folder.name.rsplit("-", 2)
    assert int(pid) == os.getppid()
    place, start, label = identity.split(".")
    gone = (f"{before}-{2**22 + 1}-{identity}", f"{before}-{pid}-{place}.1{start}.{label}")  # and a reused number
    others = (f"{before}-{pid}-elsewhere.{start}.{label}", "notes")  # another container's, and no folder of ours
    for name in (*gone, *others):
        (tmp_path / "runs" / name).mkdir(parents=True)
    folder_without_launcher(tmp_path)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == set(others)


def test_a_disk_that_takes_no_record_ends_no_rank(tmp_path: Path) -> None:
    """As a full one whose file system copies on write."""
    code = (
        "import resource, sys; from pathlib import Path; from svdq.worker.queue.crashes import CrashMarker\n"
        "marker = CrashMarker(Path(sys.argv[1]), 0, 0)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "with marker.during('write', 'a'): marker.begin('step', 'b', 1)\n"
        "marker.mark_clean_exit()"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == 0
