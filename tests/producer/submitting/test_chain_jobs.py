"""Chains as they are submitted, canceled and retried; `tests/worker/test_chains.py` renders them."""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import redis
from PIL import Image

from svdq.pipeline.errors import InputError
from svdq.producer import job_control
from svdq.producer.job import last_frame_key, sound_key
from svdq.producer.queue import fetch, read_job, statuses
from svdq.producer.records import Sidecar
from svdq.producer.results.prune import find_removals, remove_all
from svdq.producer.settings import Settings
from svdq.producer.status import snapshot
from svdq.producer.status.job_view import view
from svdq.producer.status.ranks import IntakeStatus
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.entries import Submission
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.photo_requests import read_batch
from svdq.producer.submitting.sources import PhotoRequest
from svdq.producer.submitting.submission import submit as submit_photos
from svdq.producer.submitting.submission import submit_all
from tests.ranks import COSTS, rank, save

SMALL = {"frames": 5, "steps": 2, "width": 64, "height": 64}


def submit(settings: Settings, photo: Path, *then: str, prompt: str = "A", **spec: object) -> list[Submission]:
    options = Draft(prompt=prompt, **SMALL)
    request = PhotoRequest(path=photo, spec=JobSpec(drafts=(options,), then=then, **spec))
    return list(submit_all(settings, [request]))


def ids_of(made: list[Submission]) -> list[str]:
    return [submission.id for submission in made]


def test_each_link_begins_with_the_last_frame_of_the_one_before(
    connection: redis.Redis, settings: Settings, photo: Path
) -> None:
    made = submit(settings, photo, "B", "C")
    jobs = [read_job(fetch(connection, submission.id)) for submission in made]
    assert [job.prompt for job in jobs] == ["A", "B", "C"]
    assert [job.image for job in jobs[1:]] == [last_frame_key(made[0].id), last_frame_key(made[1].id)]
    assert [job.predecessor for job in jobs] == ["", made[0].id, made[1].id]
    assert {(job.name, job.frames, job.chained) for job in jobs} == {("a photo", 5, True)}
    assert len({job.seed for job in jobs}) == 3
    assert [(each.status, each.link) for each in made] == [
        ("queued", "1 of 3"),
        ("deferred", "2 of 3"),
        ("deferred", "3 of 3"),
    ]
    assert view(connection, made[2].id).after == (made[1].id,)


def test_the_same_chain_is_the_same_jobs_and_a_longer_one_begins_with_them(settings: Settings, photo: Path) -> None:
    made = submit(settings, photo, "B")
    renamed = photo.rename(photo.with_name("other name.jpg"))
    again = submit(settings, renamed, "B")
    assert ids_of(again) == ids_of(made)
    assert not any(each.is_new for each in again)
    longer = submit(settings, renamed, "B", "C")
    assert ids_of(longer)[:2] == ids_of(made)
    assert longer[2].is_new
    assert longer[2].name == "a photo"  # beside the files of the other links
    other = submit(settings, renamed, "D")
    assert (other[0].id, other[0].is_new, other[1].is_new) == (made[0].id, False, True)
    assert ids_of(submit(settings, renamed))[0] not in ids_of(longer)  # a job of its own, which keeps no frame
    assert not {*ids_of(submit(settings, renamed, "B", force=True))} & {*ids_of(made)}


def test_seeds_and_variations_are_those_of_each_chain(connection: redis.Redis, settings: Settings, photo: Path) -> None:
    options = (Draft(prompt="A", seed=7, **SMALL),)
    request = PhotoRequest(path=photo, spec=JobSpec(drafts=options, then=("A",), variations=2, name="{stem}-{index}"))
    made = list(submit_all(settings, [request]))
    assert [each.seed for each in made] == [7, 7, 8, 8]
    assert [each.name for each in made] == ["a photo-1", "a photo-1", "a photo-3", "a photo-3"]
    assert len({*ids_of(made)}) == 4


@pytest.mark.parametrize(
    ("options", "then", "reason"),
    [
        ({"boomerang": True}, "B", "--then and --boomerang cannot be combined"),
        ({"interpolate": 24, "fps": 16}, "B", "--interpolate 24 is no multiple of --fps 16"),
        ({"formats": ("mp4", "gif")}, "B", "--then makes mp4 files only; leave out --format"),
        ({"loop": True}, "B", "--then and --loop cannot be combined"),
        ({"frames": 1}, "B", "--then needs at least 2 --frames"),
        ({}, "B\0", "--then"),
        ({"family": "svd", "prompt": None}, "B", "--then 'B' does not apply to Stable Video Diffusion"),
    ],
)
def test_impossible_chains_are_refused(
    home: Path, settings: Settings, photo: Path, options: dict[str, object], then: str, reason: str
) -> None:
    spec = JobSpec(drafts=(Draft(**{"prompt": "A", **options}),), then=(then,))
    with pytest.raises(InputError, match=reason):
        list(submit_all(settings, [PhotoRequest(path=photo, spec=spec)]))
    assert not home.exists()


