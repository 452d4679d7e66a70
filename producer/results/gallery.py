"""Writes the gallery: one static HTML page that opens from disk. Jinja escapes all text, which is untrusted."""

import base64
import contextlib
import hashlib
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined

from svdq.pipeline.errors import InputError
from svdq.producer.files import write_file
from svdq.producer.job import INPUT_KEY
from svdq.producer.results.finished_videos import Result
from svdq.producer.results.poster import poster_of_picture
from svdq.producer.status.job_view import JobView
from svdq.producer.storage.storage import Storage
from svdq.producer.text import count

#: Media types of the files that a page can play, by extension; the type that plays best comes first.
TYPES = {"mp4": "video/mp4", "webp": "image/webp", "gif": "image/gif"}
BROWSER_SUFFIXES = ("jpg", "png", "webp", "avif", "gif", "bmp")  # shown by all browsers; others get stills
_GENERATOR = b'<meta name="generator" content="svdq '  # in the template
#: Fields of a job that are no choice about its video, or that a card shows anyway.
_OWN = ("name", "folder", "formats", "decode_chunk_size", "seed")


@dataclass(frozen=True, kw_only=True)
class PageLinks:
    """Creates the links from a page to the files of a storage."""

    storage: Storage
    page: Path

    def to(self, key: str) -> str:
        """Return the percent-encoded link to a file, relative to the page."""
        assert self.storage.folder is not None
        return quote(os.path.relpath(self.storage.folder / key, self.page.absolute().parent))


def write_gallery(
    page: Path, storage: Storage, results: Sequence[Result], failures: Sequence[JobView], *, title: str
) -> None:
    """Write failures, then videos, newest first; raises InputError."""
    if storage.folder is None:
        raise InputError(
            f"The storage {storage.shown!r} is not on this machine, so a page cannot link to its videos: bring them "
            "here with `svdq fetch --all --output DIR` and give that folder."
        )
    _check_ours(page)
    environment = Environment(
        loader=PackageLoader("svdq.producer.results"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    links = PageLinks(storage=storage, page=page)
    differing = _differing(results)
    parts = environment.get_template("gallery.html").generate(
        version=version("svdq"),
        title=title,
        summary=f"{count(len(results), 'video')}, {count(len(failures), 'failure')}.",
        # Rendered one by one, since there may be thousands.
        cards=itertools.chain(
            (_failure_card(links, view) for view in failures),
            (_video_card(links, result, differing) for result in results),
        ),
        **_code(environment),
    )
    write_file(page, parts)


def _check_ours(page: Path) -> None:
    """Raise InputError if there is a file that is no gallery, which would be replaced."""
    if page.is_file() and page.stat().st_size:
        with page.open("rb") as file:
            if _GENERATOR not in file.read(4096):
                raise InputError(f"The file {str(page)!r} is no page of `svdq gallery`; give another with --output.")


def _code(environment: Environment) -> dict[str, str]:
    values: dict[str, str] = {}
    for name, file in (("style", "page.css"), ("script", "gallery.js")):
        text = environment.get_template(file).render()
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        values |= {name: text, f"{name}_hash": f"sha256-{digest}"}
    return values


def _differing(results: Sequence[Result]) -> dict[str, list[str]]:
    """Return the parameters in which the videos of each photo differ, by the photo's key."""
    values: dict[str, dict[str, set[str]]] = {}
    for result in results:
        job = result.document.job
        of_photo = values.setdefault(str(job.get("image", "")), {})
        for name, value in job.items():
            of_photo.setdefault(name, set()).add(_words(value))
    return {
        image: [name for name, found in of_photo.items() if len(found) > 1 and name not in _OWN]
        for image, of_photo in values.items()
    }


def _failure_card(links: PageLinks, view: JobView) -> dict[str, Any]:
    return _card(links, view.id, view.parameters, view.source) | {
        "state": "failed",
        "reason": view.error,
        "submitted_at": view.created_at.astimezone(),
    }


def _video_card(links: PageLinks, result: Result, differing: Mapping[str, list[str]]) -> dict[str, Any]:
    # The id in a name is hexadecimal, so in a name without an extension any dot comes before the id.
    words = {key: key.rpartition(".")[2] for key in result.outputs}
    job = result.document.job
    names = differing.get(str(job.get("image", "")), [])
    return _card(links, result.job_id, job, result.document.source) | {
        "state": "finished",
        "differs": ", ".join(f"{name} {_words(job.get(name))}" for name in names),
        "notice": result.document.model.notice,
        "finished_at": result.finished_at.astimezone(),
        "seed": job.get("seed", "?"),
        "frame": _frame(links, result),
        "files": [(word if word in (*TYPES, "wav") else "frames", links.to(key)) for key, word in words.items()],
    }


def _card(links: PageLinks, job_id: str, parameters: Mapping[str, Any], source: str) -> dict[str, Any]:
    name = str(parameters.get("name", "?"))
    rows = [
        ("job", job_id),
        *([("source", source)] if source else []),
        *((key, _words(value)) for key, value in parameters.items() if key != "name"),
    ]
    photo, prompt = _photo(links, str(parameters.get("image", ""))), str(parameters.get("prompt") or "")
    shown = {"name": name, "prompt": prompt, "photo": photo, "source": source or name}
    return shown | {"id": job_id, "image": str(parameters.get("image", "")), "rows": rows, "frame": None, "differs": ""}


def _frame(links: PageLinks, result: Result) -> dict[str, str] | None:
    """Return the links to the video of a card, its still and its file; None if it cannot be shown."""
    by_type = {key.rpartition(".")[2]: key for key in result.outputs}
    kind = next((kind for kind in TYPES if kind in by_type), None)
    # A folder of frames cannot be played: show its first frame.
    key = by_type[kind] if kind else next(entry.key for entry in result.files if not entry.key.endswith(".wav"))
    link = links.to(key)
    if kind == "mp4":
        return {"video": link, "still": "", "moving": "", "link": link}
    still = _still(links.storage, key)
    return {"video": "", "still": still, "moving": link if kind else "", "link": link} if still else None


def _photo(links: PageLinks, image: str) -> dict[str, str] | None:
    if not INPUT_KEY.fullmatch(image) or not links.storage.exists(image):
        return None
    source = links.to(image) if image.endswith(BROWSER_SUFFIXES) else _still(links.storage, image)
    return {"source": source, "link": links.to(image)} if source else None


def _still(storage: Storage, key: str) -> str:
    for _, data in storage.read_many([key]):
        with contextlib.suppress(InputError):
            return f"data:image/jpeg;base64,{base64.b64encode(poster_of_picture(data)).decode()}"
    return ""


def _words(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "default" if value is None else str(value)
