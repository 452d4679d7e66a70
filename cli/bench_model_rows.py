"""The rows of `svdq bench model`: read from its JSON file, as sentences and as a table."""

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from svdq.pipeline.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from svdq.pipeline.bench.cases import Case, Row


def kept_rows(path: Path, document: dict[str, Any]) -> "list[Row]":
    """Read the rows of an earlier run; an empty list without a file.

    Raises:
        InputError: the file has other content, or its rows were measured with other options.
    """
    from pydantic import TypeAdapter, ValidationError

    from svdq.pipeline.bench.cases import Row

    if not path.exists():
        return []
    try:
        kept = TypeAdapter(dict[str, Any]).validate_json(path.read_text(encoding="utf-8"))
        rows = TypeAdapter(list[Row]).validate_python(kept.pop("rows", None))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise InputError(f"The file {str(path)!r} has no rows of svdq bench model; leave --resume out.") from error
    for name, value in document.items():
        if kept.get(name) != value:
            raise InputError(
                f"The rows in {str(path)!r} were measured with {name} {kept.get(name)!r}, not {value!r}; give another "
                "file, or leave --resume out."
            )
    return rows


def case_of(row: "Row") -> "Case":
    """Return the case that a row measures."""
    from svdq.pipeline.bench.cases import Case

    return Case(**{field.name: getattr(row, field.name) for field in fields(Case)})


def sentence(row: "Row") -> str:
    """Describe a row with its time, or with the reason why it has none."""
    how = " ".join(str(word) for word in (row.dtype, *_way(row), *_chunk(row)))
    what = f"{_part(row)} at {row.width}x{row.height} ({how})"
    return f"{what} cannot be measured: {row.failure}" if row.failure else f"{what}: {row.seconds:.4g} s"


def _part(row: "Row") -> str:
    return f"{row.part} {row.component}" if row.component else row.part


def _way(row: "Row") -> list[str]:
    return [f"compiled {row.compiled}"] * (row.compiled != "off") + list(row.approximate)


def _chunk(row: "Row") -> list[str]:
    return [] if row.decode_chunk_size is None else [f"{row.decode_chunk_size} frames at a time"]


def rows_table(rows: "Sequence[Row]") -> list[list[object]]:
    """Return the cells of a table of rows, with its head."""
    head: list[object] = ["part", "size", "dtype", "options", "chunk", "time (s)", "spread", "first (s)", "GiB"]
    found = [[*head, "difference", "mean"]]
    for row in rows:
        gib = f"{row.weight_bytes / 2**30:.2f}"
        found.append([
            _part(row),
            f"{row.width}x{row.height}",
            row.dtype,
            " ".join(_way(row)),
            row.decode_chunk_size or "",
            f"{row.seconds:.4g}",
            f"{min(row.all_s):.4g} to {max(row.all_s):.4g}",
            f"{row.first_s:.3g}",
            gib if row.peak_bytes is None else f"{gib} + {row.peak_bytes / 2**30:.2f}",
            *(
                "not finite" if not row.finite else "" if value is None else f"{value:.1e}"
                for value in (row.difference, row.mean_difference)
            ),
        ])  # fmt: skip
    return found
