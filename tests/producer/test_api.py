"""The Python API: the example of docs/python.md runs, and the package imports only what is used."""

import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from types import FunctionType

import pytest
import redis

import svdq.producer
from svdq.pipeline.errors import InputError
from svdq.producer import Settings, SubmitOptions, cancel, job_status, load_settings, retry, submit, wait_for_jobs
from svdq.producer.embedded_redis import stop_server
from svdq.producer.status.job_view import JobsLostError, JobView
from svdq.producer.untrusted_job import key_of
from tests.waiting import wait_until

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")


def example() -> str:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1, "a block that no test would run"
    return str(blocks[0])


def test_the_example_submits_and_waits(
    connection: redis.Redis, photo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the example waits, the job is canceled: it then ends without a worker."""
    shutil.copy(photo, "photo.jpg")
    canceled = []
    sleep = time.sleep

    def cancel_and_sleep(seconds: float) -> None:
        assert 0 < seconds <= 3600
        if threading.current_thread() is not threading.main_thread():
            sleep(seconds)  # another test's thread
            return
        canceled.append(svdq.producer.submit(load_settings(), [Path("photo.jpg")], same)[0].id)
        cancel(load_settings(), canceled[-1])

    same = SubmitOptions(frames=14, width=576, height=320, seed=7)
    monkeypatch.setattr(time, "sleep", cancel_and_sleep)
    exec(compile(example(), "docs/python.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(canceled) == 1
    assert lines == [f"{canceled[0]} queued", "queued step 0 of 25", "no video: canceled None"]


@pytest.mark.usefixtures("own_server")
def test_waiting_goes_on_while_redis_restarts(settings: Settings, photo: Path, home: Path) -> None:
    (submission,) = submit(settings, [photo], SubmitOptions())
    looks, stopped = [], threading.Event()

    def restart_then_cancel(_connection: redis.Redis, views: list[JobView]) -> None:
        looks.append([view.status for view in views])
        if len(looks) == 1:
            assert stop_server(home)
            stopped.set()
            raise redis.ConnectionError("lost")
        if len(looks) == 2:
            cancel(settings, submission.id)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(wait_for_jobs, settings, submission.id, on_look=restart_then_cancel)
        wait_until(stopped.is_set)
        wait_until(lambda: job_status(settings, submission.id))  # starts the server again
        (job,) = done.result(60)
    assert looks[:2] == [["queued"], ["queued"]]
    assert job.status == "canceled"


def test_a_job_that_redis_has_lost_does_not_end_the_wait_for_others(settings: Settings, photo: Path) -> None:
    lost, other = (submit(settings, photo, force=True)[0].id for _ in range(2))
    looks = []

    def lose_then_cancel(connection: redis.Redis, views: list[JobView]) -> None:
        looks.append(sorted(view.id for view in views))
        if len(looks) == 1:
            connection.delete(key_of(lost))
        elif len(looks) == 2:
            cancel(settings, other)

    with pytest.raises(JobsLostError, match=lost) as caught:
        wait_for_jobs(settings, [lost, other], on_look=lose_then_cancel)
    assert [(view.id, view.status) for view in caught.value.others] == [(other, "canceled")]
    assert looks[:2] == [sorted([lost, other]), [other]]


def test_photos_are_texts_folders_and_patterns(settings: Settings, photo: Path, tmp_path: Path) -> None:
    folder = tmp_path / "trip"
    (folder / "day 1").mkdir(parents=True)
    for name in ("a.jpg", "b.jpg", "day 1/c.jpg"):
        shutil.copy(photo, folder / name)
    at = datetime(2099, 1, 1, tzinfo=UTC)
    found = submit(settings, str(folder), recursive=True, output="out", at=at)
    assert [Path(each.photo).name for each in found] == ["a.jpg", "b.jpg", "c.jpg"]
    assert job_status(settings, found[2].id).parameters["folder"] == "out/day 1"
    assert job_status(settings, found[0].id).scheduled_at == at
    again = submit(settings, [str(folder / "[ab].jpg"), folder / "day 1"])
    assert [Path(each.photo).name for each in again] == ["a.jpg", "b.jpg", "c.jpg"]
    assert submit(settings, []) == []


def test_bad_photos_can_be_left_out_and_messages_name_arguments(settings: Settings, photo: Path) -> None:
    bad = photo.with_name("bad.jpg")
    bad.write_text("no photo")
    with pytest.raises(InputError, match="skip_bad leaves it out"):
        submit(settings, [photo, bad])
    assert [each.name for each in submit(settings, [photo, bad], skip_bad=True)] == ["a photo"]
    empty = photo.with_name("empty")
    empty.mkdir()
    with pytest.raises(InputError, match="; recursive includes subfolders"):
        submit(settings, empty)


def test_jobs_are_canceled_and_retried(settings: Settings, photo: Path) -> None:
    [submission] = submit(settings, photo)
    with pytest.raises(InputError, match="'nothing'"):
        cancel(settings, [submission.id, "nothing"])
    assert [job.status for job in cancel(settings, submission.id)] == ["canceled"]
    assert [job.status for job in retry(settings, [submission.id])] == ["queued"]
    with pytest.raises(InputError, match="only failed, stopped and canceled"):
        retry(settings, submission.id)


def test_every_public_name_is_there_and_documented() -> None:
    for name in svdq.producer.__all__:
        assert isinstance(getattr(svdq.producer, name), type | FunctionType)
        assert f"`{name}" in PAGE, name
    assert set(svdq.producer.__all__) <= set(dir(svdq.producer))
    with pytest.raises(AttributeError, match="nonsense"):
        svdq.producer.nonsense  # type: ignore[attr-defined]  # noqa: B018


def test_documented_fields_exist() -> None:
    for name in ("Submission", "JobView"):
        table = re.search(rf"^\| `{name}` \|.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
        assert table is not None
        fields = re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in table[0].splitlines()[2:] if line))
        assert fields
        assert [
            field
            for field in fields
            if not hasattr(getattr(svdq.producer, name), field)
            and field not in getattr(svdq.producer, name).__dataclass_fields__
        ] == []


def test_the_package_imports_nothing_before_it_is_used() -> None:
    code = (
        "import sys, svdq.producer; assert 'pydantic' not in sys.modules and 'redis' not in sys.modules; "
        "svdq.producer.submit; assert 'rq' in sys.modules; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