def test_a_last_frame_is_that_of_the_last_link(
    connection: redis.Redis, settings: Settings, photo: Path, tmp_path: Path
) -> None:
    Image.new("RGB", (64, 64)).save(last := tmp_path / "last.png")
    options = Draft(seed=1, prompt="A", **SMALL)
    made = submit_photos(settings, photo, options, last_image=last, then=["B", "", "C"])
    jobs = [read_job(fetch(connection, submission.id)) for submission in made]
    assert [(job.prompt, job.seed) for job in jobs] == [("A", 1), ("B", 1), ("", 1), ("C", 1)]
    assert [job.last_image for job in jobs[:3]] == [None] * 3
    assert Storage(settings.storage).read(jobs[3].last_image) == last.read_bytes()
    plain = submit_photos(settings, photo, options, then=["B", "", "C"])
    assert ids_of(plain)[:3] == ids_of(made)[:3]
    assert plain[3].is_new


def test_the_end_of_all_is_not_before_that_of_the_last_link(
    connection: redis.Redis, settings: Settings, photo: Path
) -> None:
    intake = IntakeStatus(worker="w", costs=(COSTS.model_copy(update={"frames": 5, "guided": True}),))
    save(connection, rank(0, intake=intake), rank(1))
    first, _, third = ids_of(submit(settings, photo, "B", "C"))
    ends = snapshot.estimate(connection, [view(connection, third)])
    assert ends[third].eta_s == pytest.approx(3 * ends[first].eta_s)
    taken = snapshot.take(connection)
    assert (taken.waiting.num_jobs, taken.estimate.eta_s) == (3, pytest.approx(ends[third].eta_s))
    job_control.cancel(connection, first)
    assert snapshot.take(connection).waiting.num_jobs == 0


@pytest.mark.parametrize(
    ("name", "text", "prompts"),
    [
        ("a.jsonl", '{"photo": "a photo.jpg", "prompt": "A", "then": ["B  C", ""]}', ["A", "B C", ""]),
        ("a.jsonl", '{"photo": "a photo.jpg", "prompt": "A", "then": "B"}', ["A", "B"]),
        ("a.csv", 'photo,prompt,then\n"a photo.jpg",A,"B\r\nC"\n', ["A", "B", "C"]),
        ("a.csv", "photo,prompt,then\na photo.jpg,A,\n", ["A", "of all"]),
    ],
)
def test_a_list_has_chains(
    connection: redis.Redis, settings: Settings, photo: Path, name: str, text: str, prompts: list[str]
) -> None:
    listed = photo.with_name(name)
    listed.write_text(text)
    requests = read_batch(listed, lambda: datetime.now().astimezone(), JobSpec(then=("of all",)))
    made = list(submit_all(settings, requests))
    assert [read_job(fetch(connection, submission.id)).prompt for submission in made] == prompts


def test_a_list_names_a_chain_that_is_none(photo: Path) -> None:
    listed = photo.with_name("a.jsonl")
    listed.write_text('{"photo": "a photo.jpg", "then": 5}')
    [error] = read_batch(listed, lambda: datetime.now().astimezone())
    assert str(error) == "a.jsonl, line 1: then 5 is not allowed: it must be a prompt, or a list of prompts."


def test_the_prompt_of_a_further_link_decides_the_family(
    connection: redis.Redis, settings: Settings, photo: Path
) -> None:
    made = submit_photos(settings, photo, then="B")
    assert [read_job(fetch(connection, job_id)).prompt for job_id in ids_of(made)] == ["", "B"]
    photo.with_suffix(".txt").write_text("A")
    made = submit_photos(settings, photo, then=["B"])
    assert [read_job(fetch(connection, job_id)).prompt for job_id in ids_of(made)] == ["A", "B"]


def test_models_without_prompts_have_chains_without_prompts(
    connection: redis.Redis, settings: Settings, photo: Path
) -> None:
    spec = JobSpec(drafts=(Draft(family="svd", **SMALL),), then=("", ""))
    made = list(submit_all(settings, [PhotoRequest(path=photo, spec=spec)]))
    assert len({*ids_of(made)}) == 3
    assert {read_job(fetch(connection, job_id)).family for job_id in ids_of(made)} == {"svd"}


# Canceled and retried.


