"""Reads what is to be made of a photo from the fields of the page's form."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from svdq.cli.serve.form import label_of
from svdq.pipeline.errors import InputError
from svdq.producer.job import VIDEO_FIELDS
from svdq.producer.status.estimates import Estimate, Waiting, estimate_all, with_more
from svdq.producer.status.snapshot import Snapshot
from svdq.producer.submitting.job_spec import JobSpec, read_folder
from svdq.producer.submitting.options import SubmitOptions, make_job, read_field
from svdq.producer.timeparse import parse_future

#: Fields besides the parameters of a video.
OWN_FIELDS = ("variations", "priority", "folder", "at")


def read_spec(given: Mapping[str, str]) -> JobSpec:
    """Read a form; missing fields have their defaults.

    Raises:
        InputError: a field or a value is not allowed.
    """
    values = {name: text for name, text in given.items() if text.strip()}
    at = values.get("at")
    spec = JobSpec(
        options=(read_options({name: text for name, text in values.items() if name not in OWN_FIELDS}),),
        variations=_whole(values.get("variations", "1"), "Videos of each photo"),
        priority=values.get("priority", "default"),
        folder=read_folder(values.get("folder", "")),
        at=None if at is None else parse_future(at, "Time", datetime.now().astimezone()),
    )
    spec.check(label_of)
    return spec


def read_options(given: Mapping[str, str]) -> SubmitOptions:
    """Read the parameters of a video; raises as `read_spec`."""
    unknown = set(given).difference(VIDEO_FIELDS, ["auto_size"])
    if unknown:
        raise InputError(f"There is no setting {min(unknown)[:80]!r}; load the page again.")
    found: dict[str, Any] = {}
    for name, text in given.items():
        if name == "auto_size":
            found |= {"auto_size": True} if text == "yes" else {}
        else:
            found |= read_field(name, text, label_of(name))
    return SubmitOptions(**found)


def estimate_of(snapshot: Snapshot, spec: JobSpec, num_videos: int, now: datetime) -> Estimate:
    """Estimate when videos that are not queued yet will be done, after all that waits already."""
    parameters = make_job(spec.options[0], image=f"inputs/{'0' * 64}.jpg", name="photo").model_dump(mode="json")
    common = (snapshot.groups, snapshot.pauses, snapshot.no_group)
    if spec.at is None:
        jobs = [job for job in snapshot.jobs if job.is_readable]
        return estimate_all(jobs, with_more(snapshot.waiting, parameters, num_videos), *common)
    alone = estimate_all([], with_more(Waiting(), parameters, num_videos), *common)
    if alone.eta_s is None:
        return alone
    begin_s = max(0.0, (spec.at - now).total_seconds(), snapshot.estimate.eta_s or 0.0)
    return Estimate(eta_s=begin_s + alone.eta_s)


def _whole(text: str, called: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise InputError(f"{called} {text[:80]!r} is not allowed: it must be a whole number, such as 3.")
    return int(text)
