"""Who is blamed for a rank's death, and who is not."""

import os
import subprocess
import sys
from pathlib import Path

from svdq.worker.intake.streak import Streak, kind_of
from svdq.worker.recovery.breadcrumbs import RECORD_BYTES, Blame, Breadcrumbs, folder_without_launcher, read_blame

JOB = "0123456789abcdef0123"


def group(folder: Path, life: int = 0) -> list[Breadcrumbs]:
    return [Breadcrumbs(folder, life, rank) for rank in range(3)]


def test_the_one_that_died_without_a_word_is_to_blame(tmp_path: Path) -> None:
    ranks = group(tmp_path)
    for number, rank in enumerate(ranks):
        rank.step(f"{JOB}{number}", 4 + number)
    ranks[0].innocent()
    ranks[2].innocent()
    assert read_blame(tmp_path, 1) == Blame(job_id=f"{JOB}1", step=5, rank=1)
    assert read_blame(tmp_path, 1) is None  # once


def test_when_several_died_no_job_is_to_blame(tmp_path: Path) -> None:
    for rank in group(tmp_path):
        rank.step(JOB, 4)
    assert read_blame(tmp_path, 1) is None


def test_a_rank_that_ends_because_it_stalled_says_so(tmp_path: Path) -> None:
    ranks = group(tmp_path)
    ranks[1].step(JOB, 4)
    ranks[1].stalled()
    ranks[0].innocent()
    ranks[2].innocent()
    assert read_blame(tmp_path, 1) == Blame(job_id=JOB, step=4, rank=1, stalled=True)


def test_an_idle_rank_died_of_no_job(tmp_path: Path) -> None:
    ranks = group(tmp_path)
    ranks[1].step(JOB, 4)
    ranks[1].idle()
    ranks[0].innocent()
    ranks[2].innocent()
    assert read_blame(tmp_path, 1) is None


def test_a_late_note_does_not_undo_innocence(tmp_path: Path) -> None:
    ranks = group(tmp_path)
    for rank in ranks:
        rank.innocent()
        rank.step(JOB, 9)
    assert read_blame(tmp_path, 1) is None


def test_only_the_life_before_counts(tmp_path: Path) -> None:
    group(tmp_path, 0)[0].step(JOB, 1)
    ranks = group(tmp_path, 1)
    for rank in ranks:
        rank.innocent()
    new = group(tmp_path, 2)
    assert read_blame(tmp_path, 2) is None
    assert len(list(tmp_path.iterdir())) == len(new)
    assert read_blame(tmp_path, 0) is None


def test_records_are_of_one_size_and_survive_kill_9(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from svdq.worker.recovery.breadcrumbs import Breadcrumbs\n"
        "crumbs = Breadcrumbs(Path(sys.argv[1]), 0, 0)\n"
        "for step in range(12): crumbs.step(sys.argv[2], step)\n"
        "os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path), JOB]).returncode == -9
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [RECORD_BYTES]
    assert read_blame(tmp_path, 1) == Blame(job_id=JOB, step=11, rank=0)


def test_an_id_that_does_not_fit_is_nobodys(tmp_path: Path) -> None:
    Breadcrumbs(tmp_path, 0, 0).step("x" * RECORD_BYTES, 1)
    assert read_blame(tmp_path, 1) is None


def test_without_a_launcher_the_folder_is_the_parents(tmp_path: Path) -> None:
    (tmp_path / "runs" / str(2**22 + 1)).mkdir(parents=True)
    folder = folder_without_launcher(tmp_path)
    assert folder == tmp_path / "runs" / str(os.getppid())
    assert list((tmp_path / "runs").iterdir()) == []  # those of groups that are gone


def test_three_different_jobs_that_fail_alike_are_a_streak() -> None:
    streak = Streak()
    assert not streak.bad("a", "Out of GPU memory in step 3 of 25; 1.5 GiB.")
    assert not streak.bad("b", "Out of GPU memory in step 12 of 25; 2.25 GiB.")
    assert not streak.bad("b", "Out of GPU memory in step 12 of 25; 2.25 GiB.")
    assert streak.bad("c", "Out of GPU memory in step 1 of 9; 3 GiB.")
    assert not streak.bad("d", "Out of GPU memory in step 1 of 9; 3 GiB.")


def test_a_success_or_another_reason_ends_a_streak() -> None:
    streak = Streak()
    streak.bad("a", "One.")
    streak.bad("b", "One.")
    streak.good()
    assert not streak.bad("c", "One.")
    streak.bad("d", "One.")
    assert not streak.bad("e", "Another.")
    assert kind_of(f"Job {JOB} failed") == kind_of("Job ffffffffff0123456789 failed")
