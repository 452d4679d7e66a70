"""When a group takes no more jobs: after jobs that fail alike, and shortly before `--until`."""

from svdq.worker.intake.dispatcher import is_too_late
from svdq.worker.intake.reporter import CircuitBreaker


def test_three_different_jobs_that_fail_alike_open_the_breaker() -> None:
    breaker = CircuitBreaker()
    assert not breaker.record_failure("a", "Out of GPU memory in step 3 of 25; 1.5 GiB.")
    assert not breaker.record_failure("b", "Out of GPU memory in step 12 of 25; 2.25 GiB.")
    assert not breaker.record_failure("b", "Out of GPU memory in step 12 of 25; 2.25 GiB.")
    assert breaker.record_failure("c", "Out of GPU memory in step 1 of 9; 3 GiB.")
    assert not breaker.record_failure("d", "Out of GPU memory in step 1 of 9; 3 GiB.")


def test_a_success_or_another_reason_resets_the_breaker() -> None:
    breaker = CircuitBreaker()
    breaker.record_failure("a", "One.")
    breaker.record_failure("b", "One.")
    breaker.record_success()
    assert not breaker.record_failure("c", "One.")
    breaker.record_failure("d", "One.")
    assert not breaker.record_failure("e", "Another.")


def test_ids_in_reasons_do_not_make_them_different() -> None:
    breaker = CircuitBreaker()
    jobs = ("0123456789abcdef0123", "ffffffffff0123456789", "a0a0a0a0a0a0a0a0a0a0")
    assert [breaker.record_failure(job, f"Job {job} failed.") for job in jobs] == [False, False, True]


def test_another_video_is_begun_as_long_as_one_like_the_last_ones_would_be_done() -> None:
    assert not is_too_late(1000.0, None, [10.0])
    assert not is_too_late(1000.0, 1011.0, [10.0, 10.0, 500.0])
    assert is_too_late(1000.0, 1009.0, [10.0, 10.0, 500.0])
    assert not is_too_late(1000.0, 1001.0, [])
    assert is_too_late(1001.0, 1001.0, [])
