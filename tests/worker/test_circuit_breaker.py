"""When a group pauses because too much fails alike."""

from svdq.worker.intake.streak import Streak, kind_of

JOB = "0123456789abcdef0123"


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