def test_canceling_a_link_ends_the_rest_and_retrying_it_goes_on(
    connection: redis.Redis, settings: Settings, photo: Path
) -> None:
    first, second, third = ids_of(submit(settings, photo, "B", "C"))
    assert list(job_control.cancel_many(connection, [second])) == [(third, "canceled"), (second, "canceled")]
    assert statuses(connection, [first, second, third]) == ["queued", "canceled", "canceled"]
    assert view(connection, third).error == (
        f"Job {second}, an earlier link of its chain, was canceled; `svdq retry {second}` continues the chain."
    )
    assert view(connection, second).error is None

    assert job_control.retry(connection, second) == [second, third]
    assert statuses(connection, [first, second, third]) == ["queued", "deferred", "deferred"]
    assert (view(connection, second).after, view(connection, third).after) == ((first,), (second,))
    assert view(connection, third).error is None


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (2, 0, 1)])
def test_all_links_can_be_canceled_and_retried_at_once(
    connection: redis.Redis, settings: Settings, photo: Path, order: tuple[int, ...]
) -> None:
    links = ids_of(submit(settings, photo, "B", "C"))
    chosen = [links[index] for index in order]
    assert dict(job_control.cancel_many(connection, chosen)) == dict.fromkeys(links, "canceled")
    assert dict(job_control.retry_many(connection, chosen)) == dict.fromkeys(links, "queued")
    assert statuses(connection, links) == ["queued", "deferred", "deferred"]
    assert [view(connection, job_id).after for job_id in links] == [(), (links[0],), (links[1],)]
    job_control.cancel(connection, links[0])
    assert statuses(connection, links) == ["canceled"] * 3
    again = submit(settings, photo, "B", "C")
    assert ids_of(again) == links
    assert statuses(connection, links) == ["queued", "deferred", "deferred"]


def test_a_chain_does_not_end_with_another_of_the_same_beginning(
    connection: redis.Redis, settings: Settings, photo: Path
) -> None:
    first, second = ids_of(submit(settings, photo, "B"))
    other = ids_of(submit(settings, photo, "D"))[1]
    job_control.cancel(connection, second)
    assert statuses(connection, [first, second, other]) == ["queued", "canceled", "deferred"]
    job_control.cancel(connection, first)
    assert statuses(connection, [first, second, other]) == ["canceled"] * 3
    job_control.retry(connection, other)
    assert statuses(connection, [first, other]) == ["queued", "deferred"]


def test_a_job_that_has_ended_ends_no_link(connection: redis.Redis, settings: Settings, photo: Path) -> None:
    first, second = ids_of(submit(settings, photo, "B"))
    connection.hset(f"rq:job:{first}", "status", "finished")
    with pytest.raises(InputError, match="ended already"):
        job_control.cancel(connection, first)
    ((_, outcome),) = job_control.cancel_many(connection, [first])
    assert isinstance(outcome, InputError)
    assert statuses(connection, [second]) == ["deferred"]


def test_last_frame_and_sound_of_a_link_are_kept_while_a_job_begins_with_it(
    connection: redis.Redis, settings: Settings, photo: Path
) -> None:
    first, second = ids_of(submit(settings, photo, "B"))
    storage = Storage(settings.storage)
    for job_id in (first, second):
        for key in (last_frame_key(job_id), sound_key(job_id)):
            storage.write_bytes(key, b"a frame, or a sound")
            os.utime(Path(settings.storage, key), (0, 0))
    found = find_removals(connection, storage, Storage(str(settings.home)), timedelta(days=1), datetime.now(UTC))
    assert sorted(removal.keys for removal in found) == [(last_frame_key(second),), (sound_key(second),)]


def test_the_video_of_a_link_is_kept_while_another_may_continue_it(
    connection: redis.Redis, settings: Settings, photo: Path
) -> None:
    first, second = ids_of(submit(settings, photo, "B"))
    connection.hset(f"rq:job:{first}", "status", "finished")
    storage = Storage(settings.storage)
    job = read_job(fetch(connection, first))
    stem = job.output_stem(first)
    sidecar = Sidecar(svdq="1", job_id=first, job=job.model_dump(mode="json"), outputs=(f"{stem}.mp4",))
    storage.write_text(f"{stem}.json", sidecar.text)
    storage.write_bytes(f"{stem}.mp4", b"a video")

    def removed() -> list[str]:
        later = datetime.now(UTC) + timedelta(days=9)
        found = find_removals(connection, storage, Storage(str(settings.home)), timedelta(days=1), later)
        return [removal.job_id for removal in found if removal.kind == "video"]

    assert removed() == []
    connection.hset(f"rq:job:{second}", "status", "failed")
    assert removed() == []
    connection.hset(f"rq:job:{second}", "status", "finished")
    assert removed() == [first]
    later = datetime.now(UTC) + timedelta(days=9)
    found = find_removals(connection, storage, Storage(str(settings.home)), timedelta(days=1), later)
    # While a person thought about the question, the second link was submitted again.
    connection.hset(f"rq:job:{second}", "status", "queued")
    assert remove_all(connection, [removal for removal in found if removal.kind == "video"]) == []
