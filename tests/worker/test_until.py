"""`--until`: what can still be done by then."""

from svdq.worker.intake.policy import is_too_late


def test_another_video_is_begun_as_long_as_one_like_the_last_ones_would_be_done() -> None:
    assert not is_too_late(1000.0, None, [10.0])
    assert not is_too_late(1000.0, 1011.0, [10.0, 10.0, 500.0])
    assert is_too_late(1000.0, 1009.0, [10.0, 10.0, 500.0])
    assert not is_too_late(1000.0, 1001.0, [])
    assert is_too_late(1001.0, 1001.0, [])
