"""The header of a safetensors file, held against the format and the file's length. Knows no models, no torch."""

import json
import math
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: What safetensors calls the types that weights are cast from.
DTYPES = {"F16", "BF16", "F32"}
#: Bytes of a header at most, as in the safetensors library.
_MAX_HEADER = 100_000_000
#: Bytes of a number of each type; the others of the format are not for us.
_SIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_SIZES |= dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1)
_CORRUPT = "is no safetensors file: its header is corrupt"


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """What a header says of one tensor."""

    #: Its type, such as F32.
    dtype: str
    #: Its sizes along each axis.
    shape: list[int]
    #: Where it begins and ends, in bytes from the end of the header.
    begin: int
    end: int

    @classmethod
    def of(cls, entry: Any) -> "StoredTensor":
        """Read an entry of the header.

        Raises:
            ValueError, TypeError, KeyError: it is none.
        """
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or not isinstance(shape, list) or not all(map(_is_count, [*shape, begin, end])):
            raise ValueError
        if not _is_count(math.prod(shape)):
            raise ValueError
        return cls(dtype=dtype, shape=shape, begin=begin, end=end)


def file_problem(file: Path) -> str | None:
    """Say the first thing that is wrong with a safetensors file: what it is, is not or does; None when it is whole."""
    found = read_header(file)
    return found if isinstance(found, str) else None


def read_header(file: Path) -> dict[str, StoredTensor] | str:
    """Read the header of one safetensors file: what it says of each tensor, or what is wrong with the file."""
    try:
        # A pipe would be waited for.
        if not stat.S_ISREG(file.stat().st_mode):
            return "is no regular file"
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
    """Say what is wrong with tensors that begin at `start` of a file of `size` bytes."""
    if not tensors:
        return "holds no weights"
    end = start + max(tensor.end for tensor in tensors.values())
    if size != end:
        return f"is {size:,} bytes long where its header says {end:,}"
    dtypes = {tensor.dtype for name, tensor in tensors.items() if not name.endswith("position_ids")}
    if not dtypes <= DTYPES:
        return f"holds weights as {', '.join(sorted(dtypes - DTYPES))}"
    # The format: each tensor begins where the one before ends, and is as long as its type and shape make it.
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
