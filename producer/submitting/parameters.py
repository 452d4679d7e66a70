"""The parameters of videos: their names and fields, and how users spell them."""

import difflib
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from pydantic.fields import FieldInfo

from svdq.producer.job import JOBS, VIDEO_FIELDS

SEED_BITS = 32  # number of bits of random seeds: short enough to type again
MAX_VIDEOS = 10_000  # largest number of videos of one photo in a submission
#: The field of each parameter; of one that several families have, the first.
FIELD_OF: Mapping[str, FieldInfo] = {
    name: field for job in reversed(tuple(JOBS.values())) for name, field in job.model_fields.items()
}
FIELDS = (*VIDEO_FIELDS, "size", "format", "lora")
WITH_PROMPTS = tuple(name for name, job in JOBS.items() if "prompt" in job.model_fields)


@cache
def rules_of(family: str) -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each parameter of a family's videos, without null."""
    rules = {}
    for name, schema in JOBS[family].model_json_schema()["properties"].items():
        values = [each for each in schema.get("anyOf", ()) if each["type"] != "null"]
        rules[name] = (values[0] if values else {}) | schema
    return rules


def as_key(field: str) -> str:
    """Spell a parameter as a column of a list or a key of svdq.toml."""
    return {"formats": "format", "last_image": "last", "loras": "lora"}.get(field, field)


def as_flag(field: str) -> str:
    """Spell a parameter as on the command line."""
    return f"--{as_key(field).replace('_', '-')}"


def no_such(kind: str, name: str, known: Iterable[str]) -> str:
    """Say that there is no such column or key, and which is meant, or else which there are."""
    known = list(known)
    near = difflib.get_close_matches(name.lower(), known, 1, 0.7)
    hint = f"did you mean {near[0]}?" if near else f"the {kind}s are {', '.join(known)}."
    return f"There is no {kind} {shorten(name)!r}; {hint}"


def shorten(value: object) -> str:
    """Format a value from a foreign file for a sentence."""
    text = str(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
