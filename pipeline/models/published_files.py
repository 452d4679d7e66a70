"""Sizes of weights files that are not here: of those that presets name as published, of others by their names."""

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path


@cache
def published_sizes() -> Mapping[str, int]:
    """Return about how many bytes the files have that presets name, by `owner/name:file`."""
    text = Path(__file__).with_name("published_files.toml").read_text(encoding="utf-8")
    return {
        f"{repository}:{file}": round(gigabytes * 10**9)
        for repository, files in tomllib.loads(text).items()
        for file, gigabytes in files.items()
    }


#: Bits of a weight by the format in the name of a file; files of the K types of GGUF have blocks of several types.
_BITS = {
    "mxfp8": 8.25, "fp8": 8, "e4m3": 8, "e5m2": 8, "int8": 8, "fp4": 4.5, "w4a4": 4,
    "q8_0": 8.5, "q6_k": 6.57, "q5_k": 5.6, "q5_1": 6, "q5_0": 5.5,
    "q4_k": 4.8, "q4_1": 5, "q4_0": 4.5, "q3_k": 3.9, "q2_k": 3,
}  # fmt: skip
_FORMAT = re.compile("|".join(_BITS))


def quantized_bits(name: str) -> float | None:
    """Return the bits of a weight in a file whose name says that it is quantized; None for other names."""
    found = _FORMAT.search(name.lower())
    return _BITS[found[0]] if found else None
