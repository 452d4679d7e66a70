"""Photos and the videos to make of them: found photos, or rows of a list in csv or JSON lines."""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.known_model import NOT_KNOWN, Expected
from svdq.producer.job import PARAMETER_KEYS
from svdq.producer.settings import given_path
from svdq.producer.submitting.draft import as_text, read_draft, read_then
from svdq.producer.submitting.job_spec import NO_OPTIONS, JobSpec
from svdq.producer.submitting.parameters import FIELDS, as_flag, as_key, no_such
from svdq.producer.submitting.sources import PhotoRequest, Sources, as_stored
from svdq.producer.text import parse_future

OWN_COLUMNS = ("photo", "last", "then", "priority", "at", "name", "output")
COLUMNS = frozenset([*OWN_COLUMNS, *FIELDS])

#: A first line for Excel, which names the separator.
_SEPARATOR = re.compile(r'"?sep=([,;\t])"?\r?', re.IGNORECASE)

ListRow = tuple[int, Mapping[str, Any] | InputError]  # first line of a row, and its columns or why it is bad


def requests_for(sources: Sources, spec: JobSpec, last: Path | None = None) -> list[PhotoRequest]:
    """Ask for the same videos of each photo, in folders like its own; `last` is for photos without a last frame."""

    @cache
    def spec_of(below: str, *, has_last: bool) -> JobSpec:
        placed = spec.below(below) if below else spec
        return placed.with_last_photo() if has_last else placed

    if pair := next((photo for photo in sources.photos if photo.last), None):
        named = f"The last frame {str(pair.last)!r}"
        spec.with_last_photo().check(lambda field: named if field == "last_image" else as_flag(field))
    lasts = [photo.last or last for photo in sources.photos]
    return [
        replace(photo, spec=spec_of(photo.below, has_last=own is not None), last=own)
        for photo, own in zip(sources.photos, lasts, strict=True)
    ]


def read_batch(
    path: Path,
    now: Callable[[], datetime],
    defaults: JobSpec = NO_OPTIONS,
    expect: Callable[[str], Expected] = lambda _: NOT_KNOWN,
) -> list[PhotoRequest | InputError]:
    """Return a request for each row of a list, or why it is invalid; raises InputError if it has no rows.

    `now` returns the time from which times in rows count, and `expect` what is expected of the model of a name.
    """
    read_rows = READERS.get(path.suffix.lower())
    if read_rows is None:
        raise InputError(f"{str(path)!r} is not a list of photos; give a file that ends in {' or '.join(READERS)}.")
    requests: list[PhotoRequest | InputError] = []
    specs: dict[JobSpec, JobSpec] = {}
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"The list {str(path)!r} is not UTF-8; save it as UTF-8 (in Excel: CSV UTF-8).") from error
    except OSError as error:
        raise InputError(f"The list {str(path)!r} cannot be read ({error.strerror}); check its path.") from error
    try:
        for line, row in read_rows(text):
            where = f"{path.name}, line {line}: "
            try:
                photo, last, spec = _parse(row, now, defaults, expect)
                image = as_stored(given_path(photo, path.parent))
                own = as_stored(given_path(last, path.parent)) if last else None
            except InputError as error:
                requests.append(InputError(f"{where}{error}"))
            else:
                spec = specs.setdefault(spec, spec)  # rows that ask for the same share one
                requests.append(PhotoRequest(path=image, spec=spec, where=where, last=own))
    except InputError as error:  # in a line, which makes the rest of the file unreadable
        raise InputError(f"{path.name}, {error}") from error
    if not requests:
        raise InputError(f"There are no rows in {str(path)!r}; give one for each photo.")
    return requests


def _parse(
    row: Mapping[str, Any] | InputError,
    now: Callable[[], datetime],
    defaults: JobSpec,
    expect: Callable[[str], Expected],
) -> tuple[str, str, JobSpec]:
    if isinstance(row, InputError):
        raise row
    row = {_column(name): value for name, value in row.items()}
    values = {name: value for name, value in row.items() if value is not None}
    then = values.pop("then", "")
    texts = {name: as_text(name, value, name).strip() for name, value in values.items()}
    given = {name: text for name, text in texts.items() if text}
    if "photo" not in given:
        raise InputError("The row names no photo; give its path in the column photo.")
    draft = read_draft({name: text for name, text in given.items() if name not in OWN_COLUMNS})
    drafts = (each.overridden(draft) for each in defaults.drafts)
    spec = replace(
        defaults,
        drafts=tuple(dict.fromkeys(drafts)),  # a row may make sets of a sweep the same
        expected=expect(draft.model) if draft.model is not None else defaults.expected,
        priority=given.get("priority", defaults.priority),
        name=given.get("name", defaults.name),
        at=parse_future(given["at"], "at", now()) if "at" in given else defaults.at,
        then=read_then(then, "then") if then else defaults.then,
    )
    if "output" in given:
        spec = spec.with_output(given["output"])
    if "last" in given:
        spec = spec.with_last_photo()
    spec.check(spell=as_key)
    return given["photo"], given.get("last", ""), spec


def _column(name: str) -> str:
    """Return the name of a column, which may have capital letters and hyphens; raises InputError if there is none."""
    column = name.strip().lower().replace("-", "_")
    if column not in COLUMNS:
        raise InputError(no_such("column", name.strip(), (*OWN_COLUMNS, *PARAMETER_KEYS)))
    return column


def _csv_rows(text: str) -> Iterator[ListRow]:
    # Spreadsheets separate by semicolons where the decimal separator is a comma; pasted cells are separated by tabs.
    header = text.partition("\n")[0]
    separator = _SEPARATOR.fullmatch(header)
    delimiter = separator[1] if separator else max(",;\t", key=header.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    names: list[str] | None = None
    if separator:
        next(reader)
    line = reader.line_num + 1
    try:
        for cells in reader:
            if names is None:
                try:
                    names = [_column(cell) if cell.strip() else "" for cell in cells]
                except InputError as error:
                    raise InputError(f"line {line}: {error} The first line names the columns.") from error
                named = list(filter(None, names))
                if len(set(named)) < len(named):
                    raise InputError(f"line {line}: The first line names a column twice; name each column once.")
            elif len(cells) > len(names):
                yield line, InputError(f"The row has {len(cells)} cells for {len(names)} columns; add quotes.")
            elif any(cell.strip() for cell in cells):
                row = zip(names, cells, strict=False)
                yield line, {name: cell for name, cell in row if name or cell.strip()}
            line = reader.line_num + 1
    except csv.Error as error:
        raise InputError(f"line {line}: The line is not valid csv ({error}); close the quotation marks.") from error


def _jsonl_rows(text: str) -> Iterator[ListRow]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                yield number, InputError(f"The line is not valid JSON ({error}); write one object on each line.")
                continue
            is_row = isinstance(row, dict)
            yield number, row if is_row else InputError('The line is not an object such as {"photo": "a.jpg"}.')


READERS: dict[str, Callable[[str], Iterator[ListRow]]] = {".csv": _csv_rows, ".jsonl": _jsonl_rows}
