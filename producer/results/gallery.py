"""Writes the gallery: one static HTML page of finished videos and failed jobs that opens from disk.

File names and sidecars are untrusted input, so all text is escaped.
"""

import base64
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from PIL import ImageOps

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.pipeline.media.image import open_photo, pillow_without_limits
from svdq.producer.job import INPUT_KEY
from svdq.producer.results import pages
from svdq.producer.results.pages import text
from svdq.producer.results.results import Result
from svdq.producer.status.status import JobView
from svdq.producer.storage.storage import Storage
from svdq.producer.text import count

#: Media types of the files that a page can play, by extension; the type that plays best comes first.
TYPES = {"mp4": "video/mp4", "webp": "image/webp", "gif": "image/gif"}
#: Length of the longer side of stills in the page, in pixels.
STILL_SIDE = 480
#: Largest picture for which a still is made, in pixels.
MAX_PIXELS = 100_000_000
#: Largest total size of embedded videos in bytes: browsers fail on larger pages.
MAX_EMBEDDED = 500 * 2**20
#: Placeholder for the cards while the rest of the page is rendered.
_MARK = "<!-- cards -->"


@dataclass(frozen=True, kw_only=True)
class Links:
    """Creates the links from a page to the files of a storage."""

    storage: Storage
    #: Where the page will be.
    page: Path
    #: Whether the page embeds the files' content.
    embed: bool

    def to(self, key: str) -> str:
        """Return the percent-encoded link to a file, relative to the page."""
        folder = self.storage.folder
        if folder is None:
            return quote(self.storage.location(key), safe="/:")
        return quote(os.path.relpath(folder / key, self.page.absolute().parent))

    def media(self, key: str, media_type: str) -> str:
        """Return the link to a file, or its content as a data URL."""
        return _data_url(self.storage.read(key), media_type) if self.embed else self.to(key)


def write_gallery(
    page: Path,
    storage: Storage,
    results: Sequence[Result],
    failures: Sequence[JobView],
    *,
    title: str,
    embed: bool = False,
) -> None:
    """Write the page: failures first, then videos, newest first.

    Args:
        page: the file; links to videos are relative to it.
        storage: where the results are; a local folder unless the videos are embedded.
        results: finished videos.
        failures: failed jobs.
        title: of the page.
        embed: embed the videos in the page.

    Raises:
        InputError: the page cannot be written, would be too large, or could not link to its videos.
        UnavailableError: the storage cannot be reached.
    """
    if not embed and storage.folder is None:
        raise InputError(
            f"The storage {storage.shown!r} is not on this machine, so a page cannot link to its videos: bring them "
            "here with `svdq fetch --all --output DIR` and give that folder, or give --embed."
        )
    size = sum(result.size for result in results)
    if embed and size > MAX_EMBEDDED:
        raise InputError(
            f"With --embed the page would have {size / 2**20:,.0f} MiB of videos, more than browsers open "
            f"({MAX_EMBEDDED / 2**20:.0f} MiB); select fewer with --since or --limit, or leave --embed out."
        )
    links = Links(storage=storage, page=page, embed=embed)
    summary = f"{count(len(results), 'video')}, {count(len(failures), 'failure')}."
    around = pages.fill_page(
        "gallery.html", title=text(title), summary=text(summary), cards=_MARK, **pages.script()
    ).partition(_MARK)
    pages.write(page, _parts(around[0], _cards(links, results, failures), around[2]))


def _parts(head: str, cards: Iterator[str], tail: str) -> Iterator[str]:
    yield head
    yield from cards
    yield tail


def _cards(links: Links, results: Sequence[Result], failures: Sequence[JobView]) -> Iterator[str]:
    for view in failures:
        yield _card(
            links,
            view.id,
            view.parameters,
            state="failed",
            remarks=f'<p class="reason">Failed: {text(view.error)}</p><p>{_time("submitted", view.created_at)}</p>',
        )
    for result in sorted(results, key=lambda result: result.finished_at, reverse=True):
        parameters = result.document["job"]
        notice = f'<p class="notice">{text(result.notice)}</p>' if result.notice else ""
        seed = text(f"seed {parameters.get('seed', '?')}")
        facts = [_time("finished", result.finished_at), seed, *_file_links(links, result)]
        yield _card(
            links,
            result.job_id,
            parameters,
            state="finished",
            frame=_frame(links, result),
            remarks=f"{notice}<p>{' · '.join(facts)}</p>",
        )


