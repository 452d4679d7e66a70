"""`svdq inspect`: show how a video was made."""

import json
from pathlib import Path
from typing import Any

import click

from svdq.cli.formatting import echo, table

EXAMPLES = """\b
Examples:
  svdq inspect video.mp4
  svdq inspect video.json --json
"""


@click.command(epilog=EXAMPLES)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the whole record as JSON.")
def inspect(file: Path, as_json: bool) -> None:
    """Show how a video was made: an mp4, gif, webp or png, a folder of png frames, or the .json beside them."""
    from svdq.producer.results.provenance import notice_of, read_provenance

    record = read_provenance(file)
    if as_json:
        echo(json.dumps(record))
        return
    for line in table(_rows(record, notice_of(record))):
        echo(line)
    echo()
    echo(f"svdq submit --like {file} PHOTO   makes another video with the same parameters and seed")


def _rows(record: dict[str, Any], notice: str) -> list[tuple[str, object]]:
    model = record.get("model") if isinstance(record.get("model"), dict) else {}
    rows: list[tuple[str, object]] = [("made by", f"svdq {record['svdq']}"), ("job", record.get("job_id", "?"))]
    rows.append(("model", f"{(model or {}).get('name', '?')}{f', {notice}' if notice else ''}"))
    compute = (model or {}).get("compute")
    if isinstance(compute, dict):
        rows += [(f"compute {name}", _words(value)) for name, value in compute.items()]
    rows += [(name, _words(value)) for name, value in record["job"].items()]
    for title, field, words in (
        ("seconds", "seconds", _words),
        ("memory", "memory_bytes", _size),
        ("versions", "versions", _words),
    ):
        values = record.get(field)
        if isinstance(values, dict):
            rows += [(f"{title} {name}", words(value)) for name, value in values.items()]
    return rows


def _size(value: object) -> str:
    from svdq.pipeline.models.memory import size_text

    return size_text(value) if isinstance(value, int) else _words(value)


def _words(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "all" if value is None else str(value)
