"""Prints the oldest versions that pyproject.toml names, for pip: of everything, with all extras together."""

import re
import tomllib
from pathlib import Path

project = tomllib.loads(Path(__file__).parent.parent.joinpath("pyproject.toml").read_text())["project"]
requirements = [
    *project["dependencies"],
    *(each for extra in project["optional-dependencies"].values() for each in extra),
]
oldest: dict[str, str] = {}
for requirement in requirements:
    if found := re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", requirement):
        name, version = found.groups()
        oldest[name] = max(version, oldest.get(name, version), key=lambda text: [int(part) for part in text.split(".")])
print("\n".join(f"{name}=={version}" for name, version in sorted(oldest.items())))  # noqa: T201