def _card(
    links: Links, job_id: str, parameters: Mapping[str, Any], *, state: str, remarks: str, frame: str = ""
) -> str:
    """Render the card of one job; `remarks` and `frame` are HTML."""
    name = str(parameters.get("name", "?"))
    rows = [("job", job_id), *((key, value) for key, value in parameters.items() if key != "name")]
    return pages.fill(
        "card.html",
        state=state,
        search=text(f"{name} {job_id}".lower()),
        anchor=text(f"job-{job_id}"),
        name=text(name),
        frame=frame,
        remarks=remarks,
        photo=_photo(links, name, str(parameters.get("image", ""))),
        parameters="".join(f"<dt>{text(key)}</dt><dd>{text(_words(value))}</dd>" for key, value in rows),
    )


def _frame(links: Links, result: Result) -> str:
    """Render the video of a card; "" if it cannot be shown."""
    by_type = {key.rpartition(".")[2]: key for key in result.outputs}
    kind = next((kind for kind in TYPES if kind in by_type), None)
    # A folder of frames cannot be played: show its first frame.
    key = by_type[kind] if kind else result.files[0].key
    if kind == "mp4":
        media = (
            f'<video data-src="{text(links.media(key, TYPES[kind]))}" muted loop playsinline preload="none"></video>'
        )
    else:
        still = _still(links.storage, key)
        if not still:
            return ""
        moving = f' data-src="{text(links.media(key, TYPES[kind]))}"' if kind else ""
        media = f'<img src="{still}"{moving} alt="First frame of {text(result.name)}">'
    label = f'class="frame" aria-label="Play {text(result.name)}"'
    if links.embed:
        return f'<button type="button" {label}>{media}</button>'
    return f'<a {label} href="{text(links.to(key))}">{media}</a>'


def _file_links(links: Links, result: Result) -> list[str]:
    if links.embed:
        return []
    words = {key: key.rpartition(".")[2] for key in result.outputs}
    # The id in a name is hexadecimal, so in a name without an extension any dot comes before the id.
    return [
        f'<a href="{text(links.to(key))}">{text(word if word in TYPES else "frames")}</a>'
        for key, word in words.items()
    ]


def _photo(links: Links, name: str, image: str) -> str:
    """Render the photo of a video, if it still exists."""
    if not INPUT_KEY.fullmatch(image) or not links.storage.exists(image):
        return ""
    alt = f"Source photo of {text(name)}"
    if links.embed:
        still = _still(links.storage, image)
        return f'<img src="{still}" alt="{alt}">' if still else ""
    link = text(links.to(image))
    return f'<a href="{link}"><img loading="lazy" src="{link}" alt="{alt}"></a>'


def _still(storage: Storage, key: str) -> str:
    """Return a small JPEG of the first frame of a picture as a data URL; "" if it cannot be read."""
    try:
        data = storage.read(key)
        with pillow_without_limits(), open_photo(data) as image:
            if image.width * image.height > MAX_PIXELS:
                return ""
            image.draft("RGB", (STILL_SIDE, STILL_SIDE))
            still = ImageOps.exif_transpose(image.convert("RGB"))
        still.thumbnail((STILL_SIDE, STILL_SIDE))
        jpeg = io.BytesIO()
        still.save(jpeg, "JPEG", quality=75)
    except UnavailableError:
        raise
    except Exception:  # noqa: BLE001 - Pillow's decoders raise many types; the card then has no picture
        return ""
    return _data_url(jpeg.getvalue(), "image/jpeg")


def _data_url(data: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def _time(word: str, moment: datetime) -> str:
    local = moment.astimezone()
    return f'<time datetime="{local.isoformat(timespec="seconds")}">{word} {local:%Y-%m-%d %H:%M}</time>'


def _words(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "default" if value is None else str(value)
