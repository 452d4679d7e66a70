"""Names of upscaled copies: they say so, unless the files of an earlier version have the video's name."""

import pytest
import redis

from svdq.producer.job import Job, parse_job
from svdq.producer.records import TAKEN_NOTE, Sidecar
from svdq.producer.results.finished_videos import find_results
from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.entries import Submission
from svdq.producer.submitting.finishing import submit_finishing
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.sources import PhotoRequest
from tests.finished import add_video


def upscaled(settings: Settings, job_id: str, upscale: str, **spec: object) -> Submission:
    [result] = find_results(Storage(settings.storage), job_ids=[job_id])
    wanted = JobSpec(drafts=(Draft(upscale=upscale),), **spec)  # type: ignore[arg-type]
    [submission] = submit_finishing(settings, [PhotoRequest(result=result, spec=wanted)])
    return submission


def put(storage: Storage, job_id: str, job: Job, **others: object) -> None:
    """Put the files of a finished copy into the storage."""
    outputs = tuple(job.output_keys(job_id).values())
    for key in outputs:
        storage.write_bytes(key, b"a video")
    document = Sidecar(svdq="1", job_id=job_id, job=job.model_dump(mode="json"), outputs=outputs, **others)
    storage.write_text(job.sidecar_key(job_id), document.text)


def test_copies_are_named_after_how_they_are_upscaled(
    settings: Settings, storage: Storage, connection: redis.Redis
) -> None:
    made = add_video(storage, 1, name="cup", folder="trip")
    twice, wide = upscaled(settings, made, "2"), upscaled(settings, made, "1920x1080")
    assert [(each.job.folder, each.job.name) for each in (twice, wide)] == [
        ("trip", "cup-2x"),
        ("trip", "cup-1920x1080"),
    ]
    assert upscaled(settings, made, "2").id == twice.id
    assert upscaled(settings, made, "1.5", name="{photo}-big").job.name == "cup-big"

    put(storage, twice.id, twice.job)
    assert upscaled(settings, twice.id, "4").job.name == "cup-4x"
    long = add_video(storage, 2, name="ü" * 90)
    assert len(upscaled(settings, long, "2").job.name.encode()) < 200


def test_a_copy_of_an_earlier_version_keeps_id_and_name(settings: Settings, storage: Storage) -> None:
    made = add_video(storage, 1, name="cup")
    [result] = find_results(storage, job_ids=[made])
    values = result.document.job | {"upscale": "2", "finishes": f"cup-{made}"}
    before = parse_job(values)
    job_id = before.digest(seed_was_drawn=False)
    put(storage, job_id, before)
    again = upscaled(settings, made, "2")
    assert (again.id, again.job) == (job_id, before)


@pytest.mark.parametrize(("taken", "folder"), [("2024-05-31T23:30:00+09:00", "2024-05"), ("", "undated")])
def test_the_day_of_the_photo_is_kept(settings: Settings, storage: Storage, taken: str, folder: str) -> None:
    made = add_video(storage, 1, name="cup")
    [result] = find_results(storage, job_ids=[made])
    put(storage, made, parse_job(result.document.job), taken=taken)
    copy = upscaled(settings, made, "2", folder="{taken:%Y-%m}")
    assert copy.job.folder == folder
    assert copy.entry.notes.get(TAKEN_NOTE, "") == taken
