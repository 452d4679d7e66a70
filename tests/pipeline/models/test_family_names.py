"""A family is its folder: elsewhere only the registry and examples in help name one. A contract holds imports."""

import re
from collections.abc import Iterator
from pathlib import Path

from svdq.pipeline.models.families import FAMILIES

ROOT = Path(__file__).parents[3]
MODELS = ROOT / "pipeline" / "models"
#: The registry, what a preset was, and commands whose examples need the name of a model.
MAY_NAME = {
    "pipeline/models/families.py",
    "pipeline/models/model_name.py",
    "cli/model.py",
    "cli/plan.py",
    "cli/setup.py",
}
MOST_LINES = 20


def words() -> Iterator[str]:
    """What names a family: its own name, its title, and the classes of its blocks."""
    for family in FAMILIES:
        yield from (family.name, family.parameters.title)
        for layout in family.layouts.values():
            yield from layout.blocks


def test_only_the_registry_and_examples_name_a_family() -> None:
    # SVDQ_ is the prefix of settings; what is WANTED is no family.
    naming = re.compile(rf"(?<![a-zA-Z])(?i:{'|'.join(map(re.escape, words()))})(?![a-zQ]|[A-Z][A-Z])")
    found = []
    for path in sorted(
        path for part in ("cli", "pipeline", "producer", "worker") for path in (ROOT / part).rglob("*.py")
    ):
        if not any(path.is_relative_to(MODELS / family.name) for family in FAMILIES):
            lines = path.read_text(encoding="utf-8").splitlines()
            found += [(str(path.relative_to(ROOT)), line) for line in lines if naming.search(line)]
    assert {path for path, _ in found} == MAY_NAME, [each for each in found if each[0] not in MAY_NAME]
    assert len(found) <= MOST_LINES
