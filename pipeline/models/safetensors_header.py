"""Reads the header of a safetensors file, and checks it against the format and the file's length."""

import json
import math
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Supported types of weights, as named by safetensors.
DTYPES = {"F16", "BF16", "F32"}
#: Largest size of a header in bytes, as in the safetensors library.
_MAX_HEADER = 100_000_000
#: Bytes per number of each supported type.
_SIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_SIZES |= dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1)
_CORRUPT = "is no safetensors file: its header is corrupt"


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """The header's entry for one tensor."""

    #: Its type, such as F32.
    dtype: str
    #: Its shape.
    shape: list[int]
    #: Its first and last byte, relative to the end of the header.
    begin: int
    end: int

    @classmethod
    def of(cls, entry: Any) -> "StoredTensor":
        """Parse an entry of the header.

        Raises:
            ValueError, TypeError, KeyError: the entry is invalid.
        """
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or not isinstance(shape, list) or not all(map(_is_count, [*shape, begin, end])):
            raise ValueError
        if not _is_count(math.prod(shape)):
            raise ValueError
        return cls(dtype=dtype, shape=shape, begin=begin, end=end)


def file_problem(file: Path) -> str | None:
    """Return the first problem of a safetensors file as a predicate, such as "is missing"; None if it is valid."""
    found = read_header(file)
    return found if isinstance(found, str) else None


def read_header(file: Path) -> dict[str, StoredTensor] | str:
    """Read the header of a safetensors file: its tensors, or the file's problem."""
    try:
        # Reading a pipe would block.
        if not stat.S_ISREG(file.stat().st_mode):
            return "is not a regular file"
        with file.open("rb") as opened:
            start = opened.read(8)
            if start == b"version ":
                return "is a Git LFS pointer, not the weights"
            length = struct.unpack("<Q", start)[0]
            if length > _MAX_HEADER:
                return _CORRUPT
            text = opened.read(length)
            size = opened.seek(0, 2)
        header = json.loads(text.decode())
        about = header.get("__metadata__") or {}
        if len(text) < length or not all(isinstance(value, str) for value in about.values()):
            return _CORRUPT
        tensors = {name: StoredTensor.of(entry) for name, entry in header.items() if name != "__metadata__"}
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except (struct.error, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return _CORRUPT
    return _problem(tensors, size, 8 + length) or tensors


def _problem(tensors: dict[str, StoredTensor], size: int, start: int) -> str | None:
    """Return the first problem of tensors that start at byte `start` of a file of `size` bytes."""
    if not tensors:
        return "holds no weights"
    end = start + max(tensor.end for tensor in tensors.values())
    if size != end:
        return f"is {size:,} bytes long where its header says {end:,}"
    dtypes = {tensor.dtype for name, tensor in tensors.items() if not name.endswith("position_ids")}
    if not dtypes <= DTYPES:
        return f"holds weights as {', '.join(sorted(dtypes - DTYPES))}"
    # The format: each tensor starts where the previous one ends, with the size of its type and shape.
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != at:
            return f"is no safetensors file: its header has {name} begin at byte {tensor.begin:,} in place of {at:,}"
        at += math.prod(tensor.shape) * _SIZES.get(tensor.dtype, 1)
        if tensor.end != at:
            return (
                f"is no safetensors file: its header gives {name} {tensor.end - tensor.begin:,} bytes where "
                f"{tensor.dtype} {tensor.shape} takes {at - tensor.begin:,}"
            )
    return None


def _is_count(number: Any) -> bool:
    return type(number) is int and 0 <= number < 2**63
