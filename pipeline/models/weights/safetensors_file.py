"""Reads safetensors files: the header alone, and each tensor where it is used. Does not import torch.

The library safetensors maps a whole file as writable memory, which Linux refuses for one that is larger than its own.
"""

import json
import math
import mmap
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

#: Reserves no memory for pages that may be written: Linux refuses to reserve more than it has.
_MAP_NORESERVE: Final = 0x4000 if sys.platform == "linux" else 0
_MAX_HEADER_BYTES: Final = 100_000_000  # the library's own limit
#: By safetensors' names of dtypes, the bits of a number and torch's name.
DTYPES_IN_FILES: Final = {
    "BOOL": (8, "bool"),
    "U8": (8, "uint8"),
    "I8": (8, "int8"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "U16": (16, "uint16"),
    "I16": (16, "int16"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "U32": (32, "uint32"),
    "I32": (32, "int32"),
    "F32": (32, "float32"),
    "U64": (64, "uint64"),
    "I64": (64, "int64"),
    "F64": (64, "float64"),
    "C64": (64, "complex64"),
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor in a file, as the header describes it."""

    dtype: str  # by safetensors' name, such as F8_E4M3
    shape: tuple[int, ...]
    start: int  # place of its first byte in the file
    num_bytes: int

    @property
    def is_float(self) -> bool:
        """Whether its numbers are floating-point ones of at least two bytes."""
        return self.dtype in ("F16", "BF16", "F32", "F64")


@dataclass(frozen=True, kw_only=True)
class SafetensorsFile:
    """An open file whose header has been read."""

    path: Path
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]  # what the header has beside the tensors

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read the header of a file; raises OSError, or ValueError if it is none or is cut off."""
        size = path.stat().st_size
        with path.open("rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
            if not 2 <= num_bytes <= min(_MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"it has {size:,} bytes, and its header would have {num_bytes:,}")
            try:
                header = json.loads(file.read(num_bytes))
            except (ValueError, RecursionError) as error:
                raise ValueError("its header is no JSON") from error
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        metadata = header.pop("__metadata__", None) or {}
        found = {name: _entry(name, written, 8 + num_bytes) for name, written in header.items()}
        for name, entry in found.items():
            if entry.start + entry.num_bytes > size:
                raise ValueError(f"it ends before {name}")
        return cls(path=path, entries=found, metadata=metadata if isinstance(metadata, dict) else {})

    def bytes_of(self, name: str) -> bytes:
        """Read the bytes of a tensor."""
        entry = self.entries[name]
        with self.path.open("rb") as file:
            file.seek(entry.start)
            return file.read(entry.num_bytes)

    @cached_property
    def mapped(self) -> mmap.mmap:
        """The whole file as memory; what is written to it stays there."""
        with self.path.open("rb") as file:
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE, prot=protection)


def _entry(name: str, written: Any, data_start: int) -> Entry:
    """Return the entry of a header; raises ValueError if it contradicts itself."""
    try:
        dtype, shape, (start, stop) = written["dtype"], tuple(written["shape"]), written["data_offsets"]
        bits, _ = DTYPES_IN_FILES[dtype]
        is_whole = all(type(each) is int and each >= 0 for each in (*shape, start, stop))
        is_valid = is_whole and bits * math.prod(shape) == 8 * (stop - start)
    except (KeyError, TypeError, ValueError):
        is_valid = False
    if not is_valid:
        raise ValueError(f"its header has {name} as {written!r:.120}")
    return Entry(dtype=dtype, shape=shape, start=data_start + start, num_bytes=stop - start)
